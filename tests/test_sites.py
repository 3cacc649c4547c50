"""Each wait and keep-alive that the Python layer makes, shown where leaving it out must show.

On a simulation, where nothing moves before the program waits for it: what was not waited for has
not happened, every time. tests/python_mutants.py leaves out one at a time.
"""

import contextlib
import functools
import gc
import math
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from helpers.streams import MOMENT, PATIENCE, CopySide, eventually

import streamlap
from streamlap import (
    batch,
    checksums,
    direct,
    grouped,
    observe,
    panels,
    pipeline,
    pipelined_map,
    pipelined_run,
    plan_host,
    product,
    to_cpu,
    to_device,
    watch,
)
from streamlap.arrays import as_source
from streamlap.batch import Copied
from streamlap.devices import current_stream, place_of
from streamlap.group import TransferGroup

SCHEDULES = ("lazy", "eager", "starve(0)", "starve(1)", "random(1)")


@pytest.fixture(params=SCHEDULES)
def simulation(request):
    with streamlap.use_runtime("sim", schedule=request.param) as serving:
        yield serving


def numbers(count=64, start=0):
    return torch.arange(start, start + count, dtype=torch.float32)


def overwrite(tensor):
    """Write without a trace in torch's version counter."""
    tensor.numpy()[:] = -1


def copy_stream(simulation):
    return simulation.place(0).engine.copy_stream(0, False)


def nothing_in_flight(simulation):
    """Whether no copy is left to itself now, and soon no memory is held."""

    def nothing_held():
        stats = simulation.pool.stats()
        return stats["live"] == 0 and stats["in_flight"] == 0

    # References may die on another thread, a little later; copies that are in flight are counted.
    return simulation.place(0).engine.abandoned() == 0 and eventually(nothing_held)


class Boom(Exception):
    pass


def failing(at):
    calls = []

    def fn(x):
        calls.append(1)
        if len(calls) > at:
            raise Boom
        return x + len(calls)

    return fn


# -- transfers


def test_a_result_is_waited_for(simulation):
    assert torch.equal(to_cpu(numbers()).result(), numbers())


def test_an_item_is_waited_for(simulation):
    transfer = to_cpu([numbers(), numbers(start=100)])
    assert torch.equal(transfer[1], numbers(start=100))
    assert torch.equal(transfer[0], numbers())


def test_the_thread_that_writes_the_source_waits(simulation):
    source = numbers()
    transfer = to_cpu(source)
    transfer.wait_source()
    overwrite(source)
    assert torch.equal(transfer.result(), numbers())


def test_a_stream_that_writes_the_source_waits(simulation):
    source = numbers()
    writer = simulation.place(0).runtime.stream(0, "compute")
    transfer = to_cpu(source)
    transfer.wait_source(writer)
    writer.launch(lambda: overwrite(source))
    writer.synchronize()
    assert torch.equal(transfer.result(), numbers())


def test_the_thread_that_reads_the_destination_waits(simulation):
    out = numbers(start=100)
    assert to_cpu(numbers(), out=out).wait() is None
    assert torch.equal(out, numbers())


def test_a_protected_source_may_be_written_at_once(simulation):
    source = numbers()
    transfer = to_cpu(source, protect=True)
    source.fill_(-1)
    assert torch.equal(transfer.result(), numbers())


@pytest.mark.parametrize("leaves", [1, 2])
def test_what_a_copy_needs_lives_although_nobody_holds_it(simulation, leaves):
    arrays = [np.full(64, float(i), np.float32) for i in range(leaves)]
    alive = [weakref.ref(array) for array in arrays]
    sources = [torch.from_numpy(array) for array in arrays]
    gate = copy_stream(simulation).gate()
    transfer = to_cpu(sources[0] if leaves == 1 else sources)
    held = simulation.pool.stats()["live"]
    assert held > 0
    del transfer, sources, arrays
    gc.collect()
    assert simulation.pool.stats()["live"] == held
    assert all(array() is not None for array in alive)
    gate.open()
    copy_stream(simulation).synchronize()
    assert eventually(lambda: simulation.place(0).engine.abandoned() == 0)
    assert nothing_in_flight(simulation)
    gc.collect()
    # The last reference may be dropped by the library's own thread.
    assert eventually(lambda: all(array() is None for array in alive))


