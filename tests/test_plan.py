"""Pipeline: a plan that is called many times, on both runtimes; as a graph on a GPU."""

import contextlib
import gc
import itertools
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from helpers.data import is_poison, poison, random_numbers, same_bits, same_tree
from helpers.streams import eventually, finish_all, side, stays_false

import streamlap
from streamlap import CaptureError, InvalidArgument, InvalidType, Pipeline, graphs, static_memory
from streamlap import plan as plan_module
from streamlap.static_memory import ALIGNMENT

pytestmark = pytest.mark.usefixtures("nothing_left")

N = 9

WAYS = [
    pytest.param(("cpu", None), id="cpu"),
    pytest.param(("cuda:0", False), id="eager", marks=pytest.mark.gpu),
    pytest.param(("cuda:0", True), id="graph", marks=pytest.mark.gpu),
]


@pytest.fixture(params=WAYS)
def way(request):
    """A device, and the ``graph`` argument."""
    return request.param


@pytest.fixture
def where(way):
    return way[0]


@pytest.fixture
def graph(way):
    return way[1]


# -- results


def test_each_call_computes_anew(where, graph):
    plan = Pipeline(like=random_numbers((48, 48), where=where), n=N, graph=graph)
    assert plan.captured is bool(graph)
    assert (plan.reason is None) is plan.captured
    for _ in range(4):
        x = random_numbers((48, 48), where=where)
        results = plan(x)
        assert type(results) is list
        assert same_tree(results, [x.mm(x).cpu()] * N)
        assert len({result.data_ptr() for result in results}) == N


@pytest.mark.parametrize("size", [1, 3, 33, 130])
def test_odd_sizes_have_the_bits_of_single_products(where, graph, size):
    plan = Pipeline(like=torch.zeros(size, size, device=where), n=N, graph=graph)
    x = random_numbers((size, size), where=where)
    results = plan(x)
    assert same_tree(results, [x.mm(x).cpu()] * N)
    assert all(result.data_ptr() % ALIGNMENT == 0 for result in results)


def test_results_are_the_plans_until_its_next_call(where, graph):
    plan = Pipeline(like=random_numbers((16, 16), where=where), n=N, graph=graph)
    x, y = (random_numbers((16, 16), where=where) for _ in range(2))
    first = plan(x)
    owned = plan(x, clone=True)
    assert same_tree(first, owned)
    second = plan(y)
    assert [a.data_ptr() for a in first] == [b.data_ptr() for b in second]
    assert same_tree(first, [y.mm(y).cpu()] * N)
    assert same_tree(owned, [x.mm(x).cpu()] * N)


def test_every_result_is_written_by_every_call(where, graph):
    plan = Pipeline(like=random_numbers((16, 16), where=where), n=N, graph=graph)
    x = random_numbers((16, 16), where=where)
    for _ in range(2):
        for result in plan(x):
            poison(result)
        results = plan(x)
        assert not any(is_poison(result) for result in results)
        assert same_tree(results, [x.mm(x).cpu()] * N)


def test_a_function_of_its_own(where, graph):
    plan = Pipeline(lambda x: x * 2 + 1, random_numbers((5, 7), where=where), N, graph=graph)
    for _ in range(3):
        x = random_numbers((5, 7), where=where)
        assert same_tree(plan(x), [(x * 2 + 1).cpu()] * N)


def test_distinct_items_come_in_order(where, graph):
    """Items of their own: a number that fn keeps on the device counts up, as in a running sum."""
    like = torch.ones(4, 4, device=where)
    total = torch.zeros(4, 4, device=where)

    def fn(x):
        total.add_(x)
        return total.clone()

    plan = Pipeline(fn, like, N, graph=graph)
    for _ in range(3):
        before = total.cpu().clone()
        x = torch.full((4, 4), 3.0, device=where)
        expected = [before + 3 * (index + 1) for index in range(N)]
        assert same_tree(plan(x), expected)


def test_results_of_any_layout_and_dtype(where, graph):
    like = random_numbers((6, 4), where=where)
    cases = [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.sum(),
        lambda x: x > 0,
        lambda x: torch.complex(x, x).conj(),
        lambda x: x.expand(3, 6, 4),
    ]
    for fn in cases:
        plan = Pipeline(fn, like, 3, graph=graph)
        for _ in range(2):
            x = random_numbers((6, 4), where=where)
            assert same_tree(plan(x), [fn(x).cpu().resolve_conj()] * 3)


