"""What serves a block: who is asked, what goes with the block, and what outlives it."""

import ctypes
import gc
import os
import resource
import threading

import pytest
import torch
from helpers.data import random_bits, random_numbers, same_bits
from helpers.streams import eventually, runtime_of

import streamlap
from streamlap import _native
from streamlap.devices import cuda_reason
from streamlap.serving import Serving, current, process, serve

pytestmark = pytest.mark.unchecked("is about the blocks themselves")

BLOCKS = {
    "checking": streamlap.checking,
    "sim": lambda: streamlap.use_runtime("sim", schedule="random(3)"),
}
TIMES = 200


@pytest.fixture(params=BLOCKS)
def block(request):
    return BLOCKS[request.param]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what other tests have let go of is not this one's
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def use(where: str) -> None:
    """Every kind of thing once, some of it dropped while it is in flight."""
    x = random_bits((64, 64), where=where)
    kept = [
        streamlap.to_cpu(x),
        streamlap.to_cpu([x, x], pin=False),
        streamlap.to_device(x.cpu(), where),
    ]
    assert same_bits(kept[0].result(), x.cpu())
    streamlap.to_cpu(random_bits((256, 1024), where=where))
    assert len(streamlap.pipelined_run(torch.ones(8, 8, device=where), n=5)) == 5
    streamlap.pipelined_run(torch.ones(8, 8, device=where), n=5, wait=False)
    with streamlap.timeline():
        streamlap.to_cpu(x).result()


@pytest.fixture(scope="module")
def usual_threads():
    """Those of the process itself, once everything has been used, by itself and in a block.

    Streams of a GPU are the process's, and so is a worker that serves one block after the other.
    """
    for where in ["cpu"] + ["cuda:0"] * (not cuda_reason()):
        use(where)
        with streamlap.checking():
            use(where)
    gc.collect()
    return threads()


def test_a_block_leaves_nothing_behind(block, where, usual_threads):
    process_pool = streamlap.pool_stats(where)["reserved"]

    def blocks(count):
        for _ in range(count):
            with block() as serving:
                use(where)
            del serving
        gc.collect()

    blocks(20)
    # A block of a GPU that begins while another's copiers are at work takes copiers of its own,
    # which stay for the next: never as many as there are blocks.
    most = usual_threads + (0 if where == "cpu" else 60)
    assert eventually(lambda: threads() <= most), (usual_threads, threads())
    memory = resident()
    blocks(TIMES)
    assert eventually(lambda: threads() <= most), (usual_threads, threads())
    # A block takes 1 MiB and more of pinned memory: it is not kept.
    assert resident() < memory + (32 << 20)
    assert streamlap.pool_stats(where)["reserved"] == process_pool


def test_a_pool_is_trimmed_at_the_end_of_its_block(block):
    with block() as serving:
        streamlap.to_cpu(torch.ones(1 << 20)).result()
        pool = serving.pool
        assert eventually(lambda: pool.stats()["cached"] >= 4 << 20)
    assert pool.stats()["reserved"] == 0


def test_what_outlives_its_block_still_works(block):
    x = random_numbers((300, 300))
    with block() as serving:
        place = serving.place(0)
        copy = streamlap.to_cpu(x)
        result = streamlap.to_cpu(x).result()
        ordinary = streamlap.to_cpu(x, pin=False)
        event = place.compute_stream().record()
        group = streamlap.pipelined_run(torch.ones(8, 8), n=9, wait=False)
        items = streamlap.pipelined_map(lambda k: x + k, range(9), depth=2)
        first = next(items)
        called = threading.Event()
        copy.add_done_callback(lambda _t: called.set())
    del serving, place
    gc.collect()
    assert event.synchronize(20)
    assert event.done()
    assert same_bits(copy.result(20), x)
    assert same_bits(ordinary.result(20), x)
    assert all(torch.equal(item, torch.full((8, 8), 8.0)) for item in group.result(20))
    assert torch.equal(first, x)
    assert all(torch.equal(item, x + k) for k, item in enumerate(items, 1))
    assert called.wait(20)
    result += 1  # its memory is its own
    assert same_bits(result, x + 1)


def test_a_block_ends_while_its_worker_needs_the_interpreter():
    """Whoever lets go of a runtime may hold the lock that its worker's last task waits for."""
    ended = []
    for _ in range(20):
        with streamlap.checking() as checked:
            stream = checked.place(0).compute_stream()
            for number in range(50):
                stream.launch(lambda number=number: ended.append(number))
        del checked, stream
    assert eventually(lambda: len(ended) == 20 * 50)


def test_threads_serve_inside_a_simulation_as_they_do_outside():
    assert current.get() is process
    with streamlap.use_runtime("sim"), streamlap.use_runtime("host"):
        assert current.get() is process
    with streamlap.checking() as checked:
        with streamlap.use_runtime("host", devices=2):
            assert current.get() is checked
            assert runtime_of("cpu").checked
        with streamlap.use_runtime("sim") as simulation:
            assert current.get() is simulation
            with streamlap.use_runtime("host"):
                assert current.get() is checked
        assert current.get() is checked
    assert current.get() is process


class Wrapping(Serving):
    """Wraps what serves CPU tensors, and leaves the rest alone."""

    def __init__(self):
        super().__init__(current.get())
        self.simulated = self.outer.simulated

    def _make_runtime(self, cuda):
        return None if cuda else _native.checked(self.outer.runtime())

    def now(self):
        return self.outer.now()


@pytest.mark.parametrize("outer", [None, *BLOCKS])
def test_another_kind_of_serving(outer):
    """What it wraps serves; what it does not serve, the outer one does."""
    x = random_bits((50, 50))
    with BLOCKS[outer]() if outer else streamlap.use_runtime("host"):
        inner = current.get()
        with serve(Wrapping()) as wrapping:
            assert wrapping.outer is inner
            assert runtime_of("cpu") is wrapping.place(0).runtime is not inner.place(0).runtime
            assert same_bits(streamlap.to_cpu(x).result(), x)
            found = streamlap.pipelined_run(torch.ones(4, 4), n=5)
            assert all(torch.equal(item, torch.full((4, 4), 4.0)) for item in found)
            assert wrapping.accesses > 0
            assert wrapping.now() <= inner.now()
            found = None
            assert eventually(lambda: wrapping.pool.stats()["live"] == 0)
        assert wrapping.pool.stats()["reserved"] == 0


@pytest.mark.gpu
def test_a_simulation_leaves_gpus_to_the_outer_one():
    with streamlap.checking() as checked, streamlap.use_runtime("sim") as simulation:
        assert simulation.place(0, cuda=True) is checked.place(0, cuda=True)
        assert runtime_of("cuda:0").checked
    with streamlap.use_runtime("sim") as simulation:
        assert simulation.place(0, cuda=True) is process.place(0, cuda=True)


def test_a_pool_s_first_use_says_whose_memory_it_has():
    mine = streamlap.PinnedPool("1MiB")
    with streamlap.checking() as checked:
        tensor = mine.empty(1000)
        streamlap.to_cpu(torch.ones(1000), out=tensor).result()
        assert mine._pool().runtime is checked.pool._pool().runtime
    assert torch.equal(tensor, torch.ones(1000))
    del tensor
    assert eventually(lambda: mine.stats()["live"] == mine.stats()["in_flight"] == 0)
    assert mine.trim() == 4096