def short_transfer(simulation, tensor, stream):
    place, short = simulation.place(0), simulation.short
    short.add(0, place.engine, simulation.pool._pool(), place)
    return direct.TensorTransfer(short.start_after(tensor, None, None, stream.handle))


def test_a_source_of_the_short_way_lives_although_nobody_holds_it(simulation):
    stream = simulation.place(0).runtime.stream(0, "compute")
    array = np.eye(8, dtype=np.float32)
    alive = weakref.ref(array)
    gate = copy_stream(simulation).gate()
    source = torch.from_numpy(array)
    transfer = short_transfer(simulation, source, stream)
    del transfer, source, array
    gc.collect()
    assert alive() is not None
    gate.open()
    copy_stream(simulation).synchronize()
    assert eventually(lambda: alive() is None)
    assert nothing_in_flight(simulation)


def test_the_short_way_starts_after_its_stream(simulation):
    stream = simulation.place(0).runtime.stream(0, "compute")
    gate = stream.gate()
    transfer = short_transfer(simulation, numbers(), stream)
    with pytest.raises(streamlap.TransferTimeout):
        transfer.result(MOMENT)
    gate.open()
    assert torch.equal(transfer.result(), numbers())


def test_a_source_that_has_been_read_is_let_go_of(simulation):
    array = np.zeros(64, np.float32)
    alive = weakref.ref(array)
    transfer = to_cpu(array)
    transfer._wait_read()
    del array
    gc.collect()
    assert alive() is None
    assert not transfer.result().any()


def test_every_leaf_of_a_tree_is_borrowed(simulation):
    sources = [numbers(), numbers()]
    transfer = to_cpu(sources)
    sources[1].add_(1)
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


# -- many leaves at once

MOVES = {
    "to_cpu": lambda tree, **how: to_cpu(tree, chunk_bytes=1 << 20, **how),
    "usual": to_cpu,
    "plan": lambda tree, **how: streamlap.TreeCopy(like=tree)(tree, **how),
}


@pytest.fixture(params=MOVES)
def move(request):
    def moved(tree, **how):
        transfer = MOVES[request.param](tree, **how)
        # Not stats(): it asks whether the copy is done, and then the sources are the caller's.
        assert [part.path for part in transfer._all_parts()] == ["gather"]
        return transfer

    return moved


def test_a_count_is_waited_for(simulation, move):
    sources = [numbers() for _ in range(9)]
    sources[3][5] = math.inf
    assert move(sources).result()[3][5] == math.inf
    assert to_cpu(sources, nonfinite=True).nonfinite() == 1


def test_every_leaf_that_is_moved_is_borrowed(simulation, move):
    sources = [numbers() for _ in range(9)]
    transfer = move(sources)
    sources[7].add_(1)
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


def test_every_leaf_that_a_plan_looks_at_by_itself_is_borrowed(simulation):
    sources = [torch.nn.Parameter(numbers(), requires_grad=False) for _ in range(9)]
    transfer = streamlap.TreeCopy(like=sources)(sources)
    sources[7].add_(1)
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


def test_a_protected_tree_may_be_written_at_once(simulation, move):
    sources = [numbers() for _ in range(9)]
    transfer = move(sources, protect=True)
    for source in sources:
        source.fill_(-1)
    assert all(torch.equal(leaf, numbers()) for leaf in transfer.result())


def test_a_move_comes_after_its_stream(simulation, move):
    stream = simulation.place(0).runtime.stream(0, "compute")
    gate = stream.gate()
    transfer = move([numbers() for _ in range(9)], stream=stream)
    with pytest.raises(streamlap.TransferTimeout):
        transfer.result(MOMENT)
    gate.open()
    assert all(torch.equal(leaf, numbers()) for leaf in transfer.result())


