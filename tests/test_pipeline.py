"""pipelined_run, run and parallel_run: results, counts, bounds, errors, overlap, modes."""

import contextlib
import contextvars
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from helpers.data import poison, random_bits, random_numbers, same_bits, same_tree
from helpers.streams import PATIENCE, CopySide, engine_of, eventually, finish_all, side, stays_false

import streamlap
from streamlap import parallel_run, pipelined_run, run

pytestmark = pytest.mark.usefixtures("nothing_left")

N = 24


class Boom(Exception):
    pass


class Distinct:
    """An fn whose results all differ, and that counts its calls."""

    def __init__(self, shape=(16, 16), where="cpu", count=N):
        self.values = [random_bits(shape, where=where) for _ in range(count)]
        self.calls = 0

    def __call__(self, x):
        value = self.values[self.calls].clone()
        self.calls += 1
        return value

    def expected(self):
        return [value.cpu() for value in self.values[: self.calls]]


# -- results


def test_the_default_fn_is_a_product(where):
    x = random_numbers((48, 48), where=where)
    results = pipelined_run(x, n=5)
    assert type(results) is list
    expected = x.mm(x).cpu()
    assert len({result.data_ptr() for result in results}) == 5
    for result in results:
        assert result.device.type == "cpu"
        assert same_bits(result, expected)


def test_n_is_50_by_default(where):
    assert len(pipelined_run(random_numbers((4, 4), where=where))) == 50
    assert len(run(random_numbers((4, 4), where=where))) == 50


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 100])
def test_distinct_results_come_in_order_and_bit_for_bit(where, depth):
    fn = Distinct(where=where)
    results = pipelined_run(fn.values[0], n=N, fn=fn, depth=depth)
    assert fn.calls == N
    assert same_tree(results, fn.expected())


@pytest.mark.parametrize("options", [{"pin": False}, {"pin": True}, {"dtype": torch.float64}])
def test_options_of_results(where, options):
    values = [random_numbers((9, 7), where=where) for _ in range(N)]
    left = iter(values)
    results = pipelined_run(values[0], n=N, fn=lambda x: next(left).clone(), **options)
    dtype = options.get("dtype", torch.float32)
    assert same_tree(results, [value.to(dtype).cpu() for value in values])


@pytest.mark.parametrize("form", ["list", "tuple", "tensor", "numpy", "numpy_list", "strided"])
def test_results_go_where_they_are_sent(where, form):
    fn = Distinct((8, 6), where)
    out = {
        "list": lambda: [torch.empty(8, 6) for _ in range(N)],
        "tuple": lambda: tuple(torch.empty(8, 6) for _ in range(N)),
        "tensor": lambda: torch.empty(N, 8, 6),
        "numpy": lambda: np.empty((N, 8, 6), np.float32),
        "numpy_list": lambda: [np.empty((8, 6), np.float32) for _ in range(N)],
        "strided": lambda: torch.empty(N, 8, 12)[:, :, ::2],
    }[form]()
    before = streamlap.pool_stats(where)["live"]
    results = pipelined_run(fn.values[0], n=N, fn=fn, out=out)
    if form != "strided" or where == "cpu":
        assert streamlap.pool_stats(where)["live"] == before
    assert len(results) == N
    for item, value in zip(out, fn.expected(), strict=True):
        assert same_bits(item, value)
    if form in {"list", "tuple", "numpy_list"}:
        assert all(result is item for result, item in zip(results, out, strict=True))
    else:
        assert same_bits(results[3], fn.expected()[3])


def test_nothing_to_do(where):
    x = random_numbers((4, 4), where=where)

    def never(x):
        raise AssertionError

    assert pipelined_run(x, n=0) == []
    assert pipelined_run(x, n=0, fn=never) == []
    assert pipelined_run([x, x], n=0) == [[], []]
    assert pipelined_run([], n=3) == []
    assert run(x, n=0) == []
    transfer = pipelined_run(x, n=0, wait=False)
    assert transfer.done()
    assert transfer.result() == []
    calls = []
    transfer.add_done_callback(calls.append)
    assert len(calls) == 1


def test_one_item(where):
    x = random_numbers((4, 4), where=where)
    assert same_tree(pipelined_run(x, n=1), [x.mm(x).cpu()])


