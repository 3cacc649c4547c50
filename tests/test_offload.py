"""offload_activations: the same bits, the same errors, less memory, and nothing left."""

import copy
import functools
import gc
import queue
import re
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
from helpers.data import random_numbers, same_bits, same_tree
from helpers.saving import batch_of, chain, narrow
from helpers.streams import CopySide, eventually, finish_all, side, stays_false
from helpers.threads import spawn
from torch import nn
from torch.utils.checkpoint import checkpoint

import streamlap
from streamlap import offload_activations
from streamlap.training import offloaded
from streamlap.training.memory import MemoryRef

SCHEDULES = ("lazy", "eager", "starve(0)", "starve(1)", "random(1)", "random(2)")


@pytest.fixture(params=["wide", "narrow"])
def windows(request, monkeypatch):
    """As they are, where small tensors never fill them; and so that each step is forced."""
    if request.param == "narrow":
        narrow(monkeypatch)


class Layer(nn.Module):
    """What transformers save: views, a common product of three, norms, an attention."""

    def __init__(self, d=16, heads=2):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.register_buffer("scale", torch.full((4, 6, d), 1.5))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )
        a = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d)) * self.scale
        return x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(self.n2(x))), 0.1))


def model_of(where, layers=2):
    torch.manual_seed(11)
    return nn.Sequential(*(Layer() for _ in range(layers)), nn.Linear(16, 5)).to(where)


def gradients(where, context, forward=None, steps=1, backward_inside=False, layers=2):
    """Losses, gradients and parameters of some steps."""
    model = model_of(where, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with context:
            output = (forward or (lambda model, x: model(x)))(model, batch_of(where, step))
            loss = output.float().square().mean()
            del output
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]
    return [tensor.cpu() for tensor in seen]


# -- the same bits


def test_fifty_steps_of_training_are_those_of_the_plain_loop(where, windows, nothing_left):
    offload = offload_activations(min_bytes=1)
    ours = gradients(where, offload, steps=50, layers=1)
    assert same_tree(gradients(where, torch.enable_grad(), steps=50, layers=1), ours)
    stats = offload.stats()
    assert stats["moved"] >= 50 * 8
    assert stats["shared"] > 0
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)


def test_backward_may_run_in_the_block(where, windows, nothing_left):
    offload = offload_activations(min_bytes=1)
    ours = gradients(where, offload, steps=2, backward_inside=True)
    assert same_tree(gradients(where, torch.enable_grad(), steps=2), ours)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bits_are_the_same_in_every_schedule(schedule, monkeypatch):
    narrow(monkeypatch)
    expected = gradients("cpu", torch.enable_grad())
    with streamlap.use_runtime("sim", schedule=schedule):
        offload = offload_activations(min_bytes=1)
        assert same_tree(gradients("cpu", offload), expected)
        assert offload.stats()["fetched"] > 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(where, windows, reentrant, nothing_left):
    def forward(model, x):
        x = x.requires_grad_() * 1.0
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    expected = gradients(where, torch.enable_grad(), forward)
    for inside in (False, True):
        offload = offload_activations(min_bytes=1)
        assert same_tree(gradients(where, offload, forward, 1, inside), expected)
        # The inputs of the checkpoints and no more: what is computed anew is needed at once.
        assert 2 <= offload.stats()["moved"] <= 6


def sparse_product(x):
    return torch.sparse.mm(torch.eye(8, device=x.device).to_sparse(), x)


def compressed_product(x):
    return torch.eye(8, device=x.device).to_sparse_csr() @ x


def nested_layer(x):
    nested = torch.nested.as_nested_tensor([x[:3], x[3:]])
    return torch.nested.to_padded_tensor(torch.relu(nested), 0.0)


def jagged_layer(x):
    nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.jagged)
    return torch.sin(nested).values()


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype stage)")
@pytest.mark.parametrize(
    "operation", [sparse_product, compressed_product, nested_layer, jagged_layer]
)
def test_tensors_that_are_not_dense_stay(where, operation, nothing_left):
    start = random_numbers((8, 4), where=where)

    def gradient(block):
        x = start.clone().requires_grad_()
        with block:
            loss = operation(x * 2).square().sum()
        loss.backward()
        return x.grad

    offload = offload_activations(min_bytes=1)
    assert same_bits(gradient(torch.enable_grad()), gradient(offload))
    assert offload.stats()["stayed"] >= 1


def compiled_step(model, block, grads=None):
    """Gradients of steps that Dynamo sees, hooks included."""

    def step(x):
        with block:
            loss = model(x).square().sum()
        loss.backward()

    compiled = torch.compile(step, backend="aot_eager")
    seen = []
    for size in range(4, 8):
        model.zero_grad()
        compiled(torch.linspace(-1, 1, size * 16).reshape(size, 16))
        seen += [p.grad for p in model.parameters()]
        if grads is not None:
            assert same_tree(grads.result(), {n: p.grad for n, p in model.named_parameters()})
    torch._dynamo.reset()
    return seen


