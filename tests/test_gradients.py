"""Gradients on the host: the right bits, in the right step, however backward is used."""

import copy
import gc
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.data import as_bytes, same_bits
from helpers.streams import MOMENT, PATIENCE, CopySide, eventually, finish_all
from torch.utils.checkpoint import checkpoint

import streamlap
from streamlap import GradientsIncomplete, InvalidArgument, InvalidType, stream_gradients

pytestmark = pytest.mark.usefixtures("nothing_left")


class Net(torch.nn.Module):
    """Small and large parameters, a tied one, a frozen one, one that nothing uses, a scalar."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 24)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.head = torch.nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(24), requires_grad=False)

    def forward(self, ids, through=lambda layer, x: layer(x)):
        x = self.embedding(ids) + self.nothing.sum()
        for layer in self.layers:
            x = through(layer, x).tanh() * self.frozen
        return self.head(x * self.scale)


def net(where, seed=0):
    torch.manual_seed(seed)
    return Net().to(where)


def batch(where, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 40, (6, 5), generator=generator).to(where)


def loss_of(model, ids, **options):
    return torch.nn.functional.cross_entropy(model(ids, **options).flatten(0, 1), ids.flatten())


def plain(where, *seeds, **options):
    """The gradients that torch accumulates over these batches."""
    model = net(where)
    for seed in seeds:
        loss_of(model, batch(where, seed), **options).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_grads(result, expected):
    assert list(result) == list(expected)
    assert all(grad.device.type == "cpu" for grad in result.values())
    return all(same_bits(grad, expected[name].cpu()) for name, grad in result.items())


SIZES = [{}, {"min_bytes": 0}, {"min_bytes": 1 << 30, "bucket_bytes": 3000}]


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=["usual", "each", "buckets"])
def test_the_host_has_what_the_device_has(where, free, sizes):
    model = net(where)
    with stream_gradients(model, free=free, **sizes) as grads:
        loss_of(model, batch(where)).backward()
        assert same_grads(grads.result(), plain(where, 1))
        assert "nothing" in grads.result()
        for name, parameter in model.named_parameters():
            gone = free or name in ("unused", "frozen")
            assert (parameter.grad is None) == gone


@pytest.mark.parametrize("free", [False, True])
def test_fifty_steps_are_those_of_the_plain_loop(where, free):
    first, second = net(where), net(where)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for model in (first, second)
    ]
    with stream_gradients(second, free=free, min_bytes=1000) as grads:
        for step in range(50):
            losses = []
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                losses.append(loss_of(model, batch(where, step)))
                losses[-1].backward()
                if model is second and free:
                    for name, grad in grads.result().items():
                        second.get_parameter(name).grad = grad.to(where)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            assert same_bits(*losses)
            if not free:
                assert grads.result().keys() == {
                    n for n, p in first.named_parameters() if p.grad is not None
                }
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("free", [False, True])
def test_passes_of_one_step_add_up_as_on_the_device(where, free, dtype):
    expected, model = net(where).to(dtype), net(where).to(dtype)
    with stream_gradients(model, free=free, min_bytes=2000) as grads:
        for _step in range(2):
            expected.zero_grad()
            model.zero_grad()
            for seed in range(4):
                for one in (expected, model):
                    loss_of(one, batch(where, seed)).backward()
            wanted = {n: p.grad for n, p in expected.named_parameters() if p.grad is not None}
            assert same_grads(grads.result(), wanted)


def test_a_parameter_that_only_one_pass_reaches(where):
    model = net(where)
    with stream_gradients(model, free=True) as grads:
        loss_of(model, batch(where)).backward()
        (model.unused * 3).sum().backward()
        result = grads.result()
    assert same_bits(result["unused"], torch.full((3,), 3.0))
    result.pop("unused")
    assert same_grads(result, plain(where, 1))


def test_another_dtype(where):
    model = net(where)
    with stream_gradients(model, dtype=torch.bfloat16) as grads:
        loss_of(model, batch(where)).backward()
        expected = {name: grad.bfloat16() for name, grad in plain(where, 1).items()}
        assert same_grads(grads.result(), expected)
        assert all(p.grad.dtype is torch.float32 for p in model.parameters() if p.grad is not None)


def test_layouts_of_gradients(where):
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(4, 6, 3).to(where, memory_format=torch.channels_last)
    strided = torch.nn.Parameter(torch.rand(8, 10, device=where)[:, ::2])
    turned = torch.nn.Parameter(torch.rand(5, 7, device=where).t())
    named = [*conv.named_parameters(), ("strided", strided), ("turned", turned)]
    with stream_gradients(named, min_bytes=0) as grads:
        image = torch.rand(2, 4, 8, 8, device=where).to(memory_format=torch.channels_last)
        loss = conv(image).square().sum() + strided.sum() + (turned * turned).sum()
        loss.backward()
        assert same_grads(grads.result(), {name: p.grad for name, p in named})


def test_names(where):
    first, second = (torch.nn.Parameter(torch.rand(3, device=where)) for _ in range(2))
    (first * second).sum().backward()
    grads = [first.grad, second.grad]
    for given, names in (
        ([first, second], ["0", "1"]),
        (iter([("a", first), ("b", second)]), ["a", "b"]),
        ([first, second, first], ["0", "1"]),
        ([("x", first), ("y", first), ("z", second)], ["x", "z"]),
        (torch.nn.ParameterList([first, second, first]), ["0", "1"]),
    ):
        first.grad = second.grad = None
        with stream_gradients(given) as handle:
            (first * second).sum().backward()
            assert same_grads(handle.result(), dict(zip(names, grads, strict=True)))


# -- when a copy is ordered, shown on simulations where nothing moves before somebody waits


@pytest.fixture(params=["lazy", "eager", "random(2)", "starve(0)"])
def simulated(request):
    with streamlap.use_runtime("sim", schedule=request.param) as serving:
        yield serving
        gc.collect()


def overwrite(tensor):
    """Write without a trace in torch's version counter."""
    tensor.detach().numpy().fill(-7)


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_after_backward_gradients_may_be_written(simulated, min_bytes):
    model = net("cpu")
    with stream_gradients(model, min_bytes=min_bytes) as grads:
        loss_of(model, batch("cpu")).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                overwrite(parameter.grad)
        assert same_grads(grads.result(), plain("cpu", 1))


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_a_later_hook_of_the_parameter_may_write(simulated, min_bytes):
    """As an optimizer that runs inside backward does."""
    model = net("cpu")
    with stream_gradients(model, min_bytes=min_bytes) as grads:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: overwrite(p.grad))
        loss_of(model, batch("cpu")).backward()
        assert same_grads(grads.result(), plain("cpu", 1))


