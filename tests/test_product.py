"""The short way of the usual call. It needs a GPU to be taken; here it runs on worker threads."""

import gc
import weakref

import pytest
import torch
from helpers.data import random_numbers, same_tree
from helpers.streams import eventually

import streamlap
from streamlap import _native, product, watch
from streamlap.devices import host_place
from streamlap.pinned import pool_for

pytestmark = pytest.mark.usefixtures("nothing_left")

DEPTH = 3


@pytest.fixture
def run(monkeypatch):
    """``run(x, n)``: on a host stream that stands for torch's current one."""
    watch.enter()  # the short way is taken only once the thread that lets go of things runs
    stream = _native.host_runtime().stream(0, "compute")
    monkeypatch.setattr(product, "current_handle", lambda index: stream.handle)
    real = product._make_room

    def make_room(native, stream):
        native.sync()  # the host's allocator gives memory out at once, not in a stream's order
        real(native, stream)

    monkeypatch.setattr(product, "_make_room", make_room)
    place = host_place(0)
    return lambda x, n: product._run(x, n, DEPTH, place, pool_for(place))


def test_results_are_those_of_the_general_way(run):
    x = random_numbers((32, 32))
    assert same_tree(run(x, 10), [x.mm(x)] * 10)
    assert len({result.data_ptr() for result in run(x, 10)}) == 10


def test_no_product_lives_longer_than_its_turn(run, monkeypatch):
    x = random_numbers((8, 8))
    made = []

    def square(x):
        alive = [index for index, ref in enumerate(made) if ref() is not None]
        assert len(alive) <= DEPTH - 1, alive
        value = x.mm(x)
        made.append(weakref.ref(value))
        return value

    monkeypatch.setattr(product, "square", square)
    assert len(run(x, 12)) == 12
    assert len(made) == 12


@pytest.mark.parametrize("index", [0, 2, 7])
def test_an_error_comes_with_its_index_and_gives_all_back(run, monkeypatch, index):
    x = random_numbers((8, 8))
    error = ArithmeticError("deliberate")
    calls = []

    def square(x):
        if len(calls) == index:
            raise error
        calls.append(1)
        return x.mm(x)

    monkeypatch.setattr(product, "square", square)
    gc.collect()
    before = streamlap.pool_stats("cpu")["live"]
    with pytest.raises(ArithmeticError) as caught:
        run(x, 10)
    assert caught.value is error
    assert error.streamlap_index == index
    assert streamlap.pool_stats("cpu")["live"] == before  # although the error is still held


def test_an_interrupted_wait_leaves_what_is_in_flight_to_itself(run, monkeypatch):
    x = random_numbers((8, 8))
    calls = []
    real = product._start_copy

    class Interrupted:
        def __init__(self, native):
            self.native = native

        def sync(self):
            raise KeyboardInterrupt

        def __getattr__(self, name):
            return getattr(self.native, name)

    def start(*args):
        calls.append(1)
        native, dst = real(*args)
        return (Interrupted(native), dst) if len(calls) == 4 else (native, dst)

    monkeypatch.setattr(product, "_start_copy", start)
    with pytest.raises(KeyboardInterrupt):
        run(x, 8)
    assert eventually(lambda: gc.collect() >= 0 and streamlap.pool_stats("cpu")["live"] == 0)


def test_memory_is_made_ahead_and_no_more_after_an_error(run, monkeypatch):
    grown = []
    real = streamlap.PinnedPool._grow_ahead

    class Noted:
        def __init__(self, growth):
            self.growth = growth
            self.cancelled = False

        def cancel(self):
            self.cancelled = True
            self.growth.cancel()

    def grow_ahead(pool, nbytes, count):
        grown.append(Noted(real(pool, nbytes, count)))
        return grown[-1]

    monkeypatch.setattr(streamlap.PinnedPool, "_grow_ahead", grow_ahead)
    monkeypatch.setattr("streamlap.pinned.AHEAD_BYTES", 0)
    x = random_numbers((190, 190))  # of a size that no other test leaves in the pool
    before = streamlap.pool_stats("cpu")
    assert same_tree(run(x, 10), [x.mm(x)] * 10)
    assert streamlap.pool_stats("cpu")["misses"] == before["misses"]
    gc.collect()

    def broken(x):
        if len(grown) == 2:
            raise ArithmeticError("deliberate")
        return x.mm(x)

    monkeypatch.setattr(product, "square", broken)
    with pytest.raises(ArithmeticError):
        run(x, 40)
    assert [growth.cancelled for growth in grown] == [True, True]


@pytest.mark.gpu
def test_unusual_calls_go_the_general_way(monkeypatch):
    taken = []
    real = product._run
    monkeypatch.setattr(product, "_run", lambda *args: taken.append(1) or real(*args))
    x = random_numbers((32, 32), where="cuda:0")
    expected = x.mm(x).cpu()
    assert same_tree(streamlap.pipelined_run(x, n=3), [expected] * 3)
    taken.clear()
    assert same_tree(streamlap.pipelined_run(x, n=3), [expected] * 3)
    assert taken == [1]
    for results in (
        streamlap.pipelined_run(x, n=3, depth=2),
        streamlap.pipelined_run(x, n=3, pin=False),
        streamlap.pipelined_run(x, n=3, fn=lambda x: x.mm(x)),
        streamlap.pipelined_run([x], n=3)[0],
        streamlap.pipelined_run(x, n=3, wait=False).result(),
        streamlap.pipelined_run(x.clone().requires_grad_(), n=3),
    ):
        assert same_tree(results, [expected] * 3)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert same_tree(streamlap.pipelined_run(x, n=3), [expected] * 3)
    assert taken == [1, 1]
    with pytest.raises(streamlap.UnsupportedTensor):
        streamlap.pipelined_run(x.to(torch.int32), n=3)


@pytest.mark.two_gpus
def test_the_short_way_serves_a_device_that_is_not_the_current_one(monkeypatch):
    taken = []
    real = product._run
    monkeypatch.setattr(product, "_run", lambda *args: taken.append(1) or real(*args))
    x = random_numbers((32, 32), where="cuda:1")
    streamlap.copy_to_cpu(x)
    with torch.cuda.device(0):
        assert same_tree(streamlap.pipelined_run(x, n=3), [x.mm(x).cpu()] * 3)
        assert torch.cuda.current_device() == 0
    assert taken == [1]