def test_trees_from_fn(where):
    values = [random_bits((5,), where=where) for _ in range(2 * N)]
    calls = []

    def fn(x):
        calls.append(1)
        i = len(calls) - 1
        return {"i": i, "pair": (values[2 * i].clone(), [values[2 * i + 1].clone()]), "no": None}

    results = pipelined_run(values[0], n=N, fn=fn)
    for i, result in enumerate(results):
        assert result["i"] == i
        assert result["no"] is None
        assert same_bits(result["pair"][0], values[2 * i])
        assert same_bits(result["pair"][1][0], values[2 * i + 1])


def test_results_without_tensors(where):
    calls = iter(range(N))
    assert pipelined_run(torch.ones(2, device=where), N, fn=lambda x: next(calls)) == list(range(N))


def test_results_of_changing_shape(where):
    sizes = iter(range(N))
    results = pipelined_run(torch.ones(2, device=where), N, fn=lambda x: x.new_ones(next(sizes), 3))
    assert [tuple(result.shape) for result in results] == [(i, 3) for i in range(N)]


def test_fn_may_return_its_input(where):
    """The same memory each time, never written: right, not refused."""
    x = random_bits((6, 6), where=where)
    assert all(same_bits(result, x) for result in pipelined_run(x, n=N, fn=lambda x: x))


def test_a_list_runs_on_logical_devices_at_once(where):
    del where
    xs = [random_numbers((16, 16)) for _ in range(2)]
    with streamlap.use_runtime("host", devices=2):
        results = pipelined_run(xs, n=N)
    assert [len(lane) for lane in results] == [N, N]
    for lane, x in zip(results, xs, strict=True):
        assert all(same_bits(result, x.mm(x)) for result in lane)


def test_two_logical_devices_compute_at_the_same_time():
    """Each fn waits for the other's: one device after the other would never end."""
    meeting = threading.Barrier(2, timeout=PATIENCE)
    xs = [torch.ones(2, 2), torch.full((2, 2), 2.0)]

    def fn(x):
        meeting.wait()
        return x.clone()

    with streamlap.use_runtime("host", devices=2):
        results = pipelined_run(xs, n=5, fn=fn)
        lists = parallel_run(xs, n=5, fn=fn)
    for lane, x in zip(results, xs, strict=True):
        assert same_tree(lane, [x] * 5)
    for lane, x in zip(lists, xs, strict=True):
        assert same_tree(lane, [x] * 5)


def test_a_list_with_outs(where):
    xs = [random_numbers((8, 8), where=where) for _ in range(2)]
    out = [torch.empty(3, 8, 8), [torch.empty(8, 8) for _ in range(3)]]
    results = pipelined_run(xs, n=3, out=out)
    for lane, target, x in zip(results, out, xs, strict=True):
        for result, item in zip(lane, target, strict=True):
            assert same_bits(result, item)
            assert same_bits(item, x.mm(x))


def test_numpy_in_numpy_out(where):
    del where
    x = np.random.default_rng(3).standard_normal((16, 16)).astype(np.float32)
    results = pipelined_run(x, n=3)
    assert all(isinstance(result, np.ndarray) for result in results)
    expected = torch.from_numpy(x).mm(torch.from_numpy(x)).numpy()
    assert all(np.array_equal(result, expected) for result in results)


@pytest.mark.gpu
def test_cupy_in_numpy_out():
    cupy = pytest.importorskip("cupy")
    x = cupy.random.default_rng(3).standard_normal((16, 16), dtype=cupy.float32)
    results = pipelined_run(x, n=3)
    expected = torch.from_dlpack(x)
    expected = expected.mm(expected).cpu().numpy()
    assert all(isinstance(result, np.ndarray) for result in results)
    assert all(np.array_equal(result, expected) for result in results)
    results = pipelined_run(x, n=3, fn=lambda x: x + 1)
    assert all(np.array_equal(result, cupy.asnumpy(x) + 1) for result in results)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_two_gpus_at_once():
    xs = [random_numbers((64, 64), where=f"cuda:{index}") for index in range(2)]
    results = pipelined_run(xs, n=N)
    for lane, x in zip(results, xs, strict=True):
        assert all(same_bits(result, x.mm(x)) for result in lane)
    assert torch.cuda.current_device() == 0
    for lane, x in zip(parallel_run(xs, n=3), xs, strict=True):
        assert all(result.device == x.device for result in lane)
        assert all(same_bits(result, x.mm(x)) for result in lane)
    assert same_tree(pipelined_run(xs[1], n=3), [xs[1].mm(xs[1]).cpu()] * 3)


