"""Every call that a Python program makes of its runtime fails once, in every way it can.

Then the program has a typed error or the right bits; memory and references come back, and the same
program runs again. A failure names its plan: ``with faults.injected(PLAN)`` replays it.
"""

import contextlib
import gc
import re
import signal
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.streams import engine_of, eventually, runtime_of

import streamlap
from streamlap import _native, faults
from streamlap.errors import InvalidArgument, InvalidType, StreamlapError
from streamlap.serving import help_simulations

ROOT = Path(__file__).resolve().parents[1]
SIZE = 24
SECONDS = 30
"""A program that takes longer hangs."""


class Program:
    """What a program may use: sources that can be watched, and a check of what has come."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.watched: list[weakref.ref] = []

    def source(self, seed: int = 1, rows: int = SIZE) -> torch.Tensor:
        array = np.random.default_rng(seed).standard_normal((rows, rows), dtype=np.float32)
        if self.where != "cpu":
            return torch.from_numpy(array).to(self.where)
        self.watched.append(weakref.ref(array))
        return torch.from_numpy(array)


def same(result, value) -> None:
    assert torch.equal(result, value), "no error, and wrong bits"


def close(result, value) -> None:
    torch.testing.assert_close(result, value, msg="no error, and wrong values")


def plain(p: Program) -> None:
    x = p.source()
    t = streamlap.to_cpu(x)
    value = x.cpu()
    same(t.result(), value)
    assert t.done()
    assert t.exception() is None


def tree(p: Program) -> None:
    xs = {"a": p.source(1), "b": [p.source(2), p.source(3, 2)], "c": 4}
    result = streamlap.to_cpu(xs).result()
    same(result["a"], xs["a"].cpu())
    same(result["b"][1], xs["b"][1].cpu())
    assert result["c"] == 4


def items(p: Program) -> None:
    xs = [p.source(seed) for seed in range(3)]
    t = streamlap.to_cpu(xs)
    for got, x in zip(t, xs, strict=True):
        same(got, x.cpu())
    t.wait_source()


def chunks(p: Program) -> None:
    x = p.source()
    value = x.cpu().view(-1)
    for _leaf, offset, view in streamlap.to_cpu(x, chunk_bytes=700).chunks():
        same(view, value[offset : offset + view.numel()])


def ordinary(p: Program) -> None:
    x = p.source()
    same(streamlap.to_cpu(x, pin=False).result(), x.cpu())


def given(p: Program) -> None:
    x = p.source()
    out = torch.full((SIZE, SIZE), -1.0)
    streamlap.to_cpu(x, out=out).result()
    same(out, x.cpu())


def converted(p: Program) -> None:
    x = p.source()
    same(streamlap.to_cpu(x.t()[::2], dtype=torch.float64).result(), x.cpu().t()[::2].double())


def gathered(p: Program) -> None:
    xs = [p.source(seed) for seed in range(9)]
    for got, x in zip(streamlap.to_cpu(xs).result(), xs, strict=True):
        same(got, x.cpu())


def prepared(p: Program) -> None:
    xs = [p.source(seed) for seed in range(3)]
    copy = streamlap.TreeCopy(like=xs, dtype=torch.bfloat16, nonfinite=True)
    transfer = copy(xs)
    assert transfer.nonfinite() == 0
    result = transfer.result()
    for got, x in zip(copy(xs, out=result).result(), xs, strict=True):
        same(got, x.cpu().bfloat16())


def summed(p: Program) -> None:
    x = p.source()
    assert streamlap.checksum(x) == streamlap.checksum(x.clone())


def protected(p: Program) -> None:
    x = p.source()
    value = x.cpu().clone()
    t = streamlap.to_cpu(x, protect=True)
    x.zero_()
    same(t.result(), value)


def abandoned(p: Program) -> None:
    streamlap.to_cpu(p.source())
    streamlap.to_cpu([p.source(2), p.source(3)])


def to_device(p: Program) -> None:
    host = streamlap.empty_pinned((SIZE, SIZE))
    host.copy_(p.source().cpu())
    t = streamlap.to_device(host, "cpu:1" if p.where == "cpu" else p.where)
    t.wait()
    same(t.result().cpu(), host)


def converted_to_device(p: Program) -> None:
    x = p.source().cpu()
    where = "cpu:1" if p.where == "cpu" else p.where
    same(streamlap.to_device(x.t(), where, dtype=torch.float64).result().cpu(), x.t().double())


def pipelined(p: Program) -> None:
    x = p.source()
    for result in streamlap.pipelined_run(x, n=2):
        close(result, x.mm(x).cpu())


def pipelined_fn(p: Program) -> None:
    x = p.source()
    for result in streamlap.pipelined_run(x, n=3, fn=lambda y: y + 1, depth=1):
        same(result, x.cpu() + 1)


def pipelined_later(p: Program) -> None:
    x = p.source()
    t = streamlap.pipelined_run(x, n=3, fn=lambda y: y * 2, depth=2, wait=False)
    for result in t:
        same(result, x.cpu() * 2)
    t.wait_source()


def pipelined_out(p: Program) -> None:
    x = p.source()
    out = torch.full((2, SIZE, SIZE), -1.0)
    streamlap.pipelined_run(x, n=2, fn=lambda y: y - 1, out=out)
    same(out[1], x.cpu() - 1)


def mapped(p: Program) -> None:
    xs = [p.source(seed) for seed in range(3)]
    found = list(streamlap.pipelined_map(lambda y: y + 1, xs, depth=2))
    for result, x in zip(found, xs, strict=True):
        same(result, x.cpu() + 1)


def mapped_half(p: Program) -> None:
    xs = [p.source(seed) for seed in range(4)]
    results = streamlap.pipelined_map(lambda y: y + 1, xs, depth=3)
    same(next(results), xs[0].cpu() + 1)
    same(next(results), xs[1].cpu() + 1)
    results.close()


def d2l(p: Program) -> None:
    xs = [p.source(seed) for seed in range(2)]
    for result, x in zip(streamlap.copy_to_cpu(xs), xs, strict=True):
        same(result, x.cpu())


def parallel(p: Program) -> None:
    xs = [p.source(seed) for seed in range(2)]
    for results, x in zip(streamlap.parallel_run(xs, n=2), xs, strict=True):
        close(results[1], x.mm(x))


def synchronized(p: Program) -> None:
    x = p.source()
    t = streamlap.pipelined_run(x, n=2, fn=lambda y: y + 3, wait=False)
    streamlap.synchronize(p.where)
    same(t[1], x.cpu() + 3)


def prefetched(p: Program) -> None:
    xs = [p.source(seed).cpu() for seed in range(4)]
    for batch, x in zip(streamlap.Prefetcher(iter(xs), p.where, depth=1), xs, strict=True):
        same(batch.cpu(), x)


def prefetched_half(p: Program) -> None:
    batches = iter(streamlap.Prefetcher([p.source(seed).cpu() for seed in range(4)], p.where))
    next(batches)


def offloaded(p: Program) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamlap.training.offloaded, "COUNT", 1)
        patch.setattr(streamlap.training.offloaded, "BYTES", 0)
        x = p.source().requires_grad_()
        with streamlap.offload_activations(min_bytes=1):
            loss = (x * 2).sin().sin().sin().sum()
        (found,) = torch.autograd.grad(loss, x)
        (right,) = torch.autograd.grad((x * 2).sin().sin().sin().sum(), x)
        same(found, right)


PROGRAMS = [
    *(
        plain,
        tree,
        items,
        chunks,
        ordinary,
        given,
        converted,
        gathered,
        prepared,
        summed,
        protected,
        abandoned,
        to_device,
    ),
    *(converted_to_device, pipelined, pipelined_fn, pipelined_later, pipelined_out, mapped),
    *(mapped_half, d2l, parallel, synchronized, prefetched, prefetched_half, offloaded),
]


@pytest.fixture(autouse=True, scope="module")
def thaw():
    yield
    gc.unfreeze()


@contextlib.contextmanager
def no_hang(what: str):
    def late(_signal, _frame):
        raise AssertionError(f"{what} hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Outcome(NamedTuple):
    fired: int
    told: type[BaseException] | None
    counts: dict[str, int]


def sweep(program, where: str, plan: str, cuda: bool = False, may_keep: bool = False) -> Outcome:
    """Run a program with a fault; then everything comes back, and it runs without.

    All in one block: another one has a pool of its own, in which nothing is ever left.
    """
    name = f"{program.__name__} {plan}"
    gc.freeze()  # the collector is asked often; it need not look at what was there before
    p = Program(where)
    told, text = None, ""
    with faults.injected(plan, cuda=cuda) as injection, no_hang(name):
        engines = [engine_of(place) for place in (where, "cpu:1")]
        before = sum(engine.abandoned() for engine in engines)  # all blocks share a GPU's engine
        try:
            program(p)
        except (StreamlapError, MemoryError, KeyboardInterrupt) as error:
            told, text = type(error), repr(error)
        outcome = Outcome(injection.fired, told, injection.counts)
        assert "deadlock" not in text, (name, text)
        assert outcome.fired or told is None, (name, text)
        injection.disarm()
        if plan.endswith("sticky") and outcome.fired:
            return outcome
        kept, given_up = ((1 << 20), 8) if may_keep else (0, 0)

        def gone() -> bool:
            stats = streamlap.pool_stats(where)
            left = sum(engine.abandoned() for engine in engines) - before
            dead = all(ref() is None for ref in p.watched)
            return dead and stats["live"] <= kept and stats["in_flight"] == 0 and left <= given_up

        def collected() -> bool:
            while help_simulations():
                pass
            gc.collect()  # an error's traceback may lead back to the error, on any thread
            return gone()

        assert eventually(gone, 0.02) or eventually(collected, 10.0), (
            *(name, told, streamlap.pool_stats(where)),
            [engine.abandoned() for engine in engines],
            [ref() is None for ref in p.watched],
        )
        program(Program(where))
    return outcome


def plans_of(counts: dict[str, int], every: bool):
    for call, count in counts.items():
        numbers = range(1, count + 1) if every else sorted({1, (count + 1) // 2, count})
        for mode in _native.fault_modes(call):
            yield from (f"{call}:{number}:{mode}" for number in numbers)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random(3)"])
def test_every_call_in_a_simulation(program, schedule):
    with streamlap.use_runtime("sim", schedule=schedule):
        clean = sweep(program, "cpu", "")
    assert clean.told is None
    assert clean.fired == 0
    missed = []
    plans = list(plans_of(clean.counts, every=schedule == "eager"))
    for plan in plans:
        with streamlap.use_runtime("sim", schedule=schedule):
            if not sweep(program, "cpu", plan).fired:
                missed.append(plan)
    # A wait that is in a callable is not interrupted, and a consumer that stops early may come
    # before or after a call of the worker.
    assert len(missed) <= len(plans) // 4, missed


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_some_calls_on_worker_threads(program):
    plans = plans_of(sweep(program, "cpu", "").counts, every=False)
    # What is in flight when a context is lost is kept for ever, with its worker threads.
    fired = [sweep(program, "cpu", plan).fired for plan in plans if not plan.endswith("sticky")]
    assert any(fired)


@pytest.mark.gpu
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_some_calls_on_a_gpu(program):
    sweep(program, "cuda:0", "", cuda=True)
    for plan in plans_of(sweep(program, "cuda:0", "", cuda=True).counts, every=False):
        call, _number, mode = plan.split(":")
        # Errors of a real GPU are not taken off a stream, and a lost context ends the process.
        if mode in ("later", "sticky"):
            continue
        # What has a last use that cannot be recorded is never given to anybody again.
        may_keep = call in ("event_create", "event_record", "stream_capturing")
        sweep(program, "cuda:0", plan, True, may_keep)


def test_what_is_interrupted_is_collected_later():
    with streamlap.use_runtime("sim", schedule="lazy"):
        p = Program("cpu")
        with faults.injected("event_sync:1:interrupt") as injection:
            transfer = streamlap.to_cpu(p.source())
            with pytest.raises(KeyboardInterrupt):
                transfer.result()
            assert injection.sites == ["transfer.done"]
            engine = engine_of("cpu")
            del transfer
            assert engine.abandoned() == 1
            assert p.watched[0]() is not None
            assert eventually(lambda: engine.abandoned() == 0)
            assert eventually(lambda: p.watched[0]() is None)
            assert streamlap.pool_stats("cpu")["live"] == 0


def test_calls_are_counted_and_fail_where_planned():
    with streamlap.use_runtime("sim"), faults.injected() as clean:
        plain(Program("cpu"))
    assert clean.fired == 0
    assert clean.counts["alloc_pinned"] == 1
    with streamlap.use_runtime("sim"), faults.injected("alloc_pinned:1:memory") as injection:
        with pytest.raises(streamlap.OutOfMemory, match="injected fault alloc_pinned:1:memory"):
            plain(Program("cpu"))
        plain(Program("cpu"))
    assert injection.fired == 1
    assert injection.plan == "alloc_pinned:1:memory"
    assert injection.counts["alloc_pinned"] == 2


def test_a_plan_that_is_none_is_refused():
    for plan in ("launch", "launch:0:once", "no_call:1:once", "launch:1:never"):
        with pytest.raises(InvalidArgument), faults.injected(plan):
            pass
    with pytest.raises(InvalidType), faults.injected(3):
        pass
    with faults.injected(), pytest.raises(InvalidArgument, match="open"), faults.injected():
        pass
    with faults.injected("launch:1:once"):  # the block before has left nothing behind
        pass


def test_the_faults_are_in_the_block_only():
    outside = runtime_of("cpu")
    with faults.injected():
        assert runtime_of("cpu") is not outside
    assert runtime_of("cpu") is outside


def test_the_sweep_in_cpp_knows_every_ordering_call_that_can_fail():
    fails = "event_record|event_query|event_sync_for|stream_wait|stream_sync"
    fails += "|whole|whole_for|sync_event"
    found = set()
    for path in sorted((ROOT / "csrc" / "transfer").glob("*.cpp")):
        text = path.read_text()
        for name, site in re.findall(r'constexpr Site (\w+)\{"([\w.]+)"\}', text):
            if re.search(rf"(?:{fails})\([^;]*\b{name}\)", text):
                found.add(site)
    text = (ROOT / "tests" / "cpp" / "test_faults.cpp").read_text()
    listed = re.search(r"all_sites = \{(.*?)\};", text, re.DOTALL)
    assert listed is not None
    assert found == set(re.findall(r'"([\w.]+)"', listed[1]))
