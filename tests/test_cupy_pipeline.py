"""CuPy's own pipeline on a stand-in for CuPy whose streams are queues, run as late as can be.

What is enqueued runs only when somebody waits for it, and of two streams that may go on, the chosen
one goes first. So an event that nobody waits for shows as wrong values.
"""

import contextlib
import ctypes
import sys
import types

import numpy as np
import pytest

from streamlap.crosscheck import cupy_pipeline


class Event:
    def __init__(self, disable_timing=False):
        self.recorded = self.done = False


class Stream:
    first = "compute"  # which kind goes first where both could

    def __init__(self, world, kind):
        self.world, self.kind, self.queue = world, kind, []
        world.streams.append(self)

    def record(self, event):
        event.recorded = True
        self.queue.append(lambda: setattr(event, "done", True) or True)
        return event

    def wait_event(self, event):
        assert event.recorded  # else it is no wait at all
        self.queue.append(lambda: event.done)

    def put(self, work):
        self.queue.append(lambda: work() or True)

    def step(self):
        """Run the first thing in the queue; False where it cannot run yet."""
        if not self.queue or not self.queue[0]():
            return False
        self.queue.pop(0)
        return True

    def synchronize(self):
        order = sorted(self.world.streams, key=lambda stream: stream.kind != self.world.first)
        while self.queue:
            assert any(stream.step() for stream in order), "a deadlock"


class Array:
    def __init__(self, world, values):
        self.world, self.values = world, values
        self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes
        self.device = contextlib.nullcontext()
        self.data = self

    def copy_to_host_async(self, pointer, nbytes, stream):
        assert stream is not self.world.compute
        stream.put(lambda: ctypes.memmove(pointer, self.values.ctypes.data, nbytes) and None)


class World:
    """The module ``cupy``, as far as it is used."""

    def __init__(self, first):
        self.streams, self.first = [], first
        self.compute = Stream(self, "compute")
        self.buffers = 0
        self.products = 0
        self.cuda = types.SimpleNamespace(
            get_current_stream=lambda: self.compute,
            Stream=lambda non_blocking: Stream(self, "copy"),
            Event=Event,
            alloc_pinned_memory=lambda nbytes: bytearray(nbytes + 64),
        )

    def empty(self, shape, dtype):
        self.buffers += 1
        return Array(self, np.full(shape, np.nan, dtype))

    def ascontiguousarray(self, array):
        return array

    def matmul(self, x, y, out):
        self.products += 1
        number = self.products

        def work():
            out.values[...] = x.values @ y.values + number  # so that items differ

        self.compute.put(work)


@pytest.fixture(params=["compute", "copy"])
def world(request, monkeypatch):
    made = World(request.param)
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


@pytest.mark.parametrize(("n", "depth"), [(0, 4), (1, 4), (4, 4), (9, 4), (5, 1), (3, 8)])
def test_items_arrive_whole_and_in_order(n, depth, world):
    values = np.arange(9.0).reshape(3, 3)
    results = cupy_pipeline.pipelined_run(Array(world, values), n, depth)
    assert len(results) == n
    for index, result in enumerate(results):
        assert np.array_equal(result, values @ values + index + 1)
    assert world.buffers == min(n, depth)


def test_an_error_waits_for_the_copies_in_flight(world):
    def fail(x, y, out):
        if world.products == 2:
            raise RuntimeError("no more")
        World.matmul(world, x, y, out)

    world.matmul = fail
    with pytest.raises(RuntimeError, match="no more"):
        cupy_pipeline.pipelined_run(Array(world, np.ones((2, 2))), 5)
    assert not any(stream.queue for stream in world.streams if stream.kind == "copy")


def test_a_copy_comes_after_the_current_stream(world):
    array = Array(world, np.zeros((3, 4)))
    world.compute.put(lambda: array.values.fill(7))
    result = cupy_pipeline.to_host(array)
    assert (result == 7).all()
    assert result.shape == (3, 4)
    assert cupy_pipeline.to_host(Array(world, np.zeros((0, 4)))).shape == (0, 4)