def test_a_checksum_is_waited_for(simulation):
    assert streamlap.checksum(numbers()) == streamlap.checksum(numbers())
    assert streamlap.checksum(numbers()) != streamlap.checksum(numbers(start=1))


def all_gone(references):
    return all(reference() is None for reference in references)


@pytest.mark.parametrize("step", [1, 2])
def test_what_a_move_needs_lives_although_nobody_holds_it(simulation, step):
    arrays = [np.full(64, float(i), np.float32) for i in range(9)]
    alive = [weakref.ref(array) for array in arrays]
    for copy in (
        lambda tree: to_cpu(tree, nonfinite=True),
        to_cpu,
        streamlap.TreeCopy(like=[torch.from_numpy(a)[::step] for a in arrays], nonfinite=True),
    ):
        sources = [torch.from_numpy(array)[::step] for array in arrays]
        gate = copy_stream(simulation).gate()
        before = simulation.pool.stats()["live"]
        transfer = copy(sources)
        held = simulation.pool.stats()["live"]
        assert held >= before + 9 * 64 * 4 // step
        del transfer, sources
        kept, arrays = arrays, None
        del kept
        gc.collect()
        assert simulation.pool.stats()["live"] == held
        assert all(array() is not None for array in alive)
        gate.open()
        copy_stream(simulation).synchronize()
        # What torch copies on a worker lets go of its ends on the watch thread, a little later.
        assert eventually(lambda: nothing_in_flight(simulation))
        assert eventually(functools.partial(all_gone, alive))
        arrays = [np.full(64, float(i), np.float32) for i in range(9)]
        alive = [weakref.ref(array) for array in arrays]


def test_what_a_checksum_reads_lives_although_the_call_was_interrupted(simulation, monkeypatch):
    def interrupted(_native):
        raise KeyboardInterrupt

    monkeypatch.setattr(checksums, "_wait", interrupted)
    array = np.full(64, 1.0, np.float32)
    alive = weakref.ref(array)
    gate = copy_stream(simulation).gate()
    with contextlib.suppress(KeyboardInterrupt):
        streamlap.checksum(torch.from_numpy(array))
    del array
    gc.collect()
    assert alive() is not None
    assert simulation.pool.stats()["live"] > 0
    gate.open()
    copy_stream(simulation).synchronize()
    assert eventually(lambda: simulation.place(0).engine.abandoned() == 0)
    assert nothing_in_flight(simulation)
    gc.collect()
    assert alive() is None


@pytest.mark.gpu
def test_a_checksum_comes_after_the_current_stream():
    where = torch.device("cuda:0")
    x = torch.zeros(64, device=where)
    assert streamlap.checksum(x) == streamlap.checksum(torch.zeros(64))
    with torch.cuda.stream(torch.cuda.Stream()):
        gate = current_stream(place_of(where)).gate()
        x.add_(1)
        opener = threading.Timer(MOMENT, gate.open)
        opener.start()
        assert streamlap.checksum(x) == streamlap.checksum(torch.ones(64))
        opener.join()


def test_what_is_packed_for_a_count_is_kept(simulation):
    array = np.full(64, 1.0, np.float32)
    alive = weakref.ref(array)
    gate = copy_stream(simulation).gate()
    transfer = to_cpu(torch._neg_view(torch.from_numpy(array)), nonfinite=True)
    del array
    gc.collect()
    assert alive() is not None
    gate.open()
    assert torch.equal(transfer.result(), torch.full((64,), -1.0))
    assert transfer.nonfinite() == 0


@pytest.mark.gpu
def test_many_leaves_of_a_gpu_come_after_the_current_stream():
    where = torch.device("cuda:0")
    sources = [torch.zeros(64, device=where) for _ in range(9)]
    to_cpu(sources).result()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate = current_stream(place_of(where)).gate()
        for source in sources:
            source.add_(1)
        transfer = to_cpu(sources)
        with pytest.raises(streamlap.TransferTimeout):
            transfer.result(MOMENT)
        gate.open()
        assert all(bool((leaf == 1).all()) for leaf in transfer.result())