@pytest.mark.parametrize("gradients", [False, True])
def test_a_compiled_step_with_the_block_in_it(gradients):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))
    expected = compiled_step(model, torch.enable_grad())
    grads = streamlap.stream_gradients(model) if gradients else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offload = offload_activations(min_bytes=1)
        assert same_tree(expected, compiled_step(model, offload, grads))
    assert offload.stats()["moved"] > 0
    if grads is not None:
        grads.close()


def test_under_autocast(where, windows, nothing_left):
    def forward(model, x):
        with torch.autocast(torch.device(where).type, torch.bfloat16):
            return model(x)

    expected = gradients(where, torch.enable_grad(), forward)
    offload = offload_activations(min_bytes=1)
    assert same_tree(gradients(where, offload, forward), expected)
    assert offload.stats()["moved"] > 20


def test_two_backwards_through_one_graph(where, windows, nothing_left):
    def twice(context):
        model = model_of(where)
        with context:
            torch.manual_seed(0)
            loss = model(batch_of(where)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad.cpu() for p in model.parameters()]

    expected = twice(torch.enable_grad())
    offload = offload_activations(min_bytes=1)
    assert same_tree(twice(offload), expected)
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)


def test_second_derivatives(where, windows):
    def second(context):
        x = batch_of(where).requires_grad_()
        with context:
            y = (x * 2).tanh().exp()
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = first.square().sum()
        return torch.autograd.grad(loss, x)[0].cpu()

    assert same_bits(second(offload_activations(min_bytes=1)), second(torch.enable_grad()))


@pytest.mark.parametrize("left", [False, True])
def test_a_write_before_second_derivatives_is_noticed(where, left):
    x = batch_of(where).requires_grad_()
    copies = CopySide(where)
    finish_all(where)
    gate = None if left else copies.hold()
    with offload_activations(min_bytes=1):
        h = x * 2
        y = h.sin()
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first.sum(), x)
    if gate is not None:
        gate.open()


def test_parts_of_a_graph_in_any_order(where, windows, nothing_left):
    def parts(context):
        x = batch_of(where).requires_grad_()
        with context:
            h = [x * 1.5]
            for _ in range(9):
                h.append((h[-1] * 1.1).tanh())
            losses = [layer.exp().sum() for layer in h]
            del losses[4]  # never asked for
        found = []
        for index in (3, 0, 7, 5, 1):
            found += torch.autograd.grad(losses[index], x, retain_graph=True)
        return [g.cpu() for g in found]

    expected = parts(torch.enable_grad())
    assert same_tree(parts(offload_activations(min_bytes=1)), expected)


class SavesViews(torch.autograd.Function):
    """Saves a slice and a view with gaps of one tensor."""

    @staticmethod
    def forward(ctx, x, labels):
        ctx.save_for_backward(x[:, 1:], x[:, ::2], labels[1:])
        return x.sum() + labels.sum()

    @staticmethod
    def backward(ctx, g):
        tail, even, labels = ctx.saved_tensors
        found = torch.zeros(tail.shape[0], tail.shape[1] + 1, device=tail.device)
        found[:, 1:] += tail
        found[:, ::2] += 3 * even
        found[0, 1 : 1 + labels.numel()] += labels
        return g * found, None


def test_slices_whose_source_is_gone(where, windows, nothing_left):
    def run(context):
        x = batch_of(where).view(24, 16).requires_grad_()
        labels = torch.arange(9, device=where)
        with context:
            h = x * 2
            loss = SavesViews.apply(h, labels)
            del h, labels
            gc.collect()
            filler = [torch.full((24, 16), -7.0, device=where) for _ in range(4)]
        loss.backward()
        del filler
        return x.grad.cpu()

    offload = offload_activations(min_bytes=1)
    assert same_bits(run(offload), run(torch.enable_grad()))


@pytest.mark.parametrize(
    "make",
    [
        lambda h: h.t() * h.t(),
        lambda h: h[2:5].exp() * h[2:5],
        lambda h: h[:, ::3].exp() * h[:, ::3],
        lambda h: h[0, 0].exp() * h[0, 0],
        lambda h: h[:0].exp() * h[:0],
        lambda h: h[:1].expand(8, -1) * h[:1].expand(8, -1),
        lambda h: torch.view_as_complex(h.view(24, 8, 2)).conj().mul(2j).abs(),
        lambda h: h.double().tanh() * 2,
        lambda h: h.bfloat16().tanh().float() * h,
        lambda h: h.view(24, 4, 4).permute(2, 0, 1).exp(),
        lambda h: h.unfold(1, 4, 1).exp(),
        lambda h: torch.cat([c.exp() for c in h.chunk(6)]) * h,
        lambda h: torch.cat([c.exp() for c in h.chunk(4, 1)], 1) * h,
    ],
)
def test_layouts_and_dtypes(where, monkeypatch, make):
    narrow(monkeypatch)

    def run(context):
        x = batch_of(where).view(24, 16).requires_grad_()
        with context:
            loss = make(x * 1.25).sum()
        loss.backward()
        return x.grad.cpu()

    assert same_bits(run(offload_activations(min_bytes=1)), run(torch.enable_grad()))


