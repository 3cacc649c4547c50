"""Tiny products in groups. On a GPU they are the usual call; here they run on worker threads."""

import gc
import io
import threading

import pytest
import torch
from helpers.data import random_numbers, same_bits, same_tree
from helpers.streams import eventually

import streamlap
from streamlap import grouped, watch
from streamlap.devices import host_place
from streamlap.grouped import ALIGN, Layout, grouped_products
from streamlap.pinned import PinnedPool, pool_for

pytestmark = pytest.mark.usefixtures("nothing_left")

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def run(monkeypatch):
    """``run(x, n, tiny)``: on a host stream that stands for torch's current one."""
    watch.enter()
    stream = host_place(0).runtime.stream(0, "compute")
    monkeypatch.setattr(grouped, "current_handle", lambda index: stream.handle)
    real = grouped._order

    def order(stream, native):
        native.sync()  # the host multiplies at once, not in a stream's order
        real(stream, native)

    monkeypatch.setattr(grouped, "_order", order)
    place = host_place(0)

    def call(x, n, tiny=4 * KIB, pool=None):
        layout = Layout(x.nbytes, n, 4, tiny)
        return grouped_products(x, n, layout, place, pool or pool_for(place))

    return call


@pytest.fixture
def distinct(monkeypatch):
    """Every product is another one: equal results would hide those that were swapped or stale."""
    made = []

    def multiply(x, out):
        torch.mm(x, x, out=out)
        out += len(made)
        made.append(out.clone())

    monkeypatch.setattr(grouped, "multiply", multiply)
    return made


@pytest.mark.parametrize(
    ("item", "n", "depth", "pitch", "group", "groups", "buffers"),
    [
        (256 * KIB, 50, 4, 256 * KIB, 8, 7, 2),
        (MIB, 50, 4, MIB, 2, 25, 2),
        (16 * KIB, 50, 4, 16 * KIB, 50, 1, 2),
        (36, 7, 4, 512, 7, 1, 2),
        (513, 3000, 4, 1024, 2048, 2, 2),
        (MIB, 3, 1, MIB, 1, 3, 1),
        (MIB, 9, 3, MIB, 1, 9, 2),
    ],
)
def test_layout(item, n, depth, pitch, group, groups, buffers):
    layout = Layout(item, n, depth, MIB)
    assert (layout.pitch, layout.group, layout.groups) == (pitch, group, groups)
    assert layout.buffers == buffers
    assert layout.buffers * layout.group * layout.pitch <= max(depth * MIB, layout.pitch)
    assert layout.pitch % ALIGN == 0