@pytest.mark.parametrize("fn", [None, lambda x: x + 1])
def test_results_are_converted(where, graph, fn):
    plan = Pipeline(fn, random_numbers((8, 8), where=where), 3, graph=graph, dtype=torch.float64)
    for _ in range(2):
        x = random_numbers((8, 8), where=where)
        expected = (x.mm(x) if fn is None else fn(x)).double().cpu()
        assert same_tree(plan(x), [expected] * 3)


def test_inputs_of_any_layout(where, graph):
    base = random_numbers((8, 8), where=where)
    for like in (base.t(), torch.empty(16, 16, device=where)[::2, ::2], base.expand(8, 8)):
        plan = Pipeline(like=like, n=2, graph=graph)
        for _ in range(2):
            x = like.clone(memory_format=torch.preserve_format)
            x = x if x.stride() == like.stride() else like
            x.copy_(random_numbers((8, 8), where=where))
            dense = plan._input.tensor.clone().copy_(x)
            assert same_tree(plan(x), [dense.mm(dense).cpu()] * 2)


def test_no_items(where, graph):
    def never(x):
        raise AssertionError

    for fn in (None, never):
        plan = Pipeline(fn, torch.ones(2, 2, device=where), 0, graph=graph)
        assert plan(torch.ones(2, 2, device=where)) == []
        assert not plan.captured


def test_gradients_are_left_outside(where, graph):
    x = random_numbers((4, 4), where=where).requires_grad_()
    plan = Pipeline(like=x, n=2, graph=graph)
    results = plan(x)
    assert not any(result.requires_grad for result in results)
    assert same_tree(results, [x.mm(x).detach().cpu()] * 2)
    with torch.inference_mode():
        y = random_numbers((4, 4), where=where)
        assert same_tree(plan(y), [y.mm(y).cpu()] * 2)
        made_here = Pipeline(like=y, n=2, graph=graph)
    x = random_numbers((4, 4), where=where)
    assert same_tree(made_here(x), [x.mm(x).cpu()] * 2)


def test_the_dtype_of_autocast(where, graph):
    x = random_numbers((32, 32), where=where)
    with torch.autocast(x.device.type, torch.bfloat16):
        plan = Pipeline(like=x, n=3, graph=graph)
        for _ in range(2):
            assert same_tree(plan(x), [x.mm(x).cpu()] * 3)
            outs = [torch.empty(32, 32, dtype=torch.bfloat16) for _ in range(3)]
            assert same_tree(streamlap.pipelined_run(x, 3, out=outs), [x.mm(x).cpu()] * 3)
        with pytest.raises(InvalidArgument, match=r"out\[0\] has dtype"):
            streamlap.pipelined_run(x, 3, out=torch.empty(3, 32, 32))
        double = x.double()
        assert same_tree(Pipeline(like=double, n=1, graph=graph)(double), [double.mm(double).cpu()])


def test_numpy(where, graph):
    xp = np if where == "cpu" else pytest.importorskip("cupy")
    like, new = xp.ones((8, 8), "float32"), xp.asarray
    plan = Pipeline(like=like, n=3, graph=graph)
    for _ in range(2):
        x = random_numbers((8, 8))
        expected = torch.from_numpy(np.asarray(x)).to(where)
        results = plan(new(x.numpy()))
        assert all(type(result) is np.ndarray for result in results)
        assert same_tree(results, [expected.mm(expected).cpu().numpy()] * 3)
    with pytest.raises(InvalidArgument):
        plan(new(np.ones((9, 9), np.float32)))


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_an_array_is_what_a_function_gets(kind):
    xp = np if kind == "cpu" else pytest.importorskip("cupy")
    seen = []

    def fn(x):
        seen.append(type(x))
        return x * 2

    plan = Pipeline(fn, xp.ones((4, 4), "float32"), 3)
    assert not plan.captured
    for number in (3.0, 5.0):
        results = plan(xp.full((4, 4), number, "float32"))
        assert all(isinstance(r, np.ndarray) and (r == 2 * number).all() for r in results)
    assert seen == [xp.ndarray] * 6


# -- how often fn is called


def test_calls_of_fn(where, graph):
    calls = []

    def fn(x):
        calls.append(torch.is_grad_enabled())
        return x + 1

    x = torch.ones(4, 4, device=where)
    plan = Pipeline(fn, x, N, graph=graph)
    prepared = 1 + 2 + N if graph else 0
    assert len(calls) == prepared
    plan(x)
    plan(x)
    assert len(calls) == prepared if graph else 2 * N