def test_run_and_parallel_run(where):
    x = random_numbers((8, 8), where=where)
    results = run(x, n=3)
    assert all(result.device.type == torch.device(where).type for result in results)
    assert same_tree(results, [x.mm(x)] * 3)
    fn = Distinct(where=where)
    assert same_tree(run(x, n=N, fn=fn), fn.values)
    fn = Distinct(where=where)
    assert same_tree(parallel_run([x], n=N, fn=fn), [fn.values])
    assert parallel_run([], n=3) == []


def test_fn_is_called_exactly_n_times(where):
    """The products that torch's profiler sees are n, not more."""
    x = random_numbers((32, 32), where=where)
    calls = []

    def fn(x):
        calls.append(threading.get_ident())
        return x.mm(x)

    pipelined_run(x, n=N, fn=fn)
    assert len(calls) == N
    if where != "cpu":
        assert set(calls) == {threading.get_ident()}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            pipelined_run(x, n=N)
        assert sum(e.count for e in profile.key_averages() if e.key == "aten::mm") == N


# -- wait=False


def test_the_caller_is_back_before_the_work_is_done():
    gate = threading.Event()
    x = random_bits((8, 8))

    def fn(x):
        assert gate.wait(PATIENCE)
        return x.clone()

    transfer = pipelined_run(x, n=N, fn=fn, wait=False)
    assert not transfer.done()
    assert len(transfer) == N
    assert "issued" in repr(transfer)
    with pytest.raises(streamlap.TransferTimeout):
        transfer.result(timeout=0.01)
    gate.set()
    assert same_tree(transfer.result(), [x] * N)
    assert transfer.done()
    assert transfer.nbytes == N * 256


def test_items_come_one_by_one():
    """Item 0 is there while fn of item 1 has not returned."""
    gate = threading.Event()
    values = [random_bits((8, 8)) for _ in range(3)]
    left = iter(range(3))

    def fn(x):
        i = next(left)
        assert i == 0 or gate.wait(PATIENCE)
        return values[i].clone()

    transfer = pipelined_run(values[0], n=3, fn=fn, wait=False)
    assert same_bits(transfer[0], values[0])
    assert same_bits(next(iter(transfer)), values[0])
    assert not transfer.done()
    gate.set()
    assert same_bits(transfer[-1], values[2])
    assert same_tree(transfer[:2], values[:2])
    assert same_tree([view for _, _, view in transfer.chunks()], [v.view(-1) for v in values])


def test_callbacks_and_await_of_a_pipeline():
    import asyncio

    gate = threading.Event()
    x = random_bits((8, 8))

    def fn(x):
        assert gate.wait(PATIENCE)
        return x.clone()

    transfer = pipelined_run(x, n=3, fn=fn, wait=False)
    called = threading.Event()
    transfer.add_done_callback(lambda done: called.set())

    async def main():
        asyncio.get_running_loop().call_later(0.01, gate.set)
        return await transfer

    assert same_tree(asyncio.run(main()), [x] * 3)
    assert called.wait(PATIENCE)


def test_a_dropped_pipeline_still_writes_its_outs(where):
    out = poison(torch.empty(N, 8, 8))
    fn = Distinct((8, 8), where)
    pipelined_run(fn.values[0], n=N, fn=fn, out=out, wait=False)
    gc.collect()
    assert eventually(lambda: fn.calls == N)
    assert eventually(lambda: engine_of(where).abandoned() == 0)
    finish_all(where)
    assert eventually(lambda: same_tree(list(out), fn.expected()))


def test_copies_overlap_later_calls_of_fn():
    """fn of item 2 lets the copies of items 0 and 1 begin, and ends after they have ended."""
    values = [random_bits((300, 300)) for _ in range(6)]
    calls = iter(range(6))
    intervals = []
    holder = {}
    started = threading.Event()

    def fn(x):
        assert started.wait(PATIENCE)
        i = next(calls)
        begin = time.perf_counter()
        value = values[i].clone()
        if i == 2:
            holder["gate"].open()
            for slot in holder["transfer"]._slots[:2]:
                slot.get(PATIENCE).result(PATIENCE)
        intervals.append((begin, time.perf_counter()))
        return value

    copies = CopySide("cpu")
    holder["gate"] = copies.hold()
    holder["transfer"] = pipelined_run(values[0], n=6, fn=fn, wait=False)
    started.set()
    assert same_tree(holder["transfer"].result(), values)
    for slot in holder["transfer"]._slots[:2]:
        begin, end = slot.get().stats()["interval"]
        assert intervals[2][0] <= begin <= end <= intervals[2][1]
    holder.clear()