def test_an_earlier_hook_has_the_first_word(where):
    def double(parameter):
        parameter.grad.mul_(2)

    model = net(where)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(double)
    with stream_gradients(model) as grads:
        loss_of(model, batch(where)).backward()
        assert same_grads(grads.result(), {n: 2 * g for n, g in plain(where, 1).items()})


def test_a_gradient_that_is_given_up_is_kept_until_it_is_read(simulated):
    model = net("cpu")
    with stream_gradients(model, free=True) as grads:
        loss_of(model, batch("cpu")).backward()
        gc.collect()
        litter = [torch.full((40, 24), -7.0) for _ in range(50)]
        assert same_grads(grads.result(), plain("cpu", 1))
        del litter


def test_small_gradients_travel_together(where, monkeypatch):
    sent = []

    def to_cpu(tree, **options):
        sent.append(len(tree))
        return copied(tree, **options)

    copied = streamlap.to_cpu
    monkeypatch.setattr(streamlap, "to_cpu", to_cpu)
    parameters = [torch.nn.Parameter(torch.rand(100, device=where)) for _ in range(7)]
    parameters.append(torch.nn.Parameter(torch.rand(1000, device=where)))
    with stream_gradients(parameters, min_bytes=4000, bucket_bytes=1200) as grads:
        sum(p.sum() for p in parameters).backward()
        assert len(grads.result()) == 8
    assert sorted(sent) == [1, 1, 3, 3]  # the large one, the last small one, two full buckets


# -- as they arrive


