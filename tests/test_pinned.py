"""The pinned pool as Python sees it: sizes, limit, reuse, ownership, uses."""

import gc
import threading

import pytest
import torch
from helpers.data import DTYPE_SAMPLE, poison, random_bits, same_bits
from helpers.streams import eventually, finish_all, side

import streamlap
from streamlap import PinnedPool, empty_pinned, pool_stats, record_use, to_cpu

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def pool():
    return PinnedPool("4MiB")


def test_shapes_and_dtypes(pool):
    assert empty_pinned(5, pool=pool).shape == (5,)
    assert empty_pinned((2, 3), torch.int64, pool).shape == (2, 3)
    assert empty_pinned([2, 0, 3], torch.int8, pool).shape == (2, 0, 3)
    assert empty_pinned((), pool=pool).shape == ()
    assert empty_pinned(torch.Size([2, 2]), pool=pool).dtype == torch.get_default_dtype()
    assert empty_pinned((4, 5), pool=pool).is_contiguous()
    for dtype in DTYPE_SAMPLE:
        assert empty_pinned(3, dtype, pool).dtype == dtype


@pytest.mark.gpu
def test_memory_is_page_locked():
    torch.cuda.init()  # before that torch calls nothing page-locked
    assert empty_pinned(100).is_pinned()
    assert PinnedPool("1MiB").empty(100).is_pinned()


@pytest.mark.parametrize(
    "nbytes", [1, 4095, 4096, 4097, 5000, 65535, 65537, (1 << 20) - 1, (1 << 20) + 1]
)
def test_waste_is_bounded_and_shown(pool, nbytes):
    tensor = empty_pinned(nbytes, torch.uint8, pool)
    stats = pool.stats()
    assert stats["live"] == PinnedPool._block_bytes(nbytes)
    assert stats["live"] >= nbytes
    assert stats["waste"] == stats["live"] - nbytes
    if nbytes >= 4096:
        assert stats["waste"] <= nbytes / 8
    tensor.fill_(1)
    assert int(tensor.sum(dtype=torch.int64)) == nbytes


def test_the_figures_add_up(pool):
    a, b = empty_pinned(10_000, torch.uint8, pool), empty_pinned(5000, torch.uint8, pool)
    stats = pool.stats()
    assert stats["live_blocks"] == 2
    assert stats["misses"] == 2
    assert stats["hits"] == 0
    assert stats["reserved"] == stats["live"] == stats["peak"]
    del a
    gc.collect()
    assert eventually(lambda: pool.stats()["cached"] > 0)
    after = pool.stats()
    assert after["reserved"] == stats["reserved"] == after["live"] + after["cached"]
    again = empty_pinned(10_000, torch.uint8, pool)
    assert pool.stats()["hits"] == 1
    del again, b
    assert eventually(lambda: pool.stats()["live"] == 0 and pool.stats()["in_flight"] == 0)
    assert pool.trim() == stats["reserved"]
    assert pool.stats()["reserved"] == 0
    assert pool.stats()["peak"] == stats["peak"]
    assert pool.trim() == 0
    assert "limit=4194304" in repr(pool)


def test_trim_gives_memory_back_to_the_system():
    pool = PinnedPool("256MiB")

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    tensor = empty_pinned(128 << 20, torch.uint8, pool).fill_(1)
    full = resident()
    del tensor
    assert eventually(lambda: pool.trim() > 0)
    assert full - resident() > 100 << 20


def test_the_limit_is_hard(pool):
    a = empty_pinned(3 << 20, torch.uint8, pool)
    with pytest.raises(streamlap.PoolExhausted) as caught:
        empty_pinned(2 << 20, torch.uint8, pool)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert isinstance(error, streamlap.StreamlapError)
    assert error.used == 3 << 20
    assert error.limit == 4 << 20
    assert str(2 << 20) in str(error)
    stats = pool.stats()
    assert stats["live_blocks"] == 1
    del a
    b = empty_pinned(4 << 20, torch.uint8, pool)  # what was cached had to go
    assert pool.stats()["reserved"] == 4 << 20
    assert b.numel() == 4 << 20