def test_the_interval_of_a_pipeline_spans_its_items():
    before = time.perf_counter()
    transfer = pipelined_run(torch.ones(4, 4), n=5, wait=False)
    transfer.result()
    begin, end = transfer.stats()["interval"]
    assert before <= begin <= end <= time.perf_counter()
    assert transfer.elapsed() >= 0
    assert transfer.stats()["leaves"] == 5


# -- bounds


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_at_most_depth_results_wait(depth):
    """Watched by the death of the memory that fn's results own."""
    alive = set()
    most = 0
    count = iter(range(N))

    def fn(x):
        nonlocal most
        i = next(count)
        most = max(most, len(alive))
        array = np.full((4, 4), float(i), np.float32)
        alive.add(i)
        weakref.finalize(array, alive.discard, i)
        return torch.from_numpy(array)

    results = pipelined_run(torch.ones(2, 2), N, fn=fn, depth=depth)
    assert [float(result[0, 0]) for result in results] == list(range(N))
    assert most <= depth
    assert eventually(lambda: not alive)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_fn_runs_at_most_depth_items_ahead_of_the_copies(depth):
    """No copy happens: fn of item `depth` must not be called before item 0 has arrived."""
    fn = Distinct()
    copies = CopySide("cpu")
    gate = copies.hold()
    transfer = pipelined_run(fn.values[0], n=N, fn=fn, depth=depth, wait=False)
    assert eventually(lambda: fn.calls == depth)
    assert stays_false(lambda: fn.calls > depth)
    gate.open()
    assert same_tree(transfer.result(), fn.expected())
    assert fn.calls == N


def test_results_are_let_go_of_although_nobody_asks():
    """With wait=False nobody calls result(); the pipeline itself must let go of what has landed."""
    alive, most = set(), 0
    count = iter(range(N))

    def fn(x):
        nonlocal most
        most = max(most, len(alive))
        i = next(count)
        array = np.full(4, float(i), np.float32)
        alive.add(i)
        weakref.finalize(array, alive.discard, i)
        return torch.from_numpy(array)

    transfer = pipelined_run(torch.ones(2), n=N, fn=fn, depth=3, wait=False)
    assert eventually(lambda: transfer._slots[-1].filled)
    assert most <= 3
    assert [float(result[0]) for result in transfer.result()] == list(range(N))


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("fn", [None, lambda x: x.mm(x)])
@pytest.mark.parametrize("pin", [None, False])
def test_device_memory_is_bounded_by_depth(depth, fn, pin):
    x = random_numbers((1024, 1024), where="cuda:0")
    pipelined_run(x, n=3, fn=fn, depth=depth, pin=pin)
    finish_all("cuda:0")
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pipelined_run(x, n=N, fn=fn, depth=depth, pin=pin)
    # One more is being computed while `depth` are on their way.
    assert torch.cuda.max_memory_allocated() - before <= (depth + 1) * x.nbytes
    assert eventually(lambda: torch.cuda.memory_allocated() == before)


def test_a_pipeline_leaves_no_pinned_memory_behind(where):
    x = random_numbers((64, 64), where=where)
    results = pipelined_run(x, n=N)
    assert streamlap.pool_stats(where)["live"] >= N * x.nbytes
    del results


def test_results_that_cannot_fit_are_refused_before_the_first_product(where):
    pool = streamlap.PinnedPool(64 << 10)
    x = random_numbers((64, 64), where=where)
    held = streamlap.empty_pinned(4 << 10, torch.uint8, pool)
    before = pool.stats()
    with pytest.raises(streamlap.PoolExhausted, match="65536") as caught:
        pipelined_run(x, n=5, pin=True, pool=pool)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.used == held.nbytes
    assert caught.value.limit == 64 << 10
    assert pool.stats() == before
    assert len(pipelined_run(x, n=3, pool=pool)) == 3
    del caught


def test_a_pool_that_is_used_up_underway(where):
    """An fn of unknown results: the error names the item, and nothing is lost."""
    pool = streamlap.PinnedPool(64 << 10)
    x = random_numbers((64, 64), where=where)
    with pytest.raises(streamlap.PoolExhausted) as caught:
        pipelined_run(x, n=10, fn=lambda x: x + 1, pin=True, pool=pool)
    assert caught.value.streamlap_index == 4
    assert caught.value.limit == 64 << 10
    assert eventually(lambda: pool.stats()["live"] == 0)


