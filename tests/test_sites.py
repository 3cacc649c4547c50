"""Each wait and keep-alive that the Python layer makes, shown where leaving it out must show.

On a simulation, where nothing moves before the program waits for it: what was not waited for has
not happened, every time. tests/python_mutants.py leaves out one at a time.
"""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from helpers.streams import MOMENT, PATIENCE, eventually

import streamlap
from streamlap import pipelined_map, pipelined_run, to_cpu

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
    stats = simulation.pool.stats()
    left = simulation.place(0).engine.abandoned()
    return left == 0 and stats["live"] == 0 and stats["in_flight"] == 0


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
    assert eventually(lambda: nothing_in_flight(simulation))  # another thread drops references
    gc.collect()
    assert all(array() is None for array in alive)


def test_every_leaf_of_a_tree_is_borrowed(simulation):
    sources = [numbers(), numbers()]
    transfer = to_cpu(sources)
    sources[1].add_(1)
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


# -- handles of pipelines


@pytest.mark.parametrize("how", ["wait", "wait_source"])
def test_a_handle_waits_for_all_items(simulation, how):
    transfer = pipelined_run(numbers(), n=6, fn=lambda x: x + 1, wait=False)
    getattr(transfer, how)()
    # Asked of the copies themselves, without a step of the simulation.
    stream = copy_stream(simulation)
    assert all(slot.transfer is not None for slot in transfer._slots)
    assert all(part.native.interval()[1] > 0 for part in transfer._all_parts())
    assert stream.idle()


# -- endings


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
        generator.close()

    ends_only_after(held, run)