def test_a_request_beyond_the_limit(pool):
    with pytest.raises(streamlap.PoolExhausted):
        empty_pinned(5 << 20, torch.uint8, pool)
    with pytest.raises((MemoryError, ValueError)):
        empty_pinned(1 << 62, torch.uint8, pool)
    assert pool.stats()["reserved"] == 0


def test_the_limit_waits_for_blocks_in_flight(where):
    pool = PinnedPool(4 << 20)
    consumer = side(where, "consumer")
    tensor = empty_pinned(3 << 20, torch.uint8, pool)
    record_use(tensor, consumer.stream)
    del tensor
    finish_all(where)
    tensor = empty_pinned(3 << 20, torch.uint8, pool)
    gate = consumer.hold()
    record_use(tensor, consumer.stream)
    del tensor
    assert pool.stats()["in_flight"] == 3 << 20
    found = []
    thread = threading.Thread(target=lambda: found.append(empty_pinned(3 << 20, torch.uint8, pool)))
    thread.start()
    assert not eventually(lambda: bool(found), 0.02)
    gate.open()
    thread.join(20)
    assert found.pop().numel() == 3 << 20


@pytest.mark.parametrize("limit", [0, 1, 4095, "4095", "0B"])
def test_a_limit_below_the_smallest_block(limit):
    with pytest.raises(ValueError, match="smallest block"):
        PinnedPool(limit)


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        (-1, ValueError),
        ("2 bananas", ValueError),
        ("", ValueError),
        (1.5, TypeError),
        (True, TypeError),
    ],
)
def test_a_limit_that_is_no_size(limit, kind):
    with pytest.raises(kind, match="limit") as caught:
        PinnedPool(limit)
    assert isinstance(caught.value, streamlap.StreamlapError)


def test_sizes_as_strings():
    assert PinnedPool("2MiB").limit == 2 << 20
    assert PinnedPool("1.5MB").limit == 1_500_000
    assert PinnedPool(4096).limit == 4096


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (-1, ValueError),
        ((2, -3), ValueError),
        ("ab", TypeError),
        (1.5, TypeError),
        (None, TypeError),
    ],
)
def test_a_shape_that_is_none(pool, shape, kind):
    with pytest.raises(kind, match="shape") as caught:
        empty_pinned(shape, pool=pool)
    assert isinstance(caught.value, streamlap.StreamlapError)
    assert pool.stats()["reserved"] == 0


def test_a_dtype_or_a_pool_that_is_none(pool):
    with pytest.raises(TypeError, match="dtype"):
        empty_pinned(3, "float32", pool)
    with pytest.raises(TypeError, match="pool"):
        empty_pinned(3, pool="4MiB")


def test_views_own_the_block(pool):
    tensor = empty_pinned(10_000, pool=pool)
    tensor[100:200] = 7
    address = tensor.data_ptr()
    views = [tensor[100:200], tensor.view(100, 100)[1], tensor[100:200].numpy()]
    del tensor
    gc.collect()
    other = empty_pinned(10_000, pool=pool)
    assert other.data_ptr() != address
    poison(other)
    while views:
        assert float(views[0][0]) == 7
        assert pool.stats()["live_blocks"] == 2
        views.pop(0)
        gc.collect()
    assert eventually(lambda: pool.stats()["live_blocks"] == 1)


def test_blocks_outlive_their_pool(where):
    pool = PinnedPool("1MiB")
    x = random_bits((20, 20), where=where)
    result = to_cpu(x, pool=pool).result()
    del pool
    gc.collect()
    assert same_bits(result, x)


def test_reuse_is_immediate_when_nothing_uses_the_block(pool):
    addresses = {empty_pinned(10_000, torch.uint8, pool).data_ptr() for _ in range(20)}
    assert len(addresses) == 1
    assert pool.stats()["misses"] == 1


def test_one_slow_event_holds_back_no_other_block(where):
    pool = PinnedPool("1MiB")
    consumer = side(where, "consumer")
    slow, quick = empty_pinned(10_000, torch.uint8, pool), empty_pinned(10_000, torch.uint8, pool)
    addresses = slow.data_ptr(), quick.data_ptr()
    finish_all(where)
    gate = consumer.hold()
    record_use(slow, consumer.stream)
    del slow
    del quick
    assert empty_pinned(10_000, torch.uint8, pool).data_ptr() == addresses[1]
    assert pool.stats()["in_flight"] > 0
    gate.open()
    assert eventually(lambda: pool.stats()["in_flight"] == 0)