def test_a_tensor_comes_back_with_its_strides(where, monkeypatch):
    narrow(monkeypatch)
    seen = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *views):
            ctx.save_for_backward(*views)
            return views[0].sum()

        @staticmethod
        def backward(ctx, g):
            seen.append([(t.shape, t.stride(), t.dtype, t.device) for t in ctx.saved_tensors])
            return (None,) * len(ctx.saved_tensors)

    def run(context):
        with context:
            h = batch_of(where).requires_grad_() * 2
            q, k, v = h.view(24, 16)[:, :15].view(24, 3, 5).unbind(1)
            Saves.apply(q, k, v, h.transpose(0, 2), h[1], h[..., 1:9]).backward()

    run(torch.enable_grad())
    run(offload_activations(min_bytes=1))
    assert seen[0] == seen[1]


# -- what moves, once


def test_what_shares_memory_is_copied_once(where):
    x = batch_of(where).requires_grad_()
    offload = offload_activations(min_bytes=1)
    with offload:
        h = x * 2
        y = h * h  # twice the same
        z = h.view(24, 16) * h.view(24, 16).t().t()  # the same bytes, other shapes
        w = h.permute(2, 0, 1).sin()
    assert offload.stats()["shared"] == 4
    assert offload.stats()["moved"] == 1
    (y.sum() + z.sum() + w.sum()).backward()
    assert offload.stats()["fetched"] <= 1
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)


def test_three_parts_of_one_product_are_copied_once(where):
    x = batch_of(where).requires_grad_()
    offload = offload_activations(min_bytes=1)
    with offload:
        q, k, v = (x * 2).view(24, 16)[:, :15].view(24, 3, 5).unbind(1)
        y = q.sin() + k.cos() + v.tanh() * 0
        del q, k, v
    stats = offload.stats()
    assert stats["moved"] == 2  # the product's memory, and tanh's result
    assert stats["shared"] == 1
    y.sum().backward()


