"""Gradients on the host: the right bits, in the right step, however backward is used."""

import copy
import gc
import io
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from helpers.data import as_bytes, same_bits
from helpers.nets import batch, loss_of, net, plain, same_grads
from helpers.streams import MOMENT, PATIENCE, CopySide, eventually, finish_all
from torch.utils.checkpoint import checkpoint

import streamlap
from streamlap import GradientsIncomplete, InvalidArgument, InvalidType, stream_gradients
from streamlap.devices import place_of
from streamlap.pinned import pool_for
from streamlap.training import arrival, gradients

pytestmark = pytest.mark.usefixtures("nothing_left")


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


def test_small_gradients_travel_together(where, monkeypatch):
    sent = []

    def to_cpu(tree, **options):
        sent.append(len(tree) if isinstance(tree, list) else 1)
        return copied(tree, **options)

    copied = streamlap.to_cpu
    monkeypatch.setattr(streamlap, "to_cpu", to_cpu)
    parameters = [torch.nn.Parameter(torch.rand(100, device=where)) for _ in range(7)]
    parameters.append(torch.nn.Parameter(torch.rand(1000, device=where)))
    with stream_gradients(parameters, min_bytes=4000, bucket_bytes=1200) as grads:
        sum(p.sum() for p in parameters).backward()
        assert len(grads.result()) == 8
    assert sorted(sent) == [1, 1, 3, 3]  # the large one, the last small one, two full buckets


def test_results_are_asked_for_once_and_in_the_order_of_sending(where, monkeypatch):
    asked, sent = [], []

    class Asked:
        def __init__(self, transfer):
            self.transfer = transfer
            sent.append(self)

        def __getattr__(self, name):
            return getattr(self.transfer, name)

        def result(self, timeout=None):
            asked.append(self)
            return self.transfer.result(timeout)

    copied = streamlap.to_cpu
    monkeypatch.setattr(streamlap, "to_cpu", lambda tree, **how: Asked(copied(tree, **how)))
    # Backward reaches the small ones first and between the others, and they leave at its end.
    sizes = [1000, 1, 1001, 2, 1002, 3]
    parameters = [torch.nn.Parameter(torch.rand(size, device=where)) for size in sizes]
    with stream_gradients(parameters, min_bytes=4000) as grads:
        loss = torch.ones((), device=where)
        for parameter in parameters:
            loss = loss + parameter.sum() * 2
        loss.backward()
        got = grads.result()
        assert [got[str(index)].numel() for index in range(6)] == sizes
        assert all((grad == 2).all() for grad in grads.result().values())
    assert [one.nbytes >= 4000 for one in sent] == [True, True, True, False]
    assert asked == sent
    asked.clear()
    sent.clear()  # which a lambda still sees


@pytest.mark.parametrize("end", ["reset", "close"])
def test_results_go_with_their_step(where, end):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))).to(where)
    grads = stream_gradients(model)
    model(torch.rand(4, 512, device=where)).sum().backward()
    grads.result()
    getattr(grads, end)()
    if end == "close":
        grads = None
    gc.collect()
    assert eventually(lambda: streamlap.pool_stats(where)["live"] == 0)
    del grads


def test_passes_that_were_added_hold_one_result(where):
    weight = torch.nn.Parameter(torch.rand(1 << 18, device=where))
    before = streamlap.pool_stats(where)["live"]
    with stream_gradients([weight], free=True) as grads:
        for _ in range(4):
            weight.sum().backward()
        assert (grads.result()["0"] == 4).all()
        gc.collect()
        finish_all(where)
        assert eventually(lambda: streamlap.pool_stats(where)["live"] == before + weight.nbytes)


def test_an_answer_that_comes_with_the_deadline_is_given():
    class Late(Future):
        def result(self, timeout=None):
            if not self.done():
                self.set_result("there")
                raise TimeoutError
            return super().result(timeout)

    assert arrival.within(Late(), 0.0) == "there"
    failed = Future()
    failed.set_exception(TimeoutError("the work's own"))
    with pytest.raises(TimeoutError, match="the work's own"):
        arrival.within(failed, None)