def test_what_fn_raises_comes_through_and_the_plan_stays_good(where, graph):
    error = ArithmeticError("deliberate")
    fail = [True]

    def fn(x):
        if fail[0]:
            raise error
        return x + 1

    x = torch.ones(4, 4, device=where)
    if graph:
        with pytest.raises(ArithmeticError) as caught:
            Pipeline(fn, x, N, graph=True)
    else:
        plan = Pipeline(fn, x, N, graph=graph)
        with pytest.raises(ArithmeticError) as caught:
            plan(x)
        assert error.streamlap_index == 0
    assert caught.value is error
    error.__traceback__ = None  # leads to the plan, and fn leads to the error
    fail[0] = False
    plan = Pipeline(fn, x, N, graph=True) if graph else plan
    assert same_tree(plan(x), [(x + 1).cpu()] * N)


@pytest.mark.parametrize("value", [5, None, [1, 2], {"a": 1}])
def test_items_are_single_tensors(where, graph, value):
    x = torch.ones(4, 4, device=where)
    with pytest.raises(InvalidType, match="must give one tensor"):
        Pipeline(lambda x: value, x, 3, graph=graph)(x)


# -- arguments


BAD = {
    "n": ({"n": -1}, InvalidArgument),
    "n float": ({"n": 1.5}, InvalidType),
    "depth": ({"depth": 0}, InvalidArgument),
    "streams": ({"compute_streams": 0}, InvalidArgument),
    "many streams": ({"compute_streams": 1000}, InvalidArgument),
    "streams without a graph": ({"compute_streams": 2, "graph": False}, InvalidArgument),
    "graph": ({"graph": 1}, InvalidType),
    "graph on a CPU": ({"graph": True}, InvalidArgument),
    "dtype": ({"dtype": "float16"}, InvalidType),
    "pool": ({"pool": 3}, InvalidType),
    "fn": ({"fn": 3}, InvalidType),
    "like": ({"like": 3}, InvalidType),
    "no like": ({"like": None}, InvalidType),
    "not square": ({"like": torch.ones(2, 3)}, InvalidArgument),
    "sparse": ({"like": torch.eye(2).to_sparse()}, streamlap.UnsupportedTensor),
    "booleans": ({"like": torch.ones(2, 2, dtype=torch.bool)}, streamlap.UnsupportedTensor),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    options, error = BAD[case]
    with pytest.raises(error):
        Pipeline(**{"like": torch.ones(2, 2), **options})


def test_an_x_that_is_unlike(where, graph):
    like = random_numbers((4, 4), where=where)
    plan = Pipeline(like=like, n=2, graph=graph)
    for x, what in (
        (like[:2], "shape"),
        (like.double(), "dtype"),
        (like.t(), "strides"),
        (like.to("meta"), "meta"),
        ([like], "list"),
        (None, "NoneType"),
        (like.to_sparse(), "sparse"),
    ):
        with pytest.raises((InvalidArgument, InvalidType), match=what):
            plan(x)
    if where != "cpu":
        with pytest.raises(InvalidArgument, match="device"):
            plan(like.cpu())
    with pytest.raises(InvalidType):
        plan(like, clone=1)
    assert same_tree(plan(like), [like.mm(like).cpu()] * 2)


def test_a_pool_without_room(where, graph):
    pool = streamlap.PinnedPool(64 << 10)
    x = torch.ones(64, 64, device=where)
    with pytest.raises(streamlap.PoolExhausted):
        Pipeline(like=x, n=5, graph=graph, pool=pool)
    plan = Pipeline(like=x, n=2, graph=graph, pool=pool)
    assert same_tree(plan(x), [x.mm(x).cpu()] * 2)
    assert pool.live > 0
    del plan
    assert eventually(lambda: gc.collect() >= 0 and pool.live == 0)


# -- order and lifetime


def test_a_reader_that_was_declared_is_waited_for(where, graph):
    """The call may not overwrite what a held stream has yet to read."""
    plan = Pipeline(like=random_numbers((16, 16), where=where), n=3, graph=graph)
    x, y = (random_numbers((16, 16), where=where) for _ in range(2))
    results = plan(x)
    reader = side(where, "reader")
    seen = torch.zeros(16, 16, device=where)
    # Once in a thread: behind a closed gate, a new thread could not get a handle of cuBLAS.
    first = threading.Thread(target=plan, args=(x,))
    first.start()
    first.join()
    before, after = x.mm(x).cpu(), y.mm(y).cpu()
    finish_all(where)
    gate = reader.hold()
    reader.copy(seen, results[1])
    streamlap.record_use(results[1], reader.stream)
    done = []
    thread = threading.Thread(target=lambda: done.append(plan(y)))
    thread.start()
    try:
        assert stays_false(lambda: bool(done))
        assert same_bits(results[1], before)
    finally:
        gate.open()
        thread.join()
    reader.sync()
    assert same_bits(seen.cpu(), before)
    assert same_tree(results, [after] * 3)


def test_x_may_be_written_when_the_call_returns(where, graph):
    plan = Pipeline(like=random_numbers((32, 32), where=where), n=N, graph=graph)
    x = random_numbers((32, 32), where=where)
    for _ in range(5):
        expected = x.mm(x).cpu()
        results = plan(x)
        x.copy_(random_numbers((32, 32), where=where))
        assert same_tree(results, [expected] * N)


def test_threads_take_turns(where, graph):
    plan = Pipeline(like=random_numbers((32, 32), where=where), n=N, graph=graph)
    faults = []

    def work():
        try:
            for _ in range(5):
                x = random_numbers((32, 32), where=where)
                expected = x.mm(x).cpu()
                if not same_tree(plan(x, clone=True), [expected] * N):
                    faults.append("wrong")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_two_plans_at_once(where, graph):
    likes = [random_numbers((size, size), where=where) for size in (16, 24)]
    plans = [Pipeline(like=like, n=N, graph=graph) for like in likes]
    faults = []

    def work(plan, size):
        for _ in range(6):
            x = random_numbers((size, size), where=where)
            if not same_tree(plan(x), [x.mm(x).cpu()] * N):
                faults.append(size)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(plans, (16, 24), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_plan_inside_itself_is_refused(kind):
    x = torch.ones(4, 4, device=kind)
    plans = []

    def fn(x):
        return plans[0](x)[0]

    plans.append(Pipeline(fn, x, 2, graph=False if kind != "cpu" else None))
    with pytest.raises(InvalidArgument, match="fn of a plan calls that plan"):
        plans[0](x)
    inner = Pipeline(like=x, n=1)
    outer = Pipeline(lambda x: inner(x)[0].clone(), x, 3, graph=False if kind != "cpu" else None)
    assert same_tree(outer(x), [x.mm(x).cpu()] * 3)
    plans.clear()


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_closing_a_plan_inside_itself_is_refused(kind):
    plans = []

    def fn(x):
        with contextlib.closing(plans[0]):
            return x + 1

    x = torch.ones(4, 4, device=kind)
    plans.append(Pipeline(fn, x, 2, graph=False if kind != "cpu" else None))
    with pytest.raises(InvalidArgument, match="fn of a plan closes that plan"):
        plans[0](x)
    plans.pop().close()


def test_closing_and_dying_give_all_back(where, graph):
    x = random_numbers((64, 64), where=where)
    before = streamlap.pool_stats(where)["live"]
    plan = Pipeline(like=x, n=N, graph=graph)
    expected = x.mm(x).cpu()
    kept = plan(x)[1]
    plan.close()
    plan.close()
    with pytest.raises(InvalidArgument, match="closed"):
        plan(x)
    assert same_bits(kept, expected)
    del kept
    assert eventually(lambda: streamlap.pool_stats(where)["live"] == before)
    with Pipeline(like=x, n=N, graph=graph) as plan:
        plan(x)
    ref = weakref.ref(Pipeline(like=x, n=N, graph=graph))
    assert ref() is None
    assert eventually(lambda: streamlap.pool_stats(where)["live"] == before)


def test_the_checker_and_all_schedules_find_nothing():
    x, y = random_numbers((16, 16)), random_numbers((16, 16))
    contexts = [streamlap.checking()] + [
        streamlap.use_runtime("sim", schedule=schedule)
        for schedule in ("eager", "lazy", "random(3)", "random(4)")
    ]
    for context in contexts:
        with context:
            for fn in (None, lambda x: x.mm(x)):
                plan = Pipeline(fn, x, 4)
                for value in (x, y):
                    assert same_tree(plan(value), [value.mm(value)] * 4)


# -- pure parts


@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, 262_144, 1 << 20, 3 << 20, 64 << 20])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 50, 51, 1000])
def test_copy_groups(n, nbytes):
    groups = graphs.copy_groups(n, nbytes)
    assert sum(groups) == n
    assert min(groups) >= 1
    assert all(size == 1 or size * nbytes <= graphs._LARGEST_GROUP for size in groups)
    peak = groups.index(max(groups))
    assert all(a <= b for a, b in itertools.pairwise(groups[: peak + 1]))
    if n * nbytes >= 16 * graphs._SMALLEST_GROUP and nbytes <= graphs._SMALLEST_GROUP:
        assert groups[0] * nbytes <= 2 * graphs._SMALLEST_GROUP
        assert groups[-1] == groups[0]