def test_memory_that_was_written_between_two_savings_is_copied_twice(where):
    x = batch_of(where).requires_grad_()
    offload = offload_activations(min_bytes=1)
    with offload:
        h = x * 2
        y = h.exp().detach() + 0 * h
        first = h * h
        h.add_(1)
        second = h * h
    assert offload.stats()["moved"] == 3
    (grad,) = torch.autograd.grad(second.sum(), x)
    assert torch.equal(grad, 2 * 2 * (x * 2 + 1).detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()
    del y


def test_an_address_that_is_given_again_brings_no_wrong_bytes(where, monkeypatch, nothing_left):
    narrow(monkeypatch, 0)  # each has left before the next is made
    addresses = []
    array = np.empty((4, 6, 16), np.float32)

    def run(context):
        x = batch_of(where).requires_grad_()
        loss = 0
        with context:
            for step in range(30):
                h = x * (step + 1)
                if where == "cpu":  # a GPU's allocator gives memory again by itself
                    h.data = torch.from_numpy(array).copy_(h.detach())
                addresses.append(h.data_ptr())
                loss = loss + (h.sin() * (step + 2)).sum()
                del h
        loss.backward()
        return x.grad.cpu()

    expected = torch.zeros(4, 6, 16)
    for step in range(30):  # one at a time, or they would have written to each other's memory
        x = batch_of("cpu").requires_grad_()
        ((x * (step + 1)).sin() * (step + 2)).sum().backward()
        expected += x.grad
    offload = offload_activations(min_bytes=1)
    assert torch.allclose(run(offload), expected, rtol=1e-4, atol=1e-3)
    assert offload.stats()["moved"] == 30
    assert len(set(addresses)) < 30  # or nothing was shown


def test_a_tensor_whose_data_was_swapped_is_copied_again(where):
    """Another counter may stand at the same number: it is the tensor that counts."""
    x = batch_of(where).requires_grad_()
    offload = offload_activations(min_bytes=1)
    with offload:
        h = x * 2
        y = h.sin()
        other = h.detach() * 3
        h.data = other
        z = h.cos()
        expected = -h.detach().sin() * 2
    assert offload.stats()["moved"] == 2
    (grad,) = torch.autograd.grad(z.sum(), x)
    assert torch.allclose(grad, expected)
    del y


def test_memory_with_two_counters_is_copied_for_each(where, monkeypatch):
    narrow(monkeypatch, 0)
    x = batch_of(where).requires_grad_()
    with offload_activations(min_bytes=1):
        h, g = x * 2, x * 3
        y = h.sin()
        h.data.mul_(5)  # which h's counter does not see
        g.data = h.data  # and g's stands where h's stood
        z = g.cos()
        expected = -g.detach().sin() * 3
    (grad,) = torch.autograd.grad(z.sum(), x)
    assert torch.allclose(grad, expected)
    del y


def test_parameters_buffers_inputs_and_their_views_stay(where):
    layer = nn.Linear(16, 16, bias=False).to(where)
    norm = nn.BatchNorm1d(16).to(where).eval()
    table = torch.ones(24, 16, device=where)
    x = batch_of(where).view(24, 16).requires_grad_()
    offload = offload_activations(min_bytes=1)
    with offload:
        a = layer(x)
        b = x @ layer.weight.t()
        c = x @ layer.weight.view(4, 64).view(16, 16)
        d = norm(x) * table * x.detach()
        e = torch.nn.functional.linear(x[:4], layer.weight[:8])
    assert offload.stats()["moved"] == 0
    assert offload.stats()["stayed"] >= 10
    assert b.grad_fn._saved_mat2.data_ptr() == layer.weight.data_ptr()
    (a.sum() + b.sum() + c.sum() + d.sum() + e.sum()).backward()


def test_the_caller_says_what_stays(where):
    x = batch_of(where).requires_grad_()
    asked = []

    def keep(tensor):
        asked.append(tensor.numel())
        return tensor.numel() > 100

    offload = offload_activations(min_bytes=4 * 24 + 1, keep=keep)
    with offload:
        (x * 2).sin()
        (x[0] * 2).sin()  # 96 numbers
        (x[0, 0] * 2).sin()  # 16, too small to be asked about
    assert asked == [384, 96]
    assert offload.stats()["moved"] == 1

    class Boom(Exception):
        pass

    def fails(tensor):
        raise Boom

    with pytest.raises(Boom), offload_activations(min_bytes=1, keep=fails):
        (x * 2).sin()
    with offload_activations(min_bytes=1) as again:
        (x * 2).sin()
    assert again.stats()["moved"] == 1


def test_a_budget_is_kept(where, windows, nothing_left):
    expected = gradients(where, torch.enable_grad(), steps=3)
    offload = offload_activations(budget=20_000, min_bytes=1)
    assert same_tree(gradients(where, offload, steps=3), expected)
    stats = offload.stats()
    assert 10_000 < stats["peak_bytes"] <= 20_000
    assert stats["moved_bytes"] > 40_000  # in each step anew
    none = offload_activations(budget=0, min_bytes=1)
    assert same_tree(gradients(where, none, steps=3), expected)
    assert none.stats()["moved"] == 0


def test_a_copy_that_fails_is_told_to_who_needs_it():
    class Copy:
        def exception(self):
            return KeyError("mine")

    class Memory:
        out = Copy()
        nbytes = 1

    memory = Memory()
    leaving = offloaded.Leaving(memory)
    with pytest.raises(KeyError, match="mine"):
        leaving.wait_until_left()
    leaving.orphan = memory.out
    del memory
    leaving.wait_until_left()


def test_a_full_pool_lets_activations_stay(where, monkeypatch, nothing_left):
    expected = gradients(where, torch.enable_grad())
    to_cpu, calls = streamlap.to_cpu, []

    def sometimes(tensor, **how):
        calls.append(1)
        if len(calls) % 2:
            raise streamlap.PoolExhausted("full", 1, 1)
        return to_cpu(tensor, **how)

    monkeypatch.setattr(streamlap, "to_cpu", sometimes)
    offload = offload_activations(min_bytes=1)
    with pytest.warns(UserWarning, match="pinned pool is full") as warned:
        assert same_tree(gradients(where, offload), expected)
    assert len(warned) == 1
    assert offload.stats()["moved"] == len(calls) // 2
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)


# -- the errors of autograd


def written_output(x, layer):
    y = (x * 2).exp()
    z = y.sum()
    y.add_(1)
    return z


def written_input(x, layer):
    h = x * 2
    y = h * h
    h.mul_(3)
    return y.sum()


def written_and_gone(x, layer):
    h = x * 2
    y = h.sin().sum()
    h.view(-1).mul_(3)
    del h
    return y


def written_parameter(x, layer):
    y = layer(x * 2).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    return y


def written_view_of_a_parameter(x, layer):
    y = (x * 2) @ layer.weight.t()[:, :3]
    with torch.no_grad():
        layer.weight.zero_()
    return y.sum()


def written_buffer(x, layer):
    table = torch.ones_like(x)
    y = (x * table).sum()
    table.add_(1)
    return y