def hold_between(model, where):
    """Return two events: backward is in the middle, and it may go on."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(_grad):
        reached.set()
        assert go_on.wait(PATIENCE)

    def through(layer, x):
        x = layer(x)
        if layer is model.layers[0]:
            x.register_hook(wait)
        return x

    return through, reached, go_on


def test_a_gradient_arrives_while_backward_runs(where):
    model = net(where)
    through, _reached, go_on = hold_between(model, where)
    grads = stream_gradients(model, min_bytes=0)
    seen = []

    def consume(arrivals):
        for name, grad in arrivals:
            seen.append((name, grad))
            if name == "layers.1.weight":
                go_on.set()  # backward is held until this gradient is here

    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(consume, grads.completed())
        loss_of(model, batch(where), through=through).backward()
        work.result(PATIENCE)
    names = [name for name, _grad in seen]
    assert names.index("layers.2.weight") < names.index("layers.1.weight")
    assert names.index("layers.1.weight") < names.index("layers.0.weight")
    expected = plain(where, 1)
    assert dict(seen).keys() == expected.keys()
    assert len(seen) == len(expected)
    assert all(same_bits(grad, expected[name].cpu()) for name, grad in seen)


def test_result_waits_for_a_backward_that_runs(where):
    model = net(where)
    through, reached, go_on = hold_between(model, where)
    grads = stream_gradients(model, min_bytes=0)
    loss = loss_of(model, batch(where), through=through)
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(loss.backward)
        assert reached.wait(PATIENCE)
        try:
            with pytest.raises(streamlap.TransferTimeout, match="backward"):
                grads.result(timeout=MOMENT)
        finally:
            go_on.set()
        result = grads.result(PATIENCE)
        work.result(PATIENCE)
    assert same_grads(result, plain(where, 1))


def test_result_can_time_out_on_a_copy(where):
    model = net(where)
    with stream_gradients(model, free=True) as grads:
        loss_of(model, batch(where)).backward()
        grads.result()
        finish_all(where)
        gate = CopySide(where).hold()
        loss_of(model, batch(where, 2)).backward()
        with pytest.raises(streamlap.TransferTimeout):
            grads.result(timeout=MOMENT)
        with pytest.raises(streamlap.TransferTimeout):
            next(grads.completed(timeout=MOMENT))
        gate.open()
        assert same_grads(grads.result(), plain(where, 2))


def test_after_backward_nothing_is_waited_for(where):
    model = net(where)
    with stream_gradients(model, min_bytes=0) as grads:
        loss_of(model, batch(where)).backward()
        arrived = dict(grads.completed(timeout=PATIENCE))
        assert arrived.keys() == plain(where, 1).keys()
        assert list(arrived)[-1] == "embedding.weight"  # tied: the last to be final
        assert grads.result().keys() == arrived.keys()


@pytest.mark.parametrize("free", [False, True])
def test_gradients_are_given_out_in_the_last_pass(where, free):
    model = net(where)
    grads = stream_gradients(model, min_bytes=0, free=free)
    for _step in range(2):
        model.zero_grad()
        arrivals = grads.completed(backwards=3)
        seen = []
        with ThreadPoolExecutor(1) as thread:
            work = thread.submit(lambda: seen.extend(arrivals))  # noqa: B023
            (model.unused * 2).sum().backward()  # not touched by the last pass
            loss_of(model, batch(where, 1)).backward()
            assert not seen
            loss_of(model, batch(where, 2)).backward()
            work.result(PATIENCE)
        expected = {**plain(where, 1, 2), "unused": torch.full((3,), 2.0)}
        assert len(seen) == len(expected)
        assert all(same_bits(grad, expected[name].cpu()) for name, grad in seen)
        assert all(same_bits(grad, expected[name].cpu()) for name, grad in grads.result().items())


def test_a_step_that_is_told_ends_although_nobody_has_read_it(where):
    model = net(where)
    grads = stream_gradients(model)
    first = grads.completed()
    loss_of(model, batch(where, 1)).backward()
    second = grads.completed()
    model.zero_grad()
    loss_of(model, batch(where, 2)).backward()
    for arrivals, seed in ((first, 1), (second, 2)):
        expected = plain(where, seed)
        got = dict(arrivals)
        assert got.keys() == expected.keys()
        assert all(same_bits(grad, expected[name].cpu()) for name, grad in got.items())


def test_an_iteration_can_time_out(where):
    grads = stream_gradients(net(where))
    with pytest.raises(streamlap.TransferTimeout):
        next(grads.completed(timeout=MOMENT))


# -- steps


def test_a_step_is_all_passes_until_its_result(where):
    model = net(where)
    with stream_gradients(model, free=True) as grads:
        for seeds in ((1,), (2, 3), (4,)):
            for seed in seeds:
                loss_of(model, batch(where, seed)).backward()
            result = grads.result()
            assert same_grads(result, plain(where, *seeds))
            again = grads.result()
            assert all(again[name] is grad for name, grad in result.items())


def test_zero_grad_does_not_end_a_step_but_reset_does(where):
    model = net(where)
    with stream_gradients(model, free=True) as grads:
        loss_of(model, batch(where, 1)).backward()
        model.zero_grad()
        loss_of(model, batch(where, 2)).backward()
        assert same_grads(grads.result(), plain(where, 1, 2))
        (model.unused * 2).sum().backward()
        grads.reset()
        with pytest.raises(GradientsIncomplete, match="backward"):
            grads.result()
        loss_of(model, batch(where, 3)).backward()
        assert same_grads(grads.result(), plain(where, 3))


def test_reset_ends_an_iteration_and_leaves_the_coming_one(where):
    model = net(where)
    grads = stream_gradients(model)
    dropped = grads.completed()
    grads.reset()
    with pytest.raises(GradientsIncomplete, match="reset"):
        next(dropped)
    loss_of(model, batch(where, 1)).backward()
    grads.result()
    coming = grads.completed()
    grads.reset()
    loss_of(model, batch(where, 2)).backward()
    assert len(dict(coming)) == len(plain(where, 2))


def test_result_before_backward(where):
    with (
        stream_gradients(net(where)) as grads,
        pytest.raises(GradientsIncomplete, match="call backward"),
    ):
        grads.result()


def test_a_backward_that_fails(where):
    model = net(where)
    grads = stream_gradients(model, min_bytes=1 << 20)

    def fail(_grad):
        raise ArithmeticError("as planned")

    def through(layer, x):
        x = layer(x)
        if layer is model.layers[0]:
            x.register_hook(fail)
        return x

    for _ in range(2):
        arrivals = grads.completed()
        with ThreadPoolExecutor(1) as thread:
            work = thread.submit(list, arrivals)
            with pytest.raises(ArithmeticError):
                loss_of(model, batch(where), through=through).backward()
            with pytest.raises(GradientsIncomplete, match="failed"):
                work.result(PATIENCE)
        with pytest.raises(GradientsIncomplete, match="reset"):
            grads.result(PATIENCE)
        grads.reset()
        model.zero_grad()
        loss_of(model, batch(where, 2)).backward()
        assert same_grads(grads.result(), plain(where, 2))
        model.zero_grad()


def test_inside_backward_nobody_can_wait_for_its_end(where):
    model = net(where)
    said = []

    def ask(_parameter):
        for call in (grads.result, grads.reset):
            try:
                call()
            except InvalidArgument as error:
                said.append(str(error))

    with stream_gradients(model) as grads:
        model.scale.register_post_accumulate_grad_hook(ask)
        loss_of(model, batch(where)).backward()
        assert same_grads(grads.result(), plain(where, 1))
    assert len(said) == 2
    assert all("inside a backward pass" in line for line in said)


def test_close_detaches(where):
    model = net(where)
    with stream_gradients(model) as grads:
        loss_of(model, batch(where)).backward()
    waiting = grads.result()
    loss_of(model, batch(where, 2)).backward()
    assert same_grads(grads.result(), plain(where, 1))
    assert all(grads.result()[name] is grad for name, grad in waiting.items())
    with pytest.raises(GradientsIncomplete, match="close"):
        grads.completed()
    with stream_gradients(model) as other:  # may be attached again
        model.zero_grad()
        loss_of(model, batch(where, 3)).backward()
        assert same_grads(other.result(), plain(where, 3))


def test_close_ends_an_iteration_that_waits(where):
    grads = stream_gradients(net(where))
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(list, grads.completed())
        grads.close()
        with pytest.raises(GradientsIncomplete, match="close"):
            work.result(PATIENCE)


# -- ways to use backward


def test_several_passes_over_one_graph(where):
    expected, model = net(where), net(where)
    with stream_gradients(model, free=True) as grads:
        for one in (expected, model):
            loss = loss_of(one, batch(where))
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            (loss * 3).backward()
        wanted = {n: p.grad for n, p in expected.named_parameters() if p.grad is not None}
        assert same_grads(grads.result(), wanted)


def test_a_history_is_refused_and_the_next_step_is_right(where):
    model = net(where)
    with stream_gradients(model) as grads:
        loss = loss_of(model, batch(where))
        with pytest.raises(InvalidArgument, match="create_graph"):
            loss.backward(create_graph=True)
        with pytest.raises(GradientsIncomplete):
            grads.result(PATIENCE)
        grads.reset()
        model.zero_grad()
        loss_of(model, batch(where, 2)).backward()
        assert same_grads(grads.result(), plain(where, 2))


def test_grad_of_inputs_sends_nothing(where):
    model = net(where)
    with stream_gradients(model) as grads:
        torch.autograd.grad(loss_of(model, batch(where)), model.scale, create_graph=True)
        with pytest.raises(GradientsIncomplete):
            grads.result(PATIENCE)
        loss_of(model, batch(where)).backward()
        assert same_grads(grads.result(), plain(where, 1))


def through_checkpoint(use_reentrant):
    def through(layer, x):
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    return through


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("free", [False, True])
def test_checkpointing(where, use_reentrant, free):
    through = through_checkpoint(use_reentrant)
    expected = plain(where, 1, through=through)
    model = net(where)
    with stream_gradients(model, free=free, min_bytes=1000) as grads:
        arrivals = grads.completed()
        with ThreadPoolExecutor(1) as thread:
            work = thread.submit(dict, arrivals)
            loss_of(model, batch(where), through=through).backward()
            given = work.result(PATIENCE)
        assert same_grads(grads.result(), expected)
        assert given.keys() == expected.keys()
        assert all(same_bits(grad, expected[name].cpu()) for name, grad in given.items())


def test_reentrant_checkpointing_of_parameters_without_their_module(where):
    """Nobody tells when the outer pass ends; the result is right, and an iteration says so."""
    model = net(where)
    through = through_checkpoint(True)
    with stream_gradients(model.layers.parameters(), free=True) as grads:
        arrivals = grads.completed()
        loss_of(model, batch(where), through=through).backward()
        with pytest.raises(GradientsIncomplete, match="reentrant"):
            list(arrivals)
        expected = plain(where, 1, through=through).items()
        expected = [grad for name, grad in expected if name.startswith("layers.")]
        assert same_grads(grads.result(), {str(i): grad for i, grad in enumerate(expected)})


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("free", [False, True])
def test_a_parameter_in_two_reentrant_segments(where, free):
    torch.manual_seed(0)
    model = Twice().to(where)
    x = torch.rand(4, 8, device=where, requires_grad=True)
    model(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with stream_gradients(model, free=free, min_bytes=0) as grads:
        model(x).square().sum().backward()
        assert same_grads(grads.result(), expected)
        model.zero_grad()
        arrivals = grads.completed()
        seen, segments = threading.Event(), []

        def consume():
            for _ in arrivals:
                seen.set()

        def wait(*_grads):
            segments.append(1)
            if len(segments) == 2:  # what the first one has made is given out before
                assert seen.wait(PATIENCE)

        model.layer.register_full_backward_pre_hook(wait)
        with ThreadPoolExecutor(1) as thread:
            work = thread.submit(consume)
            model(x).square().sum().backward()
            with pytest.raises(GradientsIncomplete, match="accumulated again"):
                work.result(PATIENCE)


@pytest.mark.parametrize("attached", ["before", "after", "to the compiled"])
def test_a_compiled_model(where, attached):
    model = net(where)
    expected = plain(where, 1)
    grads = stream_gradients(model) if attached == "before" else None
    compiled = torch.compile(model, backend="aot_eager")
    if attached == "after":
        grads = stream_gradients(model)
    elif grads is None:
        grads = stream_gradients(compiled)
        expected = {f"_orig_mod.{name}": grad for name, grad in expected.items()}
    for _ in range(2):
        model.zero_grad()
        loss_of(compiled, batch(where)).backward()
        result = grads.result()
        wanted = {n: model.get_parameter(n.removeprefix("_orig_mod.")).grad for n in result}
        assert same_grads(result, wanted)
        assert result.keys() == expected.keys()
    grads.close()
    torch._dynamo.reset()


@pytest.mark.parametrize("free", [False, True])
def test_scaled_losses(where, free):
    kind = torch.device(where).type
    expected, model = net(where), net(where)
    scaler = torch.amp.GradScaler(kind, init_scale=3000.0)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    with stream_gradients(model, free=free) as grads:
        for bad in (False, True):
            for one in (expected, model):
                one.zero_grad()
                with torch.autocast(kind, torch.bfloat16):
                    loss = loss_of(one, batch(where))
                scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
            scaler.unscale_(optimizer)
            wanted = {n: p.grad for n, p in expected.named_parameters() if p.grad is not None}
            not_finite = grads.unscale_(scaler)
            scaler.update()
            assert same_grads(grads.result(), wanted)
            assert not_finite == sum(int((~grad.isfinite()).sum()) for grad in wanted.values())
            assert (not_finite > 0) is bad
            with pytest.raises(InvalidArgument, match="already"):
                grads.unscale_(scaler)
            with pytest.raises(InvalidType, match="GradScaler"):
                grads.unscale_(3000.0)


def test_a_model_can_be_copied_and_saved_while_attached(where):
    model = net(where)
    with stream_gradients(model) as grads:
        loss_of(model, batch(where)).backward()
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for other in (twin, loaded):
            loss_of(other, batch(where, 3)).backward()  # not ours
            other.zero_grad()
            with stream_gradients(other) as own:
                loss_of(other, batch(where, 2)).backward()
                assert same_grads(own.result(), plain(where, 2))
        assert same_grads(grads.result(), plain(where, 1))


def test_a_handle_goes_with_its_model(where):
    import weakref

    model = net(where)
    grads = stream_gradients(model, free=True)
    for seed in (1, 2):
        loss_of(model, batch(where, seed)).backward()
    grads.result()
    alive = weakref.ref(grads)
    del grads
    gc.collect()
    assert alive() is not None  # the model's hooks have it
    del model
    gc.collect()
    assert eventually(lambda: gc.collect() >= 0 and alive() is None)


# -- what is refused


def leafless():
    return torch.nn.Parameter(torch.ones(2)) * 2


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: torch.nn.ReLU(), InvalidArgument, "no parameters"),
        (list, InvalidArgument, "no parameters"),
        (lambda: torch.nn.Linear(2, 2).requires_grad_(False), InvalidArgument, "requires grad"),
        (lambda: [torch.ones(2)], InvalidArgument, "requires grad"),
        (lambda: [leafless()], InvalidArgument, "no leaf"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), InvalidArgument, "meta"),
        (lambda: 3, InvalidType, "int"),
        (lambda: torch.nn.Parameter(torch.ones(2)), InvalidType, "Parameter"),
        (lambda: [3], InvalidType, "item 0"),
        (lambda: [("a", 3)], InvalidType, "item 0"),
        (
            lambda: [(name, torch.nn.Parameter(torch.ones(2))) for name in "aa"],
            InvalidArgument,
            "two parameters",
        ),
    ],
)
def test_models_that_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        stream_gradients(make())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "bfloat16"}, InvalidType),
        ({"free": 1}, InvalidType),
        ({"min_bytes": "1MiB"}, InvalidType),
        ({"min_bytes": -1}, InvalidArgument),
        ({"bucket_bytes": 1.5}, InvalidType),
        ({"bucket_bytes": True}, InvalidType),
    ],
)
def test_options_that_are_refused(options, error):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(error, match=next(iter(options))):
        stream_gradients(model, **options)
    assert not model.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("backwards", [0, -1, "1", True, 1.5])
def test_numbers_of_passes_that_are_refused(backwards):
    grads = stream_gradients(torch.nn.Linear(2, 2))
    with pytest.raises((InvalidArgument, InvalidType), match="backwards"):
        grads.completed(backwards)
    with pytest.raises((InvalidArgument, InvalidType), match="timeout"):
        grads.result(timeout=-1 if backwards == 0 else "1")


def test_twice_on_one_parameter_is_refused_before_anything_is_hooked():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with stream_gradients(second):
        with pytest.raises(InvalidArgument, match=r"'1\.weight' is sent already"):
            stream_gradients(torch.nn.Sequential(first, second))
        assert not first.weight._post_accumulate_grad_hooks
    stream_gradients(torch.nn.Sequential(first, second)).close()


def test_a_model_that_has_moved(where):
    model = torch.nn.Linear(3, 2).to(where)
    grads = stream_gradients(model)
    for hook in model.bias._post_accumulate_grad_hooks.values():
        hook.device = torch.device("meta")  # where it would have been
    with pytest.raises(InvalidArgument, match=r"'bias' is on .*, but the parameter was on meta"):
        model(torch.ones(2, 3, device=where)).sum().backward()
    with pytest.raises(GradientsIncomplete):
        grads.result()


@pytest.mark.gpu
def test_a_model_that_has_left_its_gpu():
    model = torch.nn.Linear(3, 2).to("cuda:0")
    stream_gradients(model)
    model.to("cpu")
    with pytest.raises(InvalidArgument, match="is on cpu, but the parameter was on cuda:0"):
        model(torch.ones(2, 3)).sum().backward()


def test_parameters_that_were_replaced(where):
    model = torch.nn.Linear(3, 2).to(where)
    grads = stream_gradients(model)
    model.load_state_dict({n: torch.ones_like(p) for n, p in model.named_parameters()}, assign=True)
    model(torch.ones(2, 3, device=where)).sum().backward()
    with pytest.raises(GradientsIncomplete, match="replaced"):
        grads.result()


def test_a_sparse_gradient(where):
    model = torch.nn.Embedding(10, 3, sparse=True).to(where)
    with stream_gradients(model), pytest.raises(streamlap.UnsupportedTensor, match="'weight'"):
        model(torch.tensor([1, 2], device=where)).sum().backward()


def test_a_gradient_that_an_earlier_hook_has_taken(where):
    model = torch.nn.Linear(3, 2).to(where)
    model.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with stream_gradients(model), pytest.raises(InvalidArgument, match="taken by a hook"):
        model(torch.ones(2, 3, device=where)).sum().backward()


def test_no_room_for_a_gradient_fails_the_pass(monkeypatch):
    model = net("cpu")
    grads = stream_gradients(model, min_bytes=0)

    def exhausted(*_arguments, **_options):
        raise streamlap.PoolExhausted("as planned", 1, 1)

    with monkeypatch.context() as patch:
        patch.setattr(streamlap, "to_cpu", exhausted)
        with pytest.raises(streamlap.PoolExhausted, match="as planned"):
            loss_of(model, batch("cpu")).backward()
    with pytest.raises(GradientsIncomplete, match="failed"):
        grads.result()
    grads.reset()
    model.zero_grad()
    loss_of(model, batch("cpu")).backward()
    assert same_grads(grads.result(), plain("cpu", 1))


# -- memory


@pytest.mark.parametrize("free", [False, True])
def test_a_thousand_steps_reserve_no_more_than_ten(where, free):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))).to(where)
    x = torch.rand(4, 16, device=where)
    with stream_gradients(model, free=free, min_bytes=600) as grads:
        for step in range(1000):
            model.zero_grad()
            model(x).sum().backward()
            result = grads.result()  # the last one's lives while the next one's is made
            if step == 10:
                after_ten = streamlap.pool_stats(where)["reserved"]
        assert len(result) == 6
        assert streamlap.pool_stats(where)["reserved"] == after_ten


def test_earlier_passes_of_a_step_hold_no_pinned_memory(where):
    model = torch.nn.Linear(512, 512).to(where)
    x = torch.rand(4, 512, device=where)
    with stream_gradients(model) as grads:
        held = []
        for _ in range(6):
            model(x).sum().backward()
            finish_all(where)
            held.append(streamlap.pool_stats(where)["live"])
        assert len(grads.result()) == 2
    assert held[-1] == held[1]


@pytest.mark.gpu
def test_device_memory_is_given_up_while_backward_runs():
    where = "cuda:0"
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16))).to(where)
    x = torch.rand(8, 1024, device=where)
    model(x).sum().backward()
    model.zero_grad()
    most = []

    def look(_parameter):
        torch.cuda.synchronize()
        most.append(torch.cuda.memory_allocated())

    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(look)
    before = torch.cuda.memory_allocated()
    with stream_gradients(model, free=True):
        model(x).sum().backward()
    assert len(most) == 16
    # Two gradients and small things at most; all of them would be sixteen.
    assert max(most) - before < 4 * 1024 * 1024 * 4 + (1 << 20)


# -- streams of a GPU


@pytest.mark.gpu
def test_a_gradient_is_copied_after_the_stream_that_makes_it():
    """A kernel that is held writes the gradient just before the hook."""
    from helpers.streams import side

    where = "cuda:0"
    stream = side(where, "producer")
    torch.manual_seed(0)
    with stream.current():
        model = torch.nn.Linear(256, 256).to(where)
        x = torch.rand(8, 256, device=where)
        grads = stream_gradients(model, min_bytes=0, free=True)
        model(x).sum().backward()
        grads.result()
        model(x).square().sum().backward()
        expected = {name: grad.clone() for name, grad in grads.result().items()}
        finish_all(where)
        gate = stream.hold()
        model(x).square().sum().backward()
        with pytest.raises(streamlap.TransferTimeout):
            grads.result(timeout=MOMENT)
        gate.open()
        assert same_grads(grads.result(), expected)


@pytest.mark.gpu
def test_small_gradients_of_several_streams():
    """Each is copied after its own stream, although one of them is held."""
    from helpers.streams import side

    where = "cuda:0"
    streams = [side(where, "first"), side(where, "second")]
    torch.manual_seed(0)
    values = [torch.rand(100, device=where) for _ in range(2)]
    parameters = [torch.nn.Parameter(value) for value in values]
    # Full with both: sent in the hook of the last, if it were one bucket.
    grads = stream_gradients(parameters, min_bytes=1 << 20, bucket_bytes=700, free=True)
    finish_all(where)

    class Held(torch.autograd.Function):
        """Its backward runs behind a closed gate on the first stream."""

        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, grad):
            if gates is not None:
                gates.append(streams[0].hold())
            return grad * 2

    for gates in (None, []):
        with streams[0].current():
            first = Held.apply(parameters[0])
        with streams[1].current():
            second = parameters[1] * 3
        torch.cuda.current_stream(where).wait_stream(streams[0].stream)
        torch.cuda.current_stream(where).wait_stream(streams[1].stream)
        loss = (first * 5).sum() + second.sum()
        finish_all(where)
        loss.backward()
        if gates:
            with pytest.raises(streamlap.TransferTimeout):
                grads.result(timeout=MOMENT)
            gates[0].open()
        result = grads.result()
        assert same_bits(result["0"], torch.full((100,), 10.0))
        assert same_bits(result["1"], torch.full((100,), 3.0))


@pytest.mark.gpu
def test_the_caller_s_stream_waits_for_the_copies():
    where = "cuda:0"
    model = net(where)
    grads = stream_gradients(model, min_bytes=0)
    loss_of(model, batch(where)).backward()
    grads.result()
    model.zero_grad()
    finish_all(where)
    gate = CopySide(where).hold()
    loss_of(model, batch(where)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(-7)
    written = torch.cuda.current_stream(where).record_event()
    assert not eventually(written.query, MOMENT)
    gate.open()
    assert same_grads(grads.result(), plain(where, 1))


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("free", [False, True])
def test_a_model_on_two_gpus(free):
    torch.manual_seed(0)
    front = torch.nn.Linear(64, 64).to("cuda:0")
    back = torch.nn.Linear(64, 64).to("cuda:1")
    x = torch.rand(8, 64, device="cuda:0")

    def loss():
        return back(front(x).tanh().to("cuda:1")).square().sum()

    loss().backward()
    model = torch.nn.ModuleDict({"front": front, "back": back})
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    for min_bytes in (0, 1 << 20):
        model.zero_grad()
        with stream_gradients(model, free=free, min_bytes=min_bytes) as grads:
            arrivals = grads.completed()
            with ThreadPoolExecutor(1) as thread:
                work = thread.submit(dict, arrivals)
                loss().backward()
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(-7)
                assert work.result(PATIENCE).keys() == expected.keys()
            assert same_grads(grads.result(), expected)


def test_data_of_the_tests_can_tell_a_fault():
    """Gradients of different batches differ in every parameter, so a stale one is seen."""
    first, second = plain("cpu", 1), plain("cpu", 2)
    for name, grad in first.items():
        if grad.numel():
            assert not torch.equal(as_bytes(grad), as_bytes(second[name]))