def test_copy_groups_of_the_measured_case():
    assert graphs.copy_groups(50, 256 * 256 * 4) == [1, 2, 4, 8, 10, 10, 8, 4, 2, 1]


def test_what_is_small():
    assert graphs.is_small(256 * 256 * 4, 50)
    assert graphs.is_small(2 << 20, 50)
    assert not graphs.is_small((2 << 20) + 1, 50)
    assert not graphs.is_small(2 << 20, 129)
    assert not graphs.is_small(0, 50)


# -- graphs

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("way", WAYS[2:])
@pytest.mark.parametrize("streams", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_graph_eager_and_serial_have_the_same_bits(where, streams, dtype):
    like = random_numbers((256, 256), dtype, where)
    graph = Pipeline(like=like, n=50, graph=True, compute_streams=streams)
    eager = Pipeline(like=like, n=50, graph=False)
    for _ in range(5):
        x = random_numbers((256, 256), dtype, where)
        expected = [x.mm(x).cpu()] * 50
        assert same_tree(graph(x), expected)
        assert same_tree(eager(x), expected)


@gpu
@pytest.mark.parametrize("way", WAYS[2:])
@pytest.mark.parametrize("stream", ["current", "side"])
def test_a_graph_starts_after_the_producer(where, stream):
    like = random_numbers((64, 64), where=where)
    plan = Pipeline(like=like, n=N, graph=True)
    x, new = like.clone(), random_numbers((64, 64), where=where)
    expected = new.mm(new).cpu()
    plan(x)
    producer = side(where, "producer")
    finish_all(where)
    gate = producer.hold()
    producer.copy(x, new)
    done = []

    def call():
        with producer.current() if stream == "side" else contextlib.nullcontext():
            if stream == "current":
                torch.cuda.current_stream().wait_stream(producer.stream)
            done.append(plan(x))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert stays_false(lambda: bool(done))
    finally:
        gate.open()
        thread.join()
    assert same_tree(done[0], [expected] * N)


@gpu
@pytest.mark.parametrize("way", WAYS[2:])
def test_large_items_are_not_captured_unasked(where):
    x = random_numbers((1024, 1024), where=where)
    assert "hide" in Pipeline(like=x, n=3).reason
    assert Pipeline(like=x[:256, :256].contiguous(), n=50).captured
    plan = Pipeline(like=x, n=3, graph=True)
    assert plan.captured
    assert same_tree(plan(x), [x.mm(x).cpu()] * 3)


@gpu
@pytest.mark.parametrize("way", WAYS[2:])
@pytest.mark.parametrize(
    "kind", ["synchronises", "reads", "raises", "leaves the device", "changes"]
)
def test_what_cannot_be_captured(where, kind):
    x = random_numbers((16, 16), where=where)

    def fn(x):
        capturing = torch.cuda.is_current_stream_capturing()
        if kind == "synchronises":
            torch.cuda.synchronize()
        elif kind == "reads":
            return x + float(x[0, 0])
        elif kind == "raises" and capturing:
            raise ArithmeticError("deliberate")
        elif kind == "leaves the device":
            return x.cpu() * 2
        elif kind == "changes" and capturing:
            return x[:3]
        return x * 2

    with pytest.raises(CaptureError, match="cannot be captured"):
        Pipeline(fn, x, N, graph=True)
    quiet = kind == "leaves the device"
    with contextlib.nullcontext() if quiet else pytest.warns(RuntimeWarning, match="no graph"):
        plan = Pipeline(fn, x, N)
    assert not plan.captured
    assert plan.reason
    for _ in range(2):
        y = random_numbers((16, 16), where=where)
        assert same_tree(plan(y), [fn(y).cpu()] * N)
    # Nothing is left of it: torch's random numbers, its memory, and another capture are as ever.
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(4, device=where).sum().isfinite()
    other = Pipeline(like=x, n=N, graph=True)
    assert same_tree(other(x), [x.mm(x).cpu()] * N)
    torch.cuda.synchronize()


@gpu
@pytest.mark.parametrize("way", WAYS[2:])
def test_inside_a_capture_of_the_users(where):
    x = random_numbers((16, 16), where=where)
    plan = Pipeline(like=x, n=2, graph=True)
    eager = Pipeline(like=x, n=2, graph=False)
    plan(x), eager(x)
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        out.copy_(x)
        for call in (lambda: plan(x), lambda: eager(x), lambda: Pipeline(like=x, n=2)):
            with pytest.raises(CaptureError):
                call()
    graph.replay()
    assert same_bits(out.cpu(), x.cpu())
    assert same_tree(plan(x), [x.mm(x).cpu()] * 2)


@gpu
@pytest.mark.parametrize("way", WAYS[2:])
def test_random_numbers_go_on(where):
    x = torch.zeros(64, device=where)
    plan = Pipeline(lambda x: x + torch.rand_like(x), x, 4, graph=True)
    first, second = plan(x, clone=True), plan(x, clone=True)
    values = {tuple(value.tolist()) for value in [*first, *second]}
    assert len(values) == 8


@gpu
@pytest.mark.parametrize("way", WAYS[2:])
def test_memory_is_flat(where):
    x = random_numbers((64, 64), where=where)
    plan = Pipeline(like=x, n=N, graph=True)
    plan(x)
    gc.collect()
    before = torch.cuda.memory_allocated(where), streamlap.pool_stats(where)["live"]
    for _ in range(1000):
        plan(x)
    assert (torch.cuda.memory_allocated(where), streamlap.pool_stats(where)["live"]) == before


@gpu
@pytest.mark.parametrize("way", WAYS[2:])
def test_device_memory_comes_back(where):
    x = random_numbers((64, 64), where=where)
    Pipeline(like=x, n=N, graph=True)(x)
    gc.collect()
    before = torch.cuda.memory_allocated(where)
    for _ in range(20):
        Pipeline(lambda x: x.mm(x) + 1, x, N, graph=True, compute_streams=2)(x)
    gc.collect()
    torch.cuda.synchronize()
    # The workspaces of cuBLAS on the second stream stay, once.
    assert torch.cuda.memory_allocated(where) - before <= 64 << 20


@gpu
@pytest.mark.unchecked("the stand-in for a stream is not one that accesses can be declared on")
@pytest.mark.parametrize("way", WAYS[2:])
def test_an_interrupted_wait_is_made_up_for(where, monkeypatch):
    plan = Pipeline(like=random_numbers((64, 64), where=where), n=N, graph=True)
    x, y = (random_numbers((64, 64), where=where) for _ in range(2))
    plan(x)
    producer = side(where, "producer")
    finish_all(where)
    gate = producer.hold()
    real = graphs.current_stream

    class Interrupted:
        def __init__(self, stream):
            self._stream = stream

        def wait(self, event):
            self._stream.wait(event)

        def record(self):
            event = self._stream.record()

            class Event:
                synchronize = staticmethod(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))

            Event.own = event
            return Event()

    with producer.current():
        monkeypatch.setattr(graphs, "current_stream", lambda place: Interrupted(real(place)))
        with pytest.raises(KeyboardInterrupt):
            plan(x)
        monkeypatch.setattr(graphs, "current_stream", real)
    plan._graph._flying = graphs._launched[plan._place] = plan._graph._flying.own
    assert not plan._graph._flying.done()
    gate.open()
    assert same_tree(plan(y), [y.mm(y).cpu()] * N)


@gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("way", WAYS[2:])
def test_a_device_that_is_not_the_current_one(where):
    del where
    x = random_numbers((64, 64), where="cuda:1")
    with torch.cuda.device(0):
        plan = Pipeline(like=x, n=N, graph=True)
        assert same_tree(plan(x), [x.mm(x).cpu()] * N)
        assert torch.cuda.current_device() == 0
        with pytest.raises(InvalidArgument, match="device"):
            plan(x.to("cuda:0"))


# -- what a graph is made of, on a stand-in that computes at once


class StandIn:
    """A stream that notes who waits for whom, in the order of the calls."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def synchronize(self):
        self.log.append((self.name, "is waited for"))


@pytest.fixture
def captured(monkeypatch):
    """``captured(fn, x, n, streams, dtype)``: a plan's graph; its replay calls everything again."""
    log, current, earlier = [], [], []

    @contextlib.contextmanager
    def on(stream):
        current.append(stream.name)
        try:
            yield
        finally:
            current.pop()

    class Replayed:
        def __init__(self, issue):
            self.replay = issue
            earlier[:] = log
            log.clear()
            issue()

    def make(fn, x, n, streams=1, dtype=None, forced=True):
        from streamlap.devices import host_place
        from streamlap.pinned import pool_for

        names = ["copies", *(f"compute {index}" for index in range(streams))]
        monkeypatch.setattr(
            graphs, "_own_streams", lambda place, count: [StandIn(name, log) for name in names]
        )
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: StandIn("caller", log))
        monkeypatch.setattr(graphs, "_captured", lambda issue, origin, place: Replayed(issue))
        real = graphs.Captured._compute

        def compute(self, index):
            log.append((current[-1], "computes", index))
            real(self, index)

        monkeypatch.setattr(graphs.Captured, "_compute", compute)
        place = host_place(0)
        return graphs.Captured(fn, x, n, streams, dtype, pool_for(place), place, forced), log

    make.earlier = earlier
    make.log = log
    return make