WRITES = [
    *(written_output, written_input, written_and_gone, written_parameter),
    *(written_view_of_a_parameter, written_buffer),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("anomaly", [False, True])
def test_a_saved_tensor_that_was_written_raises_as_without(
    where, monkeypatch, write, anomaly, nothing_left
):
    if anomaly:
        narrow(monkeypatch)

    def message(context):
        x = batch_of(where).requires_grad_()
        layer = nn.Linear(16, 16).to(where)
        with context:
            loss = write(x, layer)
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
        # The name of the operation is another one after the write, and spelt as the version likes.
        words = re.sub(r", which is output \d+ of [\w:]+,", "", str(raised.value))
        return words.split(" Hint: ")[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(anomaly, check_nan=False):
            expected = message(torch.enable_grad())
            assert "modified by an inplace operation" in expected
            assert message(offload_activations(min_bytes=1)) == expected


def test_a_second_backward_without_retaining_raises_as_without(where):
    with offload_activations(min_bytes=1):
        loss = (batch_of(where).requires_grad_() * 2).sin().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_an_error_in_the_block_leaves_nothing(where, windows, nothing_left):
    class Boom(Exception):
        pass

    offload = offload_activations(min_bytes=1)
    model = model_of(where)

    def fails():
        with offload:
            model(batch_of(where)).sum()
            raise Boom

    with pytest.raises(Boom):
        fails()
    gc.collect()
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)
    before = offload.stats()["moved"]
    loss = model(batch_of(where)).square().mean()  # no hooks are left
    assert offload.stats()["moved"] == before
    loss.backward()


def test_an_error_in_backward_leaves_nothing(where, windows, nothing_left):
    x = batch_of(where).requires_grad_()
    offload = offload_activations(min_bytes=1)
    for _ in range(3):
        with offload:
            h = x * 2
            for _ in range(6):
                h = h.sin()
            h.register_hook(lambda g: g)
            h = written_input(h, None)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            h.backward()
        del h
        gc.collect()
        assert eventually(lambda: offload.stats()["held_bytes"] == 0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"budget": -1}, streamlap.InvalidArgument),
        ({"budget": "show"}, streamlap.InvalidArgument),
        ({"budget": "HIDE"}, streamlap.InvalidArgument),
        ({"budget": "12 parsecs"}, streamlap.InvalidArgument),
        ({"budget": 1.5}, streamlap.InvalidType),
        ({"budget": True}, streamlap.InvalidType),
        ({"min_bytes": -1}, streamlap.InvalidArgument),
        ({"min_bytes": None}, streamlap.InvalidType),
        ({"keep": 3}, streamlap.InvalidType),
    ],
)
def test_wrong_arguments_are_refused(arguments, error):
    with pytest.raises(error):
        offload_activations(**arguments)


# -- memory


def test_the_activations_leave_the_device(where, monkeypatch):
    narrow(monkeypatch, 2)
    x = batch_of(where).requires_grad_()

    def alive(context):
        made = []
        with context:
            h = x * 2
            for _ in range(12):
                h = h.sin()
                made.append(MemoryRef(h.untyped_storage()))
            loss = h.sum()
            del h
            count = sum(ref.alive() for ref in made)
        loss.backward()
        return count

    assert alive(torch.enable_grad()) == 11  # the last one's cosine is of the one before
    finish_all(where)
    assert alive(offload_activations(min_bytes=1)) <= 4


@pytest.mark.gpu
def test_the_peak_on_the_device_falls():
    where = "cuda:0"

    def peak(context):
        gc.collect()
        x = torch.rand(64, 1 << 16, device=where, requires_grad=True)  # 16 MiB
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with context:
            h = x * 2
            for _ in range(160):
                h = h.sin()
            loss = h.sum()
            del h
        loss.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(offload_activations()) < 0.5 * peak(torch.enable_grad())


def test_memory_is_flat_over_a_thousand_steps(where):
    x = torch.rand(8, 64, device=where, requires_grad=True)
    offload = offload_activations(min_bytes=1)

    def step():
        with offload:
            loss = (x * 2).sin().exp().tanh().sum()
        loss.backward()
        x.grad = None
        finish_all(where)  # or it would depend on how far the host is ahead
        assert eventually(lambda: streamlap.pool_stats(where)["live"] == held)

    def figures():
        stats = streamlap.pool_stats(where)
        on_device = torch.cuda.memory_reserved(where) if where != "cpu" else 0
        return stats["reserved"], stats["live_blocks"], on_device, len(offload._all)

    held = streamlap.pool_stats(where)["live"]
    for _ in range(100):
        step()
    before = figures()
    for _ in range(900):
        step()
    assert figures() == before
    assert offload.stats()["moved"] == 3000
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)


@pytest.mark.parametrize("bounded", ["budget", "window"])
def test_graphs_that_are_dropped_while_they_are_copied_are_counted(bounded, monkeypatch):
    narrow(monkeypatch, 2)
    x = torch.ones(1024, requires_grad=True)
    with streamlap.use_runtime("sim", schedule="lazy"):
        offload = offload_activations(8 << 10 if bounded == "budget" else None, min_bytes=1)
        most = 0
        for _ in range(100):
            with offload:
                (x * 1).tanh().tanh()
            most = max(most, streamlap.pool_stats("cpu")["live"])
        # Two of 4 kB in the budget; or two in the window, and the one that is being sent.
        assert 4 << 10 <= most <= (8 if bounded == "budget" else 12) << 10
        stats = offload.stats()
        assert most <= stats["peak_bytes"] <= 12 << 10
        assert stats["moved"] > 2