@pytest.mark.gpu
def test_a_source_that_is_read_by_a_kernel_on_its_way_to_a_device_is_borrowed():
    source = streamlap.empty_pinned(64, torch.bfloat16).fill_(1)
    to_device(source, "cuda:0", dtype=torch.float32).result()
    torch.cuda.synchronize()
    gate = CopySide("cuda:0", to_device=True).hold()
    transfer = to_device(source, "cuda:0", dtype=torch.float32)
    source.add_(1)
    gate.open()
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


@pytest.mark.gpu
def test_a_kernel_writes_after_what_the_consumer_s_stream_still_reads():
    source = streamlap.empty_pinned(64, torch.bfloat16).fill_(1)
    out = torch.zeros(64, device="cuda:0")
    to_device(source, "cuda:0", out=out, dtype=torch.float32).result()
    out.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        place = place_of(torch.device("cuda:0"))
        gate = current_stream(place).gate()
        transfer = to_device(source, "cuda:0", out=out, dtype=torch.float32)
        assert transfer.stats()["paths"] == ["scatter"]
        with pytest.raises(streamlap.TransferTimeout):
            transfer.result(MOMENT)
        gate.open()
        assert bool((transfer.result() == 1).all())


# -- what only a GPU reaches, with stand-ins for its streams


def stand_in(log, name):
    return types.SimpleNamespace(
        handle=1,
        device=0,
        capturing=lambda: False,
        record=lambda: f"event of {name}",
        wait=lambda event: log.append((name, event)),
    )


def gpu(engine=None):
    return types.SimpleNamespace(is_cuda=True, index=0, engine=engine, shape_ring=lambda: None)


def test_what_is_packed_is_made_after_its_producer(monkeypatch):
    log = []
    current = stand_in(log, "current")
    monkeypatch.setattr(plan_host, "current_stream", lambda place: current)
    assert plan_host.current_after(stand_in(log, "producer"), gpu(), "to_cpu()") is current
    assert log == [("current", "event of producer")]


def test_an_array_that_is_lent_is_ordered_before_and_after(monkeypatch):
    log = []
    monkeypatch.setattr(pipeline, "current_stream", lambda place: stand_in(log, "torch"))
    given = pipeline._Input(numbers(), True, gpu(), stand_in(log, "cupy"))
    with pipeline._lent_to_torch(given):
        assert log == [("torch", "event of cupy")]
    assert log == [("torch", "event of cupy"), ("cupy", "event of torch")]


def planned_to_cpu(dst, stage=None):
    batches, borrowed = {}, []
    source = as_source(numbers())
    copied = Copied(dst, False)
    plan_host._add_to_cpu(batches, 0, copied, stage, source, gpu(), borrowed)
    (batch,) = batches.values()
    return source, batch, borrowed


def test_a_source_on_a_device_is_borrowed():
    source, _batch, borrowed = planned_to_cpu(torch.empty(64))
    assert borrowed == [source]


def test_a_source_that_is_packed_is_kept():
    source, batch, _borrowed = planned_to_cpu(torch.empty(64, dtype=torch.float64))
    assert any(kept is source.tensor for kept in batch.sources)


def test_a_destination_behind_a_stage_is_kept():
    dst = torch.empty(128)[::2]
    _source, batch, _borrowed = planned_to_cpu(dst, torch.empty(64))
    assert any(kept is dst for kept in batch.destinations)


class Engine:
    """Notes what a batch asks of the native engine."""

    def __init__(self):
        self.asked, self.completed = {}, []

    def submit(self, **options):
        self.asked = options
        return "native"

    def copy_stream(self, index, to_device):
        return types.SimpleNamespace(handle=5, device=index)

    def complete(self, native, stream):
        self.completed.append((native, stream.handle))