@pytest.mark.parametrize("way", WAYS[:1])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize(
    ("fn", "dtype"), [(None, None), (None, torch.float64), (lambda x: x.t()[1:], None)]
)
def test_every_item_is_computed_and_copied_at_its_place(captured, streams, fn, dtype):
    x = random_numbers((65, 65))
    graph, _ = captured(fn, x, 37, streams, dtype)
    for _ in range(2):
        x.copy_(random_numbers((65, 65)))
        poison(graph.results.block)
        poison(graph._buffer)
        graph._graph.replay()
        expected = (x.mm(x) if fn is None else fn(x)).to(dtype or x.dtype)
        assert same_tree(graph.results.items, [expected] * 37)


@pytest.mark.parametrize("way", WAYS[:1])
def test_a_copy_comes_after_all_its_items_and_the_end_after_all_copies(captured):
    x = random_numbers((256, 256))
    _, log = captured(None, x, 50, 4)
    assert log[:4] == [
        *((f"compute {index}", "waits for", "compute 0") for index in (1, 2, 3)),
        ("copies", "waits for", "compute 0"),
    ]
    assert log[-4:] == [
        *(("compute 0", "waits for", f"compute {index}") for index in (1, 2, 3)),
        ("compute 0", "waits for", "copies"),
    ]
    computed = [entry for entry in log if entry[1] == "computes"]
    assert computed == [(f"compute {index % 4}", "computes", index) for index in range(50)]
    done = 0
    for size in graphs.copy_groups(50, x.nbytes):
        done += size
        place = log.index((f"compute {(done - 1) % 4}", "computes", done - 1))
        waits = [("copies", "waits for", f"compute {index}") for index in range(4)]
        assert log[place + 1 : place + 5] == waits