@pytest.mark.parametrize("how", ["fails", "outside"])
def test_what_was_fetched_goes_with_its_graph(where, how, nothing_left):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            out = h * 2
            ctx.save_for_backward(h)
            return out

        @staticmethod
        def backward(ctx, _grad):
            ctx.saved_tensors[0].sum()
            raise KeyError("mine")

    x = torch.rand(1 << 16, device=where, requires_grad=True)
    live = streamlap.pool_stats(where)["live"]
    offload = offload_activations(min_bytes=1)
    with offload:
        h = x
        for _ in range(12):
            h = h.exp().neg()
        y = Fails.apply(h)
    finish_all(where)
    for memory in list(offload._all.values()):
        assert eventually(memory.left)
        memory.source = None  # as if there were much
    del memory
    if how == "fails":
        with pytest.raises(KeyError):
            y.sum().backward()
    else:
        assert h.grad_fn.next_functions[0][0]._saved_result.numel() == 1 << 16
    assert offload.stats()["fetched"] > 0
    del h, y
    gc.collect()
    finish_all(where)
    assert eventually(lambda: streamlap.pool_stats(where)["live"] == live)
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)


def test_what_is_noted_of_fetched_tensors_does_not_grow(where, monkeypatch):
    x = batch_of(where).requires_grad_()
    narrow(monkeypatch, 1)
    monkeypatch.setattr(offloaded, "BYTES", 1 << 30)  # never full
    offload = offload_activations(min_bytes=1)
    for _ in range(20):
        with offload:
            loss = chain(x)
        finish_all(where)
        for memory in list(offload._all.values()):
            memory.out.result()
            memory.source = None
        del memory
        loss.backward()
    assert offload.stats()["fetched"] >= 20 * 6
    assert len(offload._here) <= 14


def test_a_copy_of_the_object_has_the_same_arguments_and_moved_nothing():
    keep = SCHEDULES.count
    for budget in (None, 1 << 20, "hide"):
        offload = offload_activations(budget, min_bytes=7, keep=keep)
        with offload:
            (torch.ones(8, requires_grad=True) * 2).sin()
        for other in (copy.copy(offload), copy.deepcopy(offload)):
            assert other.stats()["moved"] == other.stats()["stayed"] == 0
            assert (other._budget, other._least, other._keep) == (
                None if budget == "hide" else budget,
                7,
                keep,
            )
            assert (other._pace is None) == (budget != "hide")


def test_a_block_that_was_not_entered_is_no_block():
    with pytest.raises(streamlap.InvalidArgument, match="no block"):
        offload_activations().__exit__(None, None, None)
    with pytest.raises(streamlap.InvalidArgument, match='or "hide"'):
        offload_activations("Hide")


def test_a_dropped_graph_gives_everything_back(where, windows, nothing_left):
    offload = offload_activations(min_bytes=1)
    with offload:
        loss = model_of(where)(batch_of(where)).sum()
    assert offload.stats()["held_bytes"] > 0
    gone = weakref.ref(next(iter(offload._all.values())))
    del loss
    gc.collect()
    assert gone() is None
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)


# -- order


@pytest.mark.parametrize("budget", [None, "hide"])
def test_the_host_waits_where_too_much_is_leaving(where, monkeypatch, budget):
    narrow(monkeypatch, 2)
    x = batch_of(where).requires_grad_()
    expected = torch.autograd.grad(chain(x), x)[0]
    offload = offload_activations(budget, min_bytes=1)
    with offload:
        chain(x).backward()
    copies = CopySide(where)
    finish_all(where)
    gate = copies.hold()
    done, errors = [], []

    def forward():
        with offload:
            done.append(chain(x))

    thread = spawn(forward, errors)
    assert stays_false(lambda: done or errors)
    gate.open()
    thread.join()
    assert errors == []
    assert same_bits(torch.autograd.grad(done[0], x)[0], expected)


def test_what_backward_asks_for_at_once_is_not_fetched(where):
    x = batch_of(where).requires_grad_()
    copies = CopySide(where)
    for budget in (None, "hide"):
        offload = offload_activations(budget, min_bytes=1)
        gate = copies.hold()
        with offload:
            loss = chain(x, 2)
        gate.open()
        finish_all(where)
        left = [memory.left for memory in offload._all.values()]
        assert eventually(lambda: all(has() for has in left))  # noqa: B023
        left.clear()
        loss.backward()
        assert offload.stats()["fetched"] == 0


def test_what_stays_for_one_operation_stays_for_all(where):
    x = batch_of(where).requires_grad_()
    offload = offload_activations(2 * x.nbytes, min_bytes=1)
    with offload:
        held = [(x * 2).sin().sum() for _ in range(2)]  # the budget is used up
        h = x * 3
        first = h.sin().sum()
        del held
        gc.collect()
        assert eventually(lambda: offload.stats()["held_bytes"] == 0)
        second = h.cos().sum()
        third = (x * 4).sin().sum()
    assert offload.stats()["moved"] == 3
    (first + second + third).backward()