@pytest.mark.parametrize(
    ("path", "to_device"), [("staged", False), ("unpack", False), ("unpack", True)]
)
def test_a_batch_asks_for_the_order_of_its_path(path, to_device, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(batch, "external_stream", lambda handle, index: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    batch.submit_batch(batch.Batch(), path, gpu(engine), to_device, [], 1 << 20)
    assert engine.asked["staged"] is (path == "staged")
    assert (engine.asked["finish"] is not None) is (path == "unpack" and not to_device)
    assert engine.completed == ([("native", 5)] if to_device else [])


def test_a_handle_passes_on_who_writes_the_input():
    asked = []
    TransferGroup([], asked.append).wait_source(7)
    assert asked == [7]


@pytest.mark.gpu
def test_a_device_source_that_is_packed_is_kept():
    where = "cuda:0"
    source = torch.ones(1 << 20, 2, device=where)
    to_device(source[:, ::2], where).result()
    torch.cuda.synchronize()
    gate = CopySide(where, to_device=True).hold()
    transfer = to_device(source[:, ::2], where)
    before = torch.cuda.memory_allocated()
    del source
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    gate.open()
    assert bool((transfer.result() == 1).all())


@pytest.mark.gpu
def test_a_device_destination_behind_a_stage_is_kept():
    where = "cuda:0"
    source = streamlap.empty_pinned(1 << 20).fill_(1)
    to_device(source, where, dtype=torch.float64).result()
    torch.cuda.synchronize()
    gate = CopySide(where, to_device=True).hold()
    transfer = to_device(source, where, dtype=torch.float64)
    before = torch.cuda.memory_allocated()
    del transfer
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    gate.open()


# -- the short way of products, on a stream that stands for torch's


@pytest.fixture
def products(simulation, monkeypatch):
    watch.enter()  # as every public call does: who lets go of what nobody holds is its thread
    stream = simulation.place(0).runtime.stream(0, "compute")
    monkeypatch.setattr(product, "current_handle", lambda index: stream.handle)
    return simulation.place(0), stream, simulation.pool


def start(products, value, x):
    place, stream, pool = products
    return product._start_copy(value, x, place, stream, pool, False)


def test_products_are_waited_for(products):
    place, _stream, pool = products
    x = torch.eye(8)
    results = product._run(x, 3, 4, place, pool)
    assert all(torch.equal(result, x) for result in results)


def test_a_failed_run_of_products_waits_for_its_copies(products, simulation, monkeypatch):
    place, _stream, pool = products
    fn = failing(3)
    monkeypatch.setattr(product, "square", fn)
    with pytest.raises(Boom):
        product._run(torch.eye(8), 9, 4, place, pool)
    assert nothing_in_flight(simulation)


@pytest.mark.parametrize("watched", [False, True])
def test_a_product_is_copied_after_its_stream(products, watched, monkeypatch):
    monkeypatch.setattr(observe, "watched", lambda: watched)
    gate = products[1].gate()
    native, _dst = start(products, torch.eye(8), torch.eye(8))
    assert not native.sync(MOMENT)
    gate.open()
    assert native.sync()


def test_a_product_s_stream_waits_for_its_copy(products, simulation):
    gate = copy_stream(simulation).gate()
    native, _dst = start(products, torch.eye(8), torch.eye(8))
    product._make_room(native, products[1])
    passed = products[1].record()
    assert not passed.synchronize(MOMENT)
    gate.open()
    assert passed.synchronize()


def test_a_product_lives_until_there_is_room(products, simulation):
    array = np.eye(8, dtype=np.float32)
    alive = weakref.ref(array)
    gate = copy_stream(simulation).gate()
    native, dst = start(products, torch.from_numpy(array), torch.eye(8))
    del array
    held = simulation.pool.stats()["live"]
    del dst
    gc.collect()
    assert alive() is not None
    assert simulation.pool.stats()["live"] == held > 0
    product._make_room(native, products[1])
    gc.collect()
    assert alive() is None
    gate.open()
    native.sync()


# -- a product in panels


def cut(products, x):
    place, stream, pool = products
    return panels.Ends(x, 1, 4).start(x, place, stream, pool)


def test_panels_are_copied_after_their_stream(products):
    gate = products[1].gate()
    parts, _dst = cut(products, torch.eye(8))
    assert not parts.sync(MOMENT)
    gate.open()
    assert parts.sync()


def test_panels_keep_what_they_read_and_write(products, simulation):
    array = np.eye(8, dtype=np.float32)
    alive = weakref.ref(array)
    gate = copy_stream(simulation).gate()
    parts, dst = cut(products, torch.from_numpy(array))
    held = simulation.pool.stats()["live"]
    del parts, dst, array
    gc.collect()
    assert alive() is not None
    assert simulation.pool.stats()["live"] == held > 0
    gate.open()
    copy_stream(simulation).synchronize()
    assert eventually(lambda: simulation.place(0).engine.abandoned() == 0)
    assert nothing_in_flight(simulation)


def test_a_panel_that_fails_waits_for_those_before(products, simulation, monkeypatch):
    real, calls = torch.mm, []

    def mm(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise Boom
        return real(*args, **options)

    monkeypatch.setattr(torch, "mm", mm)
    with pytest.raises(Boom):
        cut(products, torch.eye(8))
    assert nothing_in_flight(simulation)


# -- groups of products, computed by a stream that stands for torch's


@pytest.fixture
def groups(simulation, monkeypatch):
    """``groups(n, fn)``: ``fn(i)`` for ``n`` items, two of them in a group."""
    stream = simulation.place(0).runtime.stream(0, "compute")
    monkeypatch.setattr(grouped, "current_handle", lambda index: stream.handle)

    def call(n, fn, x=None):
        made = []

        def multiply(x, out):
            made.append(fn(len(made)))
            value = made[-1]
            stream.launch(lambda: out.copy_(value))

        monkeypatch.setattr(grouped, "multiply", multiply)
        x = torch.eye(8) if x is None else x
        layout = grouped.Layout(512, n, 2, 1024)
        return grouped.grouped_products(x, n, layout, simulation.place(0), simulation.pool)

    return call


def number(i):
    return torch.full((8, 8), float(i))


def test_groups_are_ordered_on_the_device(groups):
    results = groups(9, number)
    assert all(torch.equal(result, number(i)) for i, result in enumerate(results))


def test_a_failed_group_waits_for_the_others(groups, simulation):
    def fn(i):
        if i == 5:
            raise Boom
        return number(i)

    with pytest.raises(Boom):
        groups(9, fn)
    assert nothing_in_flight(simulation)


def test_what_a_group_reads_lives_although_the_call_was_interrupted(groups, simulation):
    array = np.eye(8, dtype=np.float32)
    alive = weakref.ref(array)
    gate = copy_stream(simulation).gate()

    def fn(i):
        if i == 3:
            raise KeyboardInterrupt
        return number(i)

    with pytest.raises(KeyboardInterrupt):
        groups(9, fn, torch.from_numpy(array))
    del array
    gc.collect()
    assert alive() is not None
    gate.open()
    copy_stream(simulation).synchronize()
    assert eventually(lambda: gc.collect() >= 0 and alive() is None)


# -- handles of pipelines


@pytest.mark.parametrize("how", ["wait", "wait_source"])
def test_a_handle_waits_for_all_items(simulation, how):
    transfer = pipelined_run(numbers(), n=6, fn=lambda x: x + 1, wait=False)
    getattr(transfer, how)()
    # No time is known of what is not done; asking for it moves nothing.
    times = [part.native.interval()[1] for part in transfer._all_parts()]
    assert len(times) == 6
    assert not any(math.isnan(time) for time in times)


# -- endings


def test_a_failed_pipeline_waits_for_its_copies(simulation):
    with pytest.raises(Boom):
        pipelined_run(numbers(), n=9, fn=failing(3))
    assert nothing_in_flight(simulation)


def test_a_failed_pipeline_in_a_worker_waits_for_its_copies(simulation):
    found = []

    def outer(x):
        with pytest.raises(Boom):
            pipelined_run(x, n=9, fn=failing(3))
        found.append(nothing_in_flight(simulation))
        return x.clone()

    pipelined_run(numbers(), n=1, fn=outer)
    assert found == [True]


def test_a_pipeline_in_a_worker_makes_room_before_it_computes(simulation):
    outs = [torch.full((64,), -2.0) for _ in range(5)]
    late = []

    def outer(x):
        calls = []

        def fn(x):
            i = len(calls)
            calls.append(1)
            late.extend(k for k in range(i) if not torch.equal(outs[k], x + k))
            return x + i

        pipelined_run(x, n=5, fn=fn, out=outs, depth=1)
        return x.clone()

    pipelined_run(numbers(), n=1, fn=outer)
    assert late == []


def test_a_map_that_is_closed_waits_for_its_copies(simulation):
    generator = pipelined_map(lambda x: x + 1, [numbers()] * 9, depth=4)
    next(generator)
    generator.close()
    assert nothing_in_flight(simulation)


# -- workers: on threads


class Held:
    """An fn that a worker does not come back from before it is let go."""

    def __init__(self):
        self.started, self.leave, self.ended = (threading.Event() for _ in range(3))

    def __call__(self, x):
        self.started.set()
        assert self.leave.wait(PATIENCE)
        self.ended.set()
        return x + 1


def ends_only_after(held, call):
    """Run ``call`` in a thread: it must not come back before ``held`` has ended."""
    thread = threading.Thread(target=call)
    thread.start()
    assert held.started.wait(PATIENCE)
    thread.join(10 * MOMENT)
    early = not thread.is_alive()
    held.leave.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not early
    assert held.ended.is_set()


@pytest.mark.parametrize("call", [pipelined_run, streamlap.parallel_run])
def test_an_error_waits_for_the_other_workers(call):
    held = Held()

    def fn(x):
        if x[0] == 0:
            assert held.started.wait(PATIENCE)
            raise Boom
        return held(x)

    def run():
        with streamlap.use_runtime("host", devices=2), pytest.raises(Boom):
            call([torch.zeros(4), torch.ones(4)], n=2, fn=fn)

    ends_only_after(held, run)


def test_a_map_that_is_closed_waits_for_its_worker():
    held = Held()
    calls = []

    def fn(x):
        calls.append(1)
        return held(x) if len(calls) == 2 else x + 1

    def run():
        generator = pipelined_map(fn, [numbers()] * 9, depth=4)
        next(generator)
        assert held.started.wait(PATIENCE)
        generator.close()

    ends_only_after(held, run)


def test_prewarming_waits_for_its_blocks(monkeypatch):
    class Growth:
        waited = 0

        def wait(self):
            self.waited += 1

    class Native:
        growth = Growth()

        def has_room(self, _nbytes, _count):
            return True

        def prewarm(self, _nbytes, _count):
            return self.growth

    pool = streamlap.PinnedPool("1MiB")
    monkeypatch.setattr(pool, "_native", Native())
    streamlap.prewarm("64KiB", pool=pool, wait=False)
    assert Native.growth.waited == 0
    streamlap.prewarm("64KiB", pool=pool)
    assert Native.growth.waited == 1


def test_ordinary_memory_that_torch_gives_again_is_nobodys(simulation, monkeypatch):
    """torch tells no checker who had it before, nor when that ended."""
    given = torch.empty(64)
    runtime = simulation.place(0).runtime
    runtime.declare(runtime.stream(0, "compute"), given.data_ptr(), given.nbytes, True)
    monkeypatch.setattr(torch, "empty_strided", lambda *_args, **_kwargs: given)
    x = numbers()
    assert torch.equal(to_cpu(x, pin=False).result(), x)