def test_memory_for_the_first_step_is_made_in_the_order_of_backward():
    mib = 1 << 20
    parameters = [torch.empty(size * mib // 4) for size in (3, 1, 2, 1, 3)]
    parameters.insert(2, torch.empty(100))
    ahead = list(gradients.memory_ahead(parameters, None, 0))
    assert ahead == [(n * mib, b * mib) for n, b in ((3, 3), (1, 1), (2, 2), (2, 1), (6, 3))]
    assert list(gradients.memory_ahead(parameters, torch.float16, 0)) == [
        (n * mib // 2, b * mib // 2) for n, b in ((3, 3), (2, 2), (6, 3))
    ]
    assert list(gradients.memory_ahead(parameters, None, 3 * mib)) == [
        (3 * mib, 3 * mib),
        (6 * mib, 3 * mib),
    ]


def test_memory_is_made_for_the_shard_of_this_process():
    class Sharded:
        dtype = torch.float32

        def numel(self):
            return 8 << 20

        def to_local(self):
            return torch.empty(1 << 20)

    ahead = list(gradients.memory_ahead([Sharded()], None, 0))
    assert ahead == [(4 << 20, 4 << 20)]


@pytest.mark.gpu
def test_memory_for_the_first_step_is_made_from_the_call_on():
    pool_for(place_of(torch.device("cuda:0"))).trim()
    before = streamlap.pool_stats()["reserved"]
    parameters = [torch.nn.Parameter(torch.rand(2 << 20, device="cuda")) for _ in range(3)]
    with stream_gradients(parameters):
        assert eventually(lambda: streamlap.pool_stats()["reserved"] >= before + (24 << 20))


@pytest.mark.gpu
def test_a_pool_without_room_takes_no_hint(monkeypatch):
    parameters = [torch.nn.Parameter(torch.rand(2 << 20, device="cuda")) for _ in range(3)]

    def full(*_arguments, **_how):
        raise streamlap.PoolExhausted("full", 1, 1)

    monkeypatch.setattr(streamlap, "prewarm", full)
    with stream_gradients(parameters) as grads:
        sum(p.sum() for p in parameters).backward()
        assert len(grads.result()) == 3


def test_gradients_travel_in_larger_pieces(where):
    parameter = torch.nn.Parameter(torch.rand(1 << 20, device=where))
    with (
        streamlap.configure(chunk_bytes="512KiB"),
        stream_gradients([parameter]) as grads,
    ):
        parameter.sum().backward()
        (shipment,) = (one() for one in grads._flying)
        assert shipment.transfer.stats()["chunks"] == 2  # of 2 MiB
        assert (grads.result()["0"] == 1).all()


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


@pytest.mark.parametrize("min_bytes", [0, 1000])
def test_a_gradient_arrives_while_backward_runs(where, min_bytes):
    """Also if an earlier one is small and waits for others until the pass is over."""
    model = net(where)
    through, _reached, go_on = hold_between(model, where)
    grads = stream_gradients(model, min_bytes=min_bytes)
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


def test_reset_waits_for_a_backward_that_runs(where):
    model = net(where)
    through, reached, go_on = hold_between(model, where)
    grads = stream_gradients(model, min_bytes=0, free=True)
    loss = loss_of(model, batch(where), through=through)
    with ThreadPoolExecutor(2) as threads:
        work = threads.submit(loss.backward)
        assert reached.wait(PATIENCE)
        reset = threads.submit(grads.reset)
        try:
            with pytest.raises(TimeoutError):
                reset.result(MOMENT)
        finally:
            go_on.set()
        work.result(PATIENCE)
        reset.result(PATIENCE)
    loss_of(model, batch(where, 2)).backward()
    assert same_grads(grads.result(), plain(where, 2))


def test_gradients_that_a_callback_of_the_pass_makes(where):
    """As FSDP2 does at the end of backward, in a callback that was queued after ours."""
    model = net(where)
    grads = stream_gradients(model)

    def reduce():
        model.unused.grad = torch.full((3,), 5.0, device=where)
        for hook in model.unused._post_accumulate_grad_hooks.values():
            hook(model.unused)

    def queue(_grad):
        torch.autograd.Variable._execution_engine.queue_callback(reduce)

    def through(layer, x):
        x = layer(x)
        if layer is model.layers[0]:
            x.register_hook(queue)
        return x

    arrivals = grads.completed(timeout=PATIENCE)
    loss_of(model, batch(where), through=through).backward()
    assert "unused" in dict(arrivals)
    assert same_bits(grads.result()["unused"], torch.full((3,), 5.0))


def test_result_can_time_out_on_a_copy(where):
    model = net(where)
    with stream_gradients(model, free=True) as grads:
        warm = []
        for _ in range(3):
            loss_of(model, batch(where)).backward()
            warm.append(grads.result())
        warm.clear()  # there is memory now that needs no call behind the gate
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


def test_reset_ends_the_iterations_that_wait_and_no_other(where):
    model = net(where)
    grads = stream_gradients(model)
    for _ in range(2):
        dropped = grads.completed()
        grads.reset()
        with pytest.raises(GradientsIncomplete, match="reset"):
            next(dropped)
        collected = grads.completed()
        model.zero_grad()
        loss_of(model, batch(where, 1)).backward()
        grads.result()
        dropped = grads.completed()
        grads.reset()
        with pytest.raises(GradientsIncomplete, match="reset"):
            next(dropped)
        expected = plain(where, 1)
        got = dict(collected)
        assert got.keys() == expected.keys()
        assert all(same_bits(grad, expected[name].cpu()) for name, grad in got.items())


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


def test_a_sum_ends_with_the_pass_that_was_to_bring_its_last_part(where):
    """The thread that adds waits for a small gradient, which the failed pass never sends."""
    model = net(where)
    grads = stream_gradients(model, free=True, min_bytes=1 << 20)
    loss_of(model, batch(where)).backward()

    def fail(_grad):
        raise ArithmeticError("as planned")

    handle = model.embedding.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, batch(where)).backward()
    handle.remove()
    assert grads._adder.submit(int).result(PATIENCE) == 0  # it waits for nothing any more
    grads.reset()
    for seed in (1, 2):
        loss_of(model, batch(where, seed)).backward()
    assert same_grads(grads.result(PATIENCE), plain(where, 1, 2))


def test_a_backward_that_fails_before_its_first_gradient(where):
    model = net(where)
    grads = stream_gradients(model)
    loss_of(model, batch(where)).backward()
    grads.result()

    def fail(_grad):
        raise ArithmeticError("as planned")

    arrivals = grads.completed(timeout=PATIENCE)
    logits = model(batch(where))
    logits.register_hook(fail)
    with pytest.raises(ArithmeticError):
        logits.sum().backward()
    with pytest.raises(GradientsIncomplete, match="failed"):
        next(arrivals)
    with pytest.raises(GradientsIncomplete, match="failed"):
        grads.result()  # not the step before


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


def any_nan(grads):
    """The same with one NaN for all: which one a product gives is a matter of the device."""
    return {name: torch.where(grad.isnan(), torch.nan, grad) for name, grad in grads.items()}


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
            assert same_grads(any_nan(grads.result()), any_nan(wanted))
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


def test_data_of_the_tests_can_tell_a_fault():
    """Gradients of different batches differ in every parameter, so a stale one is seen."""
    first, second = plain("cpu", 1), plain("cpu", 2)
    for name, grad in first.items():
        if grad.numel():
            assert not torch.equal(as_bytes(grad), as_bytes(second[name]))