def test_what_a_backward_has_used_is_not_fetched_again(where, monkeypatch):
    """A node may save several tensors, and keeps all of them until it has run."""
    narrow(monkeypatch, 4)
    model, x = model_of(where), batch_of(where)
    offload = offload_activations(min_bytes=1)
    with offload:
        loss = model(x).sum()
    for keep in (True, False):  # the second backward fetches what the first has used
        before = offload.stats()["fetched"]
        loss.backward(retain_graph=keep)
        assert 10 < offload.stats()["fetched"] - before <= offload.stats()["moved"]


def test_what_has_not_left_yet_is_used_as_it_is(where):
    x = batch_of(where).requires_grad_()
    expected = torch.autograd.grad(chain(x), x)[0]
    offload = offload_activations(min_bytes=1)
    copies = CopySide(where)
    finish_all(where)
    gate = copies.hold()
    with offload:
        loss = chain(x)  # wide windows: nothing has to leave
    found = torch.autograd.grad(loss, x)[0]
    gate.open()
    assert same_bits(found, expected)
    assert offload.stats()["fetched"] == 0


def test_what_was_used_while_it_was_copied_is_let_go_of_in_backward(where):
    """Not only at its end: what forward saves last, as the logits, may be the largest of all."""
    x = batch_of(where).requires_grad_()
    offload = offload_activations(min_bytes=1)
    copies = CopySide(where)
    finish_all(where)
    gate = copies.hold()
    made, alive = [], []

    def copies_end(_grad):
        alive.append(sum(ref.alive() for ref in made[4:]))
        gate.open()
        copies.native.synchronize()

    with offload:
        h = x * 2
        for index in range(8):
            h = h.sin()
            made.append(MemoryRef(h.untyped_storage()))
            if index == 3:
                h.register_hook(copies_end)
            if index == 1:
                h.register_hook(lambda _grad: alive.append(sum(r.alive() for r in made[4:])))
        loss = h.sum()
        del h
    loss.backward()
    assert alive == [3, 0]  # the last one's cosine is of the one before


def test_a_backward_asks_for_few_of_what_is_still_leaving(monkeypatch):
    asked = []
    left = offloaded.Leaving.left
    monkeypatch.setattr(offloaded.Leaving, "left", lambda self: [asked.append(1), left(self)][1])
    x = torch.ones(64, requires_grad=True)
    with streamlap.use_runtime("sim", schedule="lazy"):  # no copy ends before somebody waits
        offload = offload_activations(min_bytes=1)
        with offload:
            loss = chain(x, 300)
        asked.clear()
        loss.backward()
        assert offload.stats()["fetched"] == 0
    assert len(asked) < 3 * 300


def test_a_producer_that_is_late_is_waited_for(where, monkeypatch):
    """The copy follows the stream that makes the tensor, however late that one is."""
    x = random_numbers((64, 64), where=where).requires_grad_()
    expected = torch.autograd.grad(chain(x), x)[0]
    stream = side(where, "producer")
    offload = offload_activations(min_bytes=1)
    with stream.current(), offload:
        chain(x).backward()
    x.grad = None
    finish_all(where)
    gate = stream.hold()
    with stream.current():
        with offload:
            loss = chain(x)
        gate.open()
        narrow(monkeypatch)
        with offload:  # and with everything forced out
            loss = loss + chain(x)
        loss.backward()
        stream.sync()
    assert torch.allclose(x.grad, 2 * expected)


class Asked:
    """A transfer to the host that notes who asks for its result."""

    def __init__(self, transfer, log):
        self.transfer, self.log = transfer, log

    def __getattr__(self, name):
        return getattr(self.transfer, name)

    def result(self):
        self.log.append(threading.get_ident())
        return self.transfer.result()


def test_whoever_fetches_asks_for_itself_whether_the_bytes_are_there(monkeypatch):
    """Backward may run in another thread, which knows nothing of what forward's has seen."""
    narrow(monkeypatch)
    x = batch_of("cpu").requires_grad_()
    to_cpu, log = streamlap.to_cpu, []
    monkeypatch.setattr(streamlap, "to_cpu", lambda tensor, **how: Asked(to_cpu(tensor), log))
    with offload_activations(min_bytes=1) as offload:
        loss = chain(x)
    log.clear()
    torch.autograd.grad(loss, x)
    assert len(log) == offload.stats()["fetched"] > 0


def test_backward_in_another_thread(monkeypatch):
    narrow(monkeypatch)
    x = batch_of("cpu").requires_grad_()
    expected = torch.autograd.grad(chain(x), x)[0]
    todo, done, errors = queue.Queue(), [], []

    def backward():  # started before: nobody hands over what the other thread knows
        loss = todo.get()
        done.extend(torch.autograd.grad(loss, x))

    thread = spawn(backward, errors)
    with offload_activations(min_bytes=1):
        todo.put(chain(x))
    thread.join()
    assert errors == []
    assert same_bits(done[0], expected)


class Pending:
    """A transfer to the device that is never done by itself."""

    def __init__(self, log, tensor):
        self.log, self.tensor = log, tensor.clone()
        log["started"] += 1

    def wait(self):
        return self.tensor

    def done(self):
        return False

    def result(self):
        self.log["waited"] += 1