@pytest.mark.parametrize("way", WAYS[:1])
def test_what_is_prepared_comes_after_the_caller_and_before_the_capture(captured):
    captured(None, random_numbers((16, 16)), 3, 2)
    names = ["compute 0", "compute 1"]
    waits = [(name, "waits for", "caller") for name in names]
    warm = [(name, "computes", 0) for name in names * 2]
    assert captured.earlier == [*waits, *waits, *warm, *((name, "is waited for") for name in names)]


class Launched:
    """The end of a launch."""

    def __init__(self, log):
        self.log = log

    def synchronize(self):
        self.log.append("waited for")


class Unchecked:
    """A place whose runtime wants to be told of nothing."""

    checked = False


@pytest.mark.parametrize("way", WAYS[:1])
def test_graphs_of_one_device_do_not_run_side_by_side(captured, monkeypatch):
    """They share what a library keeps for the stream of their capture."""
    monkeypatch.setattr(graphs, "_launched", {})
    place, log = Unchecked(), []

    def current(name):
        return types.SimpleNamespace(
            record=lambda: Launched([f"end on {name}"]),
            wait=lambda event: log.append((name, "after", event.log[0])),
        )

    plans = [captured(None, random_numbers((16, 16)), 3)[0] for _ in range(2)]
    for plan, name in zip(plans, ["first", "second"], strict=True):
        plan._place = place
        plan._graph = types.SimpleNamespace(replay=lambda name=name: log.append((name, "runs")))
        monkeypatch.setattr(graphs, "current_stream", lambda place, name=name: current(name))
        plan.run()
    assert log == [("first", "runs"), ("second", "after", "end on first"), ("second", "runs")]