def test_record_use_by_any_view_and_many_streams(where):
    pool = PinnedPool("1MiB")
    streams = [side(where, role) for role in ("producer", "consumer")]
    tensor = empty_pinned(10_000, torch.uint8, pool)
    finish_all(where)
    gates = [stream.hold() for stream in streams]
    record_use(tensor[5000:], streams[0].stream)
    record_use(tensor[9999:], streams[1].stream)
    del tensor
    for gate in gates:
        assert pool.stats()["in_flight"] > 0
        gate.open()
    assert eventually(lambda: pool.stats()["in_flight"] == 0)


def test_record_use_of_other_memory(where):
    stream = side(where, "consumer").stream
    with pytest.raises(ValueError, match="pinned pool"):
        record_use(torch.ones(10), stream)
    with pytest.raises(TypeError):
        record_use(5, stream)
    with pytest.raises(TypeError):
        record_use(empty_pinned(5), None)
    with pytest.raises((TypeError, RuntimeError)) as caught:
        record_use(empty_pinned(5), "stream")
    assert isinstance(caught.value, streamlap.StreamlapError)
    record_use(empty_pinned(0), stream)


def test_pool_stats_by_device(where):
    assert set(pool_stats(where)) == set(pool_stats())
    with pytest.raises(ValueError, match="nonsense"):
        pool_stats("nonsense")
    with pytest.raises(ValueError, match="mps"):
        pool_stats("mps")


def test_many_threads_of_one_pool(pool):
    """Each thread sees only its own bytes, and the limit holds all the time."""
    faults = []

    def work(number):
        generator = torch.Generator().manual_seed(number)
        for _ in range(150):
            size = int(torch.randint(1, 200_000, (), generator=generator))
            try:
                tensor = empty_pinned(size, torch.uint8, pool)
            except streamlap.PoolExhausted:
                continue
            tensor.fill_(number)
            other = tensor[::997].clone()
            if not bool((tensor == number).all()) or not bool((other == number).all()):
                faults.append(number)
            if pool.stats()["reserved"] > pool.limit:
                faults.append("limit")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert eventually(lambda: pool.stats()["live"] == 0)
    assert pool.stats()["waste"] == 0