def test_outs_and_ordinary_results_need_no_pool(where):
    pool = streamlap.PinnedPool(4096)
    x = random_numbers((64, 64), where=where)
    assert len(pipelined_run(x, n=5, pool=pool, pin=False)) == 5
    out = torch.empty(5, 64, 64)
    assert len(pipelined_run(x, n=5, pool=pool, out=out)) == 5


# -- errors


@pytest.mark.parametrize("index", [0, 3, 4, 7, N - 1])
@pytest.mark.parametrize("wait", [True, False])
def test_what_fn_raises_comes_out_as_it_is(where, index, wait):
    """The original object, with its item's index; every buffer is back while it is still held."""
    error = Boom("deliberate")
    calls = []

    def fn(x):
        if len(calls) == index:
            raise error
        calls.append(1)
        return x + 1

    x = random_numbers((32, 32), where=where)
    before = streamlap.pool_stats(where)

    def call():
        results = pipelined_run(x, n=N, fn=fn, wait=wait)
        return results if wait else results.result()

    with pytest.raises(Boom) as caught:
        call()
    assert caught.value is error
    assert error.streamlap_index == index
    assert any(f"item {index}" in note for note in error.__notes__)
    assert len(calls) == index
    if wait:
        after = streamlap.pool_stats(where)
        assert (after["live"], after["live_blocks"]) == (before["live"], before["live_blocks"])
    else:
        assert eventually(lambda: streamlap.pool_stats(where)["live"] == before["live"])
    assert same_tree(pipelined_run(x, n=3), [x.mm(x).cpu()] * 3)


def test_a_failed_pipeline_is_done_and_says_so():
    def fn(x):
        raise Boom

    transfer = pipelined_run(torch.ones(2, 2), n=3, fn=fn, wait=False)
    assert isinstance(transfer.exception(), Boom)
    assert transfer.done()
    called = threading.Event()
    transfer.add_done_callback(lambda done: called.set())
    assert called.wait(PATIENCE)
    with pytest.raises(Boom):
        transfer[0]
    with pytest.raises(Boom):
        list(transfer)


def test_one_error_of_many_lanes_stops_all():
    xs = [torch.ones(2, 2), torch.full((2, 2), 2.0)]

    def fn(x):
        if float(x[0, 0]) == 2:
            raise Boom
        return x.clone()

    for _ in range(3):
        with streamlap.use_runtime("host", devices=2), pytest.raises(Boom) as caught:
            pipelined_run(xs, n=N, fn=fn)
        assert caught.value.streamlap_index == 0
        with streamlap.use_runtime("host", devices=2), pytest.raises(Boom):
            parallel_run(xs, n=N, fn=fn)


def test_a_failed_copy_of_an_item_is_told(where):
    x = random_numbers((4, 4), where=where)
    with pytest.raises(streamlap.UnsupportedTensor, match="sparse") as caught:
        pipelined_run(x, n=3, fn=lambda x: x.to_sparse())
    assert caught.value.streamlap_index == 0


def test_fn_that_gives_the_same_buffer_each_time(where):
    """It is noticed, for the copies are still to come when fn writes again."""
    buffer = torch.zeros(200, 200, device=where)
    calls = iter(range(100))
    x = torch.ones(2, 2, device=where)

    def fn(x):
        return buffer.fill_(next(calls))

    pipelined_run(
        x, n=6, fn=lambda x: buffer.fill_(0).clone(), depth=6
    )  # nothing new behind a gate
    copies = CopySide(where)
    finish_all(where)
    gate = copies.hold()
    found = []

    def call():
        with pytest.raises(streamlap.SourceModified):
            pipelined_run(x, n=N, fn=fn, depth=4)
        found.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    assert eventually(lambda: float(buffer[0, 0]) >= 3)
    gate.open()
    thread.join(PATIENCE)
    assert found


def test_fn_that_writes_x(where):
    """x is fn's own; in order, as without a pipeline."""
    x = torch.zeros(4, 4, device=where)
    results = pipelined_run(x, n=N, fn=lambda x: x.add_(1).clone())
    assert [float(result[0, 0]) for result in results] == list(range(1, N + 1))


# -- modes