@pytest.mark.parametrize("way", WAYS[:1])
def test_what_was_prepared_in_vain_comes_before_the_caller_goes_on(captured):
    """Its memory goes back to the caller's stream, and the warm-up may still write to it."""
    shapes = itertools.count(2)
    with pytest.raises(InvalidArgument, match="items of a plan are alike"):
        captured(lambda x: x[: next(shapes)], random_numbers((16, 16)), 3, 2)
    assert captured.log[-2:] == [("caller", "waits for", f"compute {index}") for index in (0, 1)]


@pytest.mark.parametrize("way", WAYS[:1])
def test_a_launch_is_waited_for_by_its_call_or_by_what_comes_next(captured, monkeypatch):
    graph, _ = captured(None, random_numbers((16, 16)), 3)
    log = []
    stream = types.SimpleNamespace(record=lambda: log.append("recorded") or Launched(log))
    monkeypatch.setattr(graphs, "_launched", {})
    graph._place = Unchecked()  # of a real stream it would be told
    graph._graph = types.SimpleNamespace(replay=lambda: log.append("launched"))
    monkeypatch.setattr(graphs, "current_stream", lambda place: stream)
    graph.run()
    assert log == ["launched", "recorded", "waited for"]
    assert graph._flying is None
    log.clear()
    graph._flying = Launched(log)
    graph.order(types.SimpleNamespace(wait=log.append))
    assert log == [graph._flying]
    log.clear()
    graph.release()
    assert log == ["waited for"]


@pytest.mark.parametrize("way", WAYS[:1])
def test_a_plan_s_call_and_its_end_come_after_its_last_launch(monkeypatch):
    x = random_numbers((16, 16))
    log = []
    stream = types.SimpleNamespace(capturing=lambda: False, wait=lambda event: log.append("waits"))
    for end in ("close", "die"):
        plan = Pipeline(like=x, n=2)
        results = plan(x)
        plan._graph = types.SimpleNamespace(
            order=lambda stream: log.append("ordered"),
            release=lambda: log.append("released"),
            results=types.SimpleNamespace(block=results[0]),
        )
        log.clear()
        with monkeypatch.context() as patch:
            patch.setattr(plan_module, "current_stream", lambda place: stream)
            plan._order_after_readers()
            assert log == ["ordered"]
            reader = side("cpu", "reader")
            gate = reader.hold()
            streamlap.record_use(results[0], reader.stream)
            plan._order_after_readers()
            gate.open()
            reader.sync()
        assert log == ["ordered", "ordered", "waits"]
        if end == "close":
            plan.close()
        del plan
        assert log[3:] == ["released"]


@pytest.mark.parametrize("way", WAYS[:1])
def test_an_input_is_loaded_between_its_producer_and_fn(monkeypatch):
    log = []

    def stand_in(name):
        return types.SimpleNamespace(
            capturing=lambda: False,
            record=lambda: f"event of {name}",
            wait=lambda event: log.append((name, event)),
        )

    x = random_numbers((4, 4))
    place = types.SimpleNamespace(index=0)
    loaded = static_memory.StaticInput(x, None, place)
    loaded.of_torch = False
    monkeypatch.setattr(static_memory, "current_stream", lambda place: stand_in("current"))
    monkeypatch.setattr(static_memory, "as_stream", lambda stream, place: stand_in("producer"))
    loaded.load(types.SimpleNamespace(stream=1, tensor=x))
    assert log == [("current", "event of producer"), ("producer", "event of current")]
    assert same_bits(loaded.tensor, x)


@pytest.mark.parametrize("way", WAYS[:1])
def test_why_there_is_no_graph(captured):
    x = random_numbers((1024, 1024))
    with pytest.raises(graphs.NotCaptured, match="hide the cost"):
        captured(None, x, 3, forced=False)
    with pytest.raises(graphs.NotCaptured, match="empty"):
        captured(lambda x: x[:0], x, 3)
    with pytest.raises(InvalidType, match="must give one tensor"):
        captured(lambda x: [x], x, 3)
    shapes = itertools.count(2)
    with pytest.raises(InvalidArgument, match="items of a plan are alike"):
        captured(lambda x: x[: next(shapes)], x, 3)