@pytest.mark.gpu
def test_no_context_on_a_device_that_was_not_asked_for():
    """In a fresh process: pinning and one device's copies leave the others alone."""
    import subprocess
    import sys

    code = (
        "import torch, streamlap\n"
        "streamlap.empty_pinned(1000)\n"
        "streamlap.copy_to_cpu(torch.ones(10, device='cuda:0'))\n"
        "streamlap.synchronize()\n"
        "others = range(1, torch.cuda.device_count())\n"
        "assert not any(torch._C._cuda_hasPrimaryContext(i) for i in others)\n"
        "assert torch._C._cuda_hasPrimaryContext(0)\n"
        "assert torch.cuda.current_device() == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_block_in_flight_is_waited_for_although_nobody_holds_it():
    """Dropped handles: the engine holds their blocks until the copies are done."""
    pool = streamlap.PinnedPool("20MiB")
    x = torch.ones(16 << 20, dtype=torch.uint8)
    for _ in range(20):
        streamlap.to_cpu(x, pool=pool)
    assert bool((streamlap.to_cpu(x, pool=pool).result() == 1).all())


def test_prewarmed_blocks_are_hits():
    pool = PinnedPool("256MiB")
    streamlap.prewarm("32MiB", block=4 << 20, pool=pool)
    stats = pool.stats()
    assert stats["cached"] == stats["reserved"] == 32 << 20
    streamlap.prewarm(30 << 20, block="4MiB", pool=pool)  # rounded up, and there already
    tensors = [empty_pinned(4 << 20, torch.uint8, pool) for _ in range(8)]
    assert pool.stats()["hits"] == 8
    assert pool.stats()["misses"] == 0
    del tensors
    streamlap.prewarm(100_000, pool=pool)
    assert eventually(lambda: pool.trim() > 0)
    assert pool.stats()["reserved"] == 0


def test_prewarming_in_the_background():
    pool = PinnedPool("256MiB")
    streamlap.prewarm("64MiB", block="1MiB", pool=pool, wait=False)
    tensors = [empty_pinned(1 << 20, torch.uint8, pool).fill_(i) for i in range(64)]
    assert [int(tensor[-1]) for tensor in tensors] == list(range(64))
    assert pool.stats()["misses"] == 0
    assert pool.stats()["reserved"] == 64 << 20


def test_prewarming_beyond_the_limit(pool):
    held = empty_pinned(2 << 20, torch.uint8, pool)
    for wait in (True, False):
        with pytest.raises(streamlap.PoolExhausted) as caught:
            streamlap.prewarm("3MiB", block="1MiB", pool=pool, wait=wait)
        assert (caught.value.used, caught.value.limit) == (2 << 20, 4 << 20)
    assert pool.stats()["reserved"] == held.nbytes


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"nbytes": 0}, ValueError),
        ({"nbytes": -1}, ValueError),
        ({"nbytes": "much"}, ValueError),
        ({"nbytes": 1.5}, TypeError),
        ({"nbytes": 4096, "block": 0}, ValueError),
        ({"nbytes": 4096, "block": 8192}, ValueError),
        ({"nbytes": 4096, "block": "4 pages"}, ValueError),
        ({"nbytes": 4096, "wait": 1}, TypeError),
        ({"nbytes": 4096, "pool": "4MiB"}, TypeError),
    ],
)
def test_prewarming_sizes_that_are_none(pool, arguments, kind):
    with pytest.raises(kind) as caught:
        streamlap.prewarm(**{"pool": pool, **arguments})
    assert isinstance(caught.value, streamlap.StreamlapError)
    assert pool.stats()["reserved"] == 0


def test_small_tensors_share_reservations_and_are_given_back():
    pool = PinnedPool("256MiB")
    tensors = [empty_pinned(4096, torch.uint8, pool).fill_(i % 251) for i in range(2000)]
    stats = pool.stats()
    assert stats["slabs"] < 20
    assert stats["live"] == 2000 * 4096
    assert all(int(tensor[0]) == i % 251 for i, tensor in enumerate(tensors))
    kept = tensors[1500]
    del tensors[:]
    assert eventually(lambda: pool.stats()["live"] == 4096)
    pool.trim()
    assert pool.stats()["slabs"] == 1
    assert int(kept.sum(dtype=torch.int64)) == 4096 * (1500 % 251)


def test_a_child_of_a_pool_that_grew_is_refused_and_its_parent_goes_on():
    """In a fresh process, forked while threads of the pool make blocks."""
    import subprocess
    import sys

    code = (
        "import os, warnings; warnings.filterwarnings('ignore')\n"
        "import torch, streamlap\n"
        "pool = streamlap.PinnedPool('1GiB')\n"
        "streamlap.prewarm('512MiB', block='1MiB', pool=pool, wait=False)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        streamlap.empty_pinned(1 << 20, torch.uint8, pool)\n"
        "    except streamlap.ForkedProcess:\n"
        "        del pool\n"
        "        os._exit(7)\n"
        "    os._exit(1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "kept = [streamlap.empty_pinned(1 << 20, torch.uint8, pool) for _ in range(512)]\n"
        "assert pool.stats()['misses'] == 0\n"
        "del kept\n"  # what a program ends with is left to the system, which a sanitizer tells
        "streamlap.prewarm('256MiB', block='2MiB', pool=pool, wait=False)\n"  # and ends meanwhile
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=100, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.gpu
def test_large_blocks_and_parts_of_them_are_page_locked():
    torch.cuda.init()
    pool = PinnedPool("1GiB")
    streamlap.prewarm("128MiB", block="64MiB", pool=pool)
    tensor = empty_pinned(64 << 20, torch.uint8, pool)
    assert tensor.is_pinned()
    assert tensor[12345:67890].is_pinned()
    source = torch.full((64 << 20,), 3, dtype=torch.uint8, device="cuda")
    tensor.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert bool((tensor == 3).all())