def test_modes_of_the_caller_hold_in_fn(where):
    seen = []

    def fn(x):
        device = torch.device(where).type
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
            )
        )
        return x.mm(x)

    x = random_numbers((8, 8), where=where)
    device = torch.device(where).type
    with torch.autocast(device, dtype=torch.bfloat16):
        results = pipelined_run(x, n=2, fn=fn)
        assert all(mode[2:] == (True, torch.bfloat16) for mode in seen)
    assert all(result.dtype == torch.bfloat16 for result in results)
    seen.clear()
    pipelined_run(x, n=2, fn=fn)
    assert not any(mode[2] for mode in seen)
    seen.clear()
    with torch.inference_mode():
        pipelined_run(x, n=2, fn=fn)
    assert all(mode[1] for mode in seen)
    seen.clear()
    with torch.no_grad():
        pipelined_run(x, n=2, fn=fn)
    assert not any(mode[0] for mode in seen)


def test_gradients_in_fn_are_the_caller_s_on_the_cpu():
    """On a GPU fn runs under no_grad; on the CPU with the caller's mode."""
    x = torch.ones(3, 3, requires_grad=True)
    seen = []

    def fn(x):
        y = x * 2
        seen.append(y.requires_grad)
        return y

    results = pipelined_run(x, n=3, fn=fn)
    assert seen == [True] * 3
    assert not any(result.requires_grad for result in results)
    with torch.no_grad():
        pipelined_run(x, n=3, fn=fn)
    assert seen[3:] == [False] * 3


@pytest.mark.gpu
def test_fn_runs_under_no_grad_on_a_gpu():
    x = torch.ones(3, 3, device="cuda:0", requires_grad=True)
    seen = []
    pipelined_run(x, n=3, fn=lambda x: seen.append((x * 2).requires_grad) or x * 2)
    assert seen == [False] * 3
    assert torch.is_grad_enabled()


def test_context_variables_of_the_caller_are_seen(where):
    variable = contextvars.ContextVar("variable", default="default")
    seen = []

    def fn(x):
        seen.append(variable.get())
        return x.clone()

    token = variable.set("mine")
    pipelined_run(torch.ones(2, device=where), n=2, fn=fn)
    variable.reset(token)
    pipelined_run(torch.ones(2, device=where), n=1, fn=fn)
    assert seen == ["mine", "mine", "default"]


def test_the_caller_s_modes_are_as_before(where):
    def fn(x):
        raise Boom

    x = torch.ones(2, 2, device=where)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            pipelined_run(x, n=2)
            with pytest.raises(Boom):
                pipelined_run(x, n=2, fn=fn)
            assert torch.is_grad_enabled() == grad
    assert not torch.is_inference_mode_enabled()
    assert not torch.is_autocast_enabled(torch.device(where).type)
    if where != "cpu":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_pipeline_inside_a_pipeline(where):
    def fn(x):
        inner = pipelined_run(x, n=3)
        mapped = list(streamlap.pipelined_map(lambda y: y + 1, [x, x]))
        copied = streamlap.copy_to_cpu(x)
        return inner[2].to(x.device) + 0 * mapped[1].to(x.device) + 0 * copied.to(x.device)

    x = torch.ones(8, 8, device=where)
    results = pipelined_run(x, n=3, fn=fn)
    assert same_tree(results, [x.mm(x).cpu()] * 3)


def test_threads_of_fn_s_own(where):
    """fn may start a pipeline on another thread and wait for it (see also test_exit: no hang)."""
    x = torch.ones(8, 8, device=where)
    found = []

    def fn(x):
        thread = threading.Thread(target=lambda: found.append(streamlap.copy_to_cpu(x)))
        thread.start()
        thread.join(PATIENCE)
        return x.clone()

    pipelined_run(x, n=2, fn=fn)
    assert same_tree(found, [x.cpu()] * 2)


# -- arguments