def test_the_host_is_a_bounded_number_ahead_of_what_comes_back(monkeypatch):
    narrow(monkeypatch, 2)
    x = batch_of("cpu").requires_grad_()
    expected = torch.autograd.grad(chain(x, 20), x)[0]
    log = {"started": 0, "waited": 0, "most": 0}

    def to_device(tensor, device, **how):
        log["most"] = max(log["most"], log["started"] - log["waited"])
        return Pending(log, tensor)

    with offload_activations(min_bytes=1):
        loss = chain(x, 20)
    monkeypatch.setattr(streamlap, "to_device", to_device)
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    assert log["started"] > 15
    assert log["most"] <= 2 * 2 + 1


def test_what_was_saved_before_comes_ahead_of_use(where, monkeypatch):
    narrow(monkeypatch, 3)
    fetched = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            fetched.append(offload.stats()["fetched"])
            return g

    x = batch_of(where).requires_grad_()
    with offload_activations(min_bytes=1) as offload:
        h = x * 2
        for _ in range(12):
            h = Probe.apply(h.sin())
        loss = h.sum()
        del h
    finish_all(where)
    loss.backward()
    # One probe runs before each sine asks for what it has saved. The last three or four of those
    # have not left; from then on there are always four on their way that nobody has asked for.
    assert fetched[0] == 0
    assert all(n >= min(asked, 8) for asked, n in enumerate(fetched))
    assert fetched[-1] <= 12


def test_memory_of_another_stream_is_fetched_anew(monkeypatch):
    narrow(monkeypatch)
    x = batch_of("cpu").requires_grad_()
    expected = torch.autograd.grad(chain(x), x)[0]
    with offload_activations(min_bytes=1) as offload:
        loss = chain(x)
    calls = iter(range(10_000))
    monkeypatch.setattr(offloaded, "_current", lambda device: next(calls))
    assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    assert offload.stats()["fetched"] > 6


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_branches_on_two_streams_are_right(monkeypatch):
    """Saved, copied and asked for on two streams, forward and backward."""
    where = "cuda:0"
    narrow(monkeypatch)
    streams = [torch.cuda.Stream(where) for _ in range(2)]

    def run(context):
        x = batch_of(where).requires_grad_()
        with context:
            parts = []
            for index, stream in enumerate(streams):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)
                    h = x * (index + 2)
                    for _ in range(6):
                        h = h.sin()
                    parts.append(h)
            for stream, part in zip(streams, parts, strict=True):
                torch.cuda.current_stream().wait_stream(stream)
                part.record_stream(torch.cuda.current_stream())
            loss = (parts[0] * parts[1]).sum()
        del parts, h
        loss.backward()
        torch.cuda.synchronize()
        return x.grad.cpu()

    assert same_bits(run(offload_activations(min_bytes=1)), run(torch.enable_grad()))


def test_threads_share_one(where, monkeypatch, nothing_left):
    narrow(monkeypatch)
    offload = offload_activations(min_bytes=1)
    inputs = [batch_of(where, step).requires_grad_() for step in range(3)]
    expected = [torch.autograd.grad(chain(x), x)[0] for x in inputs]
    finish_all(where)
    found, errors = {}, []

    def work(index):
        for _ in range(10):
            with offload:
                loss = chain(inputs[index])
            (found[index],) = torch.autograd.grad(loss, inputs[index])

    threads = [spawn(functools.partial(work, index), errors) for index in range(3)]
    for thread in threads:
        thread.join()
    assert errors == []
    finish_all(where)
    assert all(same_bits(found[index], expected[index]) for index in range(3))
    assert offload.stats()["moved"] == 3 * 10 * 6
    assert eventually(lambda: offload.stats()["held_bytes"] == 0)


def test_blocks_nest(where):
    x = batch_of(where).requires_grad_()
    outer, inner = offload_activations(min_bytes=1), offload_activations(min_bytes=1)
    with outer:
        a = (x * 2).sin()
        with inner:
            b = (a * 2).sin()
            with outer:
                c = (b * 2).sin()
        d = (c * 2).sin()
    assert inner.stats()["moved"] == 1
    assert outer.stats()["moved"] == 3
    d.sum().backward()
    assert eventually(lambda: outer.stats()["held_bytes"] == inner.stats()["held_bytes"] == 0)


@pytest.mark.parametrize("layers", [4, 8])
def test_what_is_about_to_be_used_is_not_given_up_and_fetched_again(where, monkeypatch, layers):
    """Shared tensors are asked for out of order: what was fetched beside them is still wanted."""
    model = model_of(where, layers)
    monkeypatch.setattr(offloaded, "BYTES", 2000)  # one or two of them
    offload = offload_activations(min_bytes=1)
    with offload:
        loss = model(batch_of(where).requires_grad_()).sum()
    loss.backward()
    finish_all(where)
    stats = offload.stats()
    assert stats["shared"] > 0
    assert 0 < stats["fetched"] <= stats["moved"]