@pytest.mark.parametrize("size", [1, 3, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_each_result_is_its_own_product(run, distinct, size, dtype):
    x = random_numbers((size, size), dtype)
    results = run(x, 41)
    assert same_tree(results, distinct)
    assert len({result.data_ptr() for result in results}) == 41
    assert all(result.is_contiguous() and result.shape == x.shape for result in results)
    assert all(result.data_ptr() % ALIGN == 0 for result in results)


def test_a_result_is_no_view_of_its_neighbours(run):
    x = random_numbers((8, 8))
    results = run(x, 5)
    assert all(result.untyped_storage().nbytes() == x.nbytes for result in results)
    file = io.BytesIO()
    torch.save(results[3], file)
    assert file.tell() < 4 * KIB
    results[3].zero_()
    assert same_bits(results[2], x.mm(x))
    assert same_bits(results[4], x.mm(x))


def test_results_outlive_their_neighbours_and_a_trim(run, distinct):
    x = random_numbers((16, 16))
    pool = PinnedPool(MIB)
    kept = run(x, 20, pool=pool)[13]
    assert eventually(lambda: pool.stats()["live_blocks"] == 1)
    pool.trim()
    later = run(x, 20, pool=pool)  # other bits, in the memory that is free again
    assert same_bits(kept, distinct[13])
    assert same_tree(later, distinct[20:])


@pytest.mark.parametrize("index", [0, 7, 8, 19])
def test_an_error_comes_with_its_index_and_gives_all_back(run, monkeypatch, index):
    error = ArithmeticError("deliberate")
    calls = []

    def multiply(x, out):
        if len(calls) == index:
            raise error
        calls.append(1)
        torch.mm(x, x, out=out)

    monkeypatch.setattr(grouped, "multiply", multiply)
    gc.collect()
    before = streamlap.pool_stats("cpu")["live"]
    with pytest.raises(ArithmeticError) as caught:
        run(random_numbers((32, 32)), 20)
    assert caught.value is error
    assert error.streamlap_index == index
    assert streamlap.pool_stats("cpu")["live"] == before  # although the error is still held


def test_ctrl_c_leaves_what_is_in_flight_to_itself(run, monkeypatch):
    calls = []

    def multiply(x, out):
        calls.append(1)
        if len(calls) == 11:
            raise KeyboardInterrupt
        torch.mm(x, x, out=out)

    monkeypatch.setattr(grouped, "multiply", multiply)
    with pytest.raises(KeyboardInterrupt):
        run(random_numbers((32, 32)), 20)
    assert eventually(lambda: gc.collect() >= 0 and streamlap.pool_stats("cpu")["live"] == 0)


def test_the_pool_s_limit_is_kept(run):
    x = random_numbers((32, 32))
    pool = PinnedPool(16 * KIB)
    with pytest.raises(streamlap.PoolExhausted) as caught:
        run(x, 20, pool=pool)
    assert caught.value.streamlap_index == 5  # in the third group of two times 4 KiB
    assert caught.value.limit == 16 * KIB
    del caught
    assert len(run(x, 4, pool=pool)) == 4


def test_full_groups_are_made_ahead_and_no_more(run, monkeypatch):
    said = []

    class Growth:
        def cancel(self):
            said.append("cancelled")

    def grow_ahead(pool, nbytes, count):
        said.append((nbytes, count))
        return Growth()

    monkeypatch.setattr(PinnedPool, "_grow_ahead", grow_ahead)
    run(random_numbers((32, 32)), 21)  # 10 groups of two, and one
    assert said == [(8 * KIB, 10), "cancelled"]


def test_threads(run):
    xs = [random_numbers((16, 16)) for _ in range(4)]
    results = [[] for _ in xs]

    def work(index):
        for _ in range(20):
            results[index] = run(xs[index], 30)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, lane in zip(xs, results, strict=True):
        assert same_tree(lane, [x.mm(x)] * 30)


# -- on a GPU

SIZES = [1, 33, 64, 256, 512]


@pytest.fixture
def taken(monkeypatch):
    """What takes the way through groups, as (size, n)."""
    from streamlap import product

    seen = []

    def run(x, n, *rest):
        seen.append((x.shape[0], n))
        return grouped_products(x, n, *rest)

    monkeypatch.setattr(product, "grouped_products", run)
    streamlap.copy_to_cpu(torch.ones(2, device="cuda:0"))  # not the first call of the process
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_bits_are_those_of_one_product(taken, size, dtype):
    x = random_numbers((size, size), dtype, "cuda:0")
    for n in (1, 2, 50):
        assert same_tree(streamlap.pipelined_run(x, n=n), [x.mm(x).cpu()] * n)
        x.add_(1)  # the next call's results are others
    fits = x.nbytes <= MIB
    assert taken == [(size, n) for n in (1, 2, 50)] * fits


@pytest.mark.gpu
def test_results_of_a_gpu_are_in_order(taken, distinct):
    x = random_numbers((100, 100), where="cuda:0")
    for _ in range(10):
        distinct.clear()
        assert same_tree(streamlap.pipelined_run(x, n=50), [made.cpu() for made in distinct])
    assert len(taken) == 10


@pytest.mark.gpu
def test_device_memory_is_bounded_by_bytes(taken):
    x = random_numbers((256, 256), where="cuda:0")
    streamlap.pipelined_run(x, n=3)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    streamlap.pipelined_run(x, n=200)
    assert torch.cuda.max_memory_allocated() - before <= 4 * MIB
    assert eventually(lambda: torch.cuda.memory_allocated() == before)
    assert taken


@pytest.mark.gpu
def test_autocast_goes_item_by_item(taken):
    x = random_numbers((64, 64), where="cuda:0")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        results = streamlap.pipelined_run(x, n=3)
        expected = x.mm(x).cpu()
    assert expected.dtype == torch.bfloat16
    assert same_tree(results, [expected] * 3)
    assert taken == []


@pytest.mark.gpu
def test_groups_on_side_streams_and_threads(taken):
    failures = []

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = random_numbers((128, 128), where="cuda:0")
            for step in range(20):
                x.fill_(0.01 * (seed + step))
                expected = x.mm(x)
                results = streamlap.pipelined_run(x, n=40)
                if not same_tree(results, [expected.cpu()] * 40):
                    failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(taken) == 80


@pytest.mark.gpu
def test_groups_are_checked(taken):
    x = random_numbers((256, 256), where="cuda:0")
    with streamlap.checking() as checked:
        assert same_tree(streamlap.pipelined_run(x, n=50), [x.mm(x).cpu()] * 50)
    assert checked.accesses >= 4 * 7  # of each group: written, read, landed, read by the host
    assert taken