SQUARE = (4, 4)
BAD = {
    "n_negative": ({"n": -1}, ValueError, "n must not be negative"),
    "n_float": ({"n": 2.0}, TypeError, "n must be an int"),
    "n_bool": ({"n": True}, TypeError, "n must be an int"),
    "n_none": ({"n": None}, TypeError, "n must be an int"),
    "depth_zero": ({"depth": 0}, ValueError, "depth must be at least 1"),
    "depth_negative": ({"depth": -3}, ValueError, "depth"),
    "depth_float": ({"depth": 1.5}, TypeError, "depth"),
    "depth_bool": ({"depth": True}, TypeError, "depth"),
    "fn": ({"fn": 5}, TypeError, "fn must be callable"),
    "pin": ({"pin": 1}, TypeError, "pin"),
    "dtype": ({"dtype": "float16"}, TypeError, "dtype"),
    "pool": ({"pool": 7}, TypeError, "pool"),
    "wait": ({"wait": 1}, TypeError, "wait"),
    "panels": ({"panels": 3}, ValueError, "panels=3 does not divide"),
    "out_count": ({"n": 3, "out": [torch.empty(4, 4)] * 0}, ValueError, "0 items, not 3"),
    "out_leading": ({"n": 3, "out": torch.empty(2, 4, 4)}, ValueError, "leading dimension 3"),
    "out_0d": ({"n": 3, "out": torch.empty(())}, ValueError, "leading dimension 3"),
    "out_shape": ({"n": 3, "out": torch.empty(3, 4, 5)}, ValueError, r"\(4, 5\)"),
    "out_dtype": ({"n": 3, "out": torch.empty(3, 4, 4).double()}, ValueError, "float64"),
    "out_same": ({"n": 3, "out": [torch.empty(4, 4)] * 3}, ValueError, "overlap"),
    "out_expanded": ({"n": 3, "out": torch.empty(1, 4, 4).expand(3, 4, 4)}, ValueError, "overlaps"),
    "out_kind": ({"n": 3, "out": 5}, TypeError, "out must be a tensor"),
    "out_item": ({"n": 1, "out": [5]}, TypeError, r"out\[0\]"),
    "out_sparse": ({"n": 1, "out": [torch.eye(4).to_sparse()]}, TypeError, "sparse"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_that_make_no_sense(where, name):
    options, kind, match = BAD[name]
    x = random_numbers(SQUARE, where=where)
    before = streamlap.pool_stats(where)
    with pytest.raises(kind, match=match) as caught:
        pipelined_run(x, **options)
    assert isinstance(caught.value, streamlap.StreamlapError)
    assert streamlap.pool_stats(where) == before
    assert engine_of(where).abandoned() == 0


INPUTS = {
    "not_square": (lambda where: torch.ones(3, 4, device=where), ValueError, r"square.*\(3, 4\)"),
    "vector": (lambda where: torch.ones(3, device=where), ValueError, "square"),
    "three": (lambda where: torch.ones(3, 3, 3, device=where), ValueError, "square"),
    "sparse": (lambda where: torch.eye(3, device=where).to_sparse(), TypeError, "sparse"),
    "meta": (lambda where: torch.ones(3, 3, device="meta"), TypeError, "meta"),
    "number": (lambda where: 5, TypeError, "x must be a tensor"),
    "none": (lambda where: None, TypeError, "x must be a tensor"),
    "in_list": (lambda where: [torch.ones(3, 3, device=where), 5], TypeError, "x must be a tensor"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_make_no_sense(where, name):
    make, kind, match = INPUTS[name]
    x = make(where)
    before = streamlap.pool_stats(where)
    with pytest.raises(kind, match=match) as caught:
        pipelined_run(x, n=3)
    assert isinstance(caught.value, streamlap.StreamlapError)
    if not isinstance(x, list):
        with pytest.raises(kind, match=match):
            run(x, n=3)
    with pytest.raises(kind, match=match):
        parallel_run(x if isinstance(x, list) else [x], n=3)
    assert streamlap.pool_stats(where) == before


def test_an_fn_s_result_that_does_not_fit_out(where):
    x = random_numbers(SQUARE, where=where)
    for fn, kind in ((lambda x: x[:2], ValueError), (lambda x: 5, TypeError)):
        with pytest.raises(kind) as caught:
            pipelined_run(x, n=3, fn=fn, out=torch.empty(3, 4, 4))
        assert isinstance(caught.value, streamlap.StreamlapError)
        assert caught.value.streamlap_index == 0


def test_out_that_overlaps_x():
    memory = torch.randn(4, 4, 4)
    with pytest.raises(ValueError, match="overlaps x"):
        pipelined_run(memory[0], n=4, out=memory)


def test_parallel_run_takes_a_list():
    with pytest.raises(TypeError, match="list"):
        parallel_run(torch.ones(2, 2), n=1)


def test_numpy_counts_are_ints(where):
    x = random_numbers(SQUARE, where=where)
    assert len(pipelined_run(x, n=np.int64(2), depth=np.int32(1))) == 2


@pytest.mark.gpu
def test_a_capture_is_refused_and_stays_good():
    x = random_numbers((32, 32), where="cuda:0")
    y = torch.empty_like(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.mm(x, x, out=y)
        streamlap.copy_to_cpu(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        torch.mm(x, x, out=y)
        with pytest.raises(streamlap.CaptureError):
            streamlap.to_cpu(x)
        with pytest.raises(streamlap.CaptureError):
            pipelined_run(x, n=2)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(y, x.mm(x))


# -- faults that stopped a worker for everybody


def uncopyable(x):
    """A result whose copy fails on the worker: torch has no strided copy of one-bit integers."""
    return torch.empty(8, 6, dtype=torch.int1)[:, ::2]


@pytest.mark.parametrize("wait", [True, False])
def test_a_copy_that_fails_stops_nothing_else(wait):
    for depth in (1, 2, 4):
        with contextlib.suppress(NotImplementedError):
            results = pipelined_run(torch.ones(2, 2), n=10, fn=uncopyable, depth=depth, wait=wait)
            assert not wait
            assert isinstance(results.exception(), NotImplementedError)
    x = random_numbers((16, 16))
    assert same_tree(pipelined_run(x, n=5), [x.mm(x)] * 5)


def test_a_worker_held_by_a_failing_copy_skips_nobody_s_work():
    """Others enqueue there at any moment, also before the error could be taken off again."""
    where = "cpu"
    worker, ran = side(where, "consumer"), []
    gate = CopySide(where).hold()
    transfer = streamlap.to_cpu(uncopyable(None))
    transfer._hold(worker.native)
    worker.native.launch(lambda: ran.append(transfer.done()))
    assert stays_false(lambda: ran)
    gate.open()
    worker.sync()
    assert ran == [True]
    assert isinstance(transfer.exception(), NotImplementedError)


def test_what_others_enqueue_while_a_pipeline_waits_for_a_failing_copy_runs(monkeypatch):
    launched, ran = [], []

    def crowded(name):
        real = getattr(streamlap.Transfer, name)

        def method(transfer, stream):
            real(transfer, stream)
            launched.append(1)
            stream.launch(lambda: ran.append(1))  # as another thread might at that moment

        return method

    for name in ("wait", "_hold"):
        monkeypatch.setattr(streamlap.Transfer, name, crowded(name))
    gate = CopySide("cpu").hold()
    failing = pipelined_run(torch.ones(2, 2), n=3, fn=uncopyable, depth=1, wait=False)
    assert eventually(lambda: launched)
    gate.open()
    assert isinstance(failing.exception(PATIENCE), NotImplementedError)
    assert eventually(lambda: len(ran) == len(launched))


def test_a_lane_that_cannot_start_gives_its_error(monkeypatch):
    from streamlap import lanes

    real, started = lanes.HostLane._launch, []

    def launch(lane, index):
        if index == 0:
            started.append(lane)
            if len(started) == 2:
                raise RuntimeError("no thread to be had")
        real(lane, index)

    monkeypatch.setattr(lanes.HostLane, "_launch", launch)
    x = random_numbers((8, 8))
    with pytest.raises(RuntimeError, match="no thread"):
        pipelined_run([x, x, x], fn=lambda y: y.mm(y), n=5)
    monkeypatch.undo()
    assert same_tree(pipelined_run(x, n=2), [x.mm(x)] * 2)


def test_a_groups_callback_runs_on_no_worker():
    """It may use the library: on the compute worker that would wait for itself."""
    names, found = [], []
    x = random_numbers((8, 8))
    done = threading.Event()
    begin = threading.Event()

    def fn(x):
        assert begin.wait(PATIENCE)
        return x.mm(x)

    def callback(handle):
        names.append(threading.current_thread().name)
        found.append(pipelined_run(x, n=2))
        done.set()

    handle = pipelined_run(x, n=3, fn=fn, wait=False)
    handle.add_done_callback(callback)
    begin.set()
    assert done.wait(PATIENCE)
    assert names == ["streamlap-callbacks"]
    assert same_tree(found[0], [x.mm(x)] * 2)
    handle.result()


def test_the_default_device_does_not_matter(where):
    x = random_numbers((8, 8), where=where)
    expected = x.mm(x).cpu()
    torch.set_default_device("meta")
    try:
        results = [*pipelined_run(x, n=2, pin=False), streamlap.to_cpu(x[::2], pin=False).result()]
        empty = streamlap.empty_pinned(0)
    finally:
        torch.set_default_device(None)
    assert all(result.device.type == "cpu" for result in [*results, empty])
    assert same_tree(results, [expected, expected, x[::2].cpu()])


def test_a_failed_pipeline_keeps_nothing_of_its_arguments():
    x = random_numbers((8, 8))
    seen = weakref.ref(x)

    def fn(x):
        raise ArithmeticError

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ArithmeticError):
            pipelined_run(x, n=3, fn=fn)
        del x
        assert eventually(lambda: seen() is None)
    finally:
        gc.enable()
