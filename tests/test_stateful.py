"""A pool, transfers and pipelines driven at random, on threads and on a simulation, against NumPy.

A run that fails is made smaller by Hypothesis, which prints the steps as a program; the failure
also says which ``pytest`` line replays it.
"""

import contextlib
import gc

import hypothesis
import numpy as np
import pytest
import torch
from helpers.data import random_bits
from helpers.streams import eventually
from helpers.threads import spawn
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import streamlap
from streamlap.serving import current

pytestmark = pytest.mark.unchecked("each run is served by a block of its own")

RUNS = {"threads": 40, "sim": 40}
"""State machines a repeat."""
STEPS = 25
LIMIT = 1 << 20
"""Of the pool, in bytes: some of what is asked for does not fit."""

SHAPES = st.sampled_from(((), (0,), (3,), (7, 5), (64, 48), (5000,), (300, 300)))
DTYPES = st.sampled_from((torch.uint8, torch.bool, torch.float32, torch.int64, torch.complex64))
STREAMS = st.sampled_from((None, 0, 1))
DEPTHS = st.integers(1, 5)


def as_bytes(tensor):
    """The tensor's bytes as NumPy has them, in order of its indices."""
    return np.ascontiguousarray(tensor.contiguous().numpy()).reshape(-1).view(np.uint8).tobytes()


class Machine(RuleBasedStateMachine):
    """What the library gave, each with the bytes that a serial copy would have had."""

    threaded = True
    made = Bundle("made")

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.held = {}
        self.next = 0
        self.threads = []
        self.errors = []

    def block(self, seed):
        if self.threaded:
            return streamlap.checking()
        return streamlap.use_runtime("sim", schedule=f"random({seed})")

    @initialize(seed=st.integers(0, 1 << 20))
    def begin(self, seed):
        self.serving = self.stack.enter_context(self.block(seed))
        self.pool = streamlap.PinnedPool(LIMIT)
        place = current.get().place(0)
        self.streams = [place.runtime.stream(0, "compute") for _ in range(2)]

    # -- what is asked of the library

    def keep(self, found, expected):
        """Hold what was got, None included: what is drawn must not depend on who was first."""
        self.next += 1
        self.held[self.next] = (found, expected)
        return self.next

    def attempt(self, call):
        """Call; None where what is held fills the pool."""
        try:
            return call()
        except streamlap.PoolExhausted:
            return None

    @rule(
        target=made,
        shape=SHAPES,
        dtype=DTYPES,
        stream=STREAMS,
        pin=st.sampled_from((None, False)),
        chunk=st.sampled_from((None, 64, 1000)),
        transposed=st.booleans(),
    )
    def copy(self, shape, dtype, stream, pin, chunk, transposed):
        source = random_bits(shape, dtype)
        if transposed and source.dim() == 2:
            source = source.t()
        options = {} if chunk is None else {"chunk_bytes": chunk}
        given = None if stream is None else self.streams[stream]
        found = self.attempt(
            lambda: streamlap.to_cpu(source, pin=pin, stream=given, pool=self.pool, **options)
        )
        return self.keep(found, [as_bytes(source)])

    @rule(target=made, shapes=st.lists(SHAPES, max_size=4), dtype=DTYPES)
    def copy_tree(self, shapes, dtype):
        sources = [random_bits(shape, dtype) for shape in shapes]
        found = self.attempt(lambda: streamlap.to_cpu(sources, pool=self.pool))
        return self.keep(found, [as_bytes(s) for s in sources])

    @rule(target=made, shape=SHAPES, dtype=DTYPES, stream=STREAMS)
    def produced(self, shape, dtype, stream):
        """A stream writes the source, and the copy is ordered after that."""
        source, values = torch.zeros(shape, dtype=dtype), random_bits(shape, dtype)
        writer = self.streams[stream or 0]
        target, given = source.numpy(), values.numpy()
        writer.launch(lambda: np.copyto(target, given))
        found = self.attempt(lambda: streamlap.to_cpu(source, stream=writer, pool=self.pool))
        return self.keep(found, [as_bytes(values)])

    @rule(
        target=made,
        shape=SHAPES,
        dtype=DTYPES,
        how=st.sampled_from(("wait_source", "stream", "protect", "result")),
    )
    def overwritten(self, shape, dtype, how):
        source = random_bits(shape, dtype)
        expected = as_bytes(source)
        found = self.attempt(
            lambda: streamlap.to_cpu(source, protect=how == "protect", pool=self.pool)
        )
        if found is None:
            return self.keep(None, [])
        if how == "stream":
            found.wait_source(self.streams[1])
            target = source.numpy()
            self.streams[1].launch(lambda: target.fill(0))
        else:
            if how != "protect":
                getattr(found, how)()
            source.zero_()
        return self.keep(found, [expected])

    @rule(target=made, n=st.integers(0, 9), depth=DEPTHS, wait=st.booleans())
    def pipeline(self, n, depth, wait):
        x = random_bits((16, 16), torch.int64)
        count = iter(range(n))
        found = self.attempt(
            lambda: streamlap.pipelined_run(
                x, n=n, fn=lambda x: x + next(count), depth=depth, wait=wait, pool=self.pool
            )
        )
        return self.keep(found, [as_bytes(x + i) for i in range(n)])

    @rule(n=st.integers(1, 9), depth=DEPTHS, at=st.integers(0, 8), wait=st.booleans())
    def pipeline_that_fails(self, n, depth, at, wait):
        x = random_bits((16, 16), torch.int64)
        count = iter(range(n))

        def fn(x):
            index = next(count)
            if index == at:
                raise ArithmeticError("deliberate")
            return x + index

        def run():
            found = streamlap.pipelined_run(x, n=n, fn=fn, depth=depth, wait=wait, pool=self.pool)
            return found if wait else found.result()

        if at >= n:
            self.attempt(run)
            return
        with pytest.raises((ArithmeticError, streamlap.PoolExhausted)) as raised:
            run()
        if raised.type is ArithmeticError:
            assert raised.value.streamlap_index == at

    @rule(n=st.integers(0, 9), depth=DEPTHS, stop=st.integers(0, 9))
    def mapped(self, n, depth, stop):
        x = random_bits((16, 16), torch.int64)
        items = streamlap.pipelined_map(lambda k: x + k, range(n), depth=depth, pool=self.pool)
        with contextlib.suppress(streamlap.PoolExhausted), contextlib.closing(items):
            for index, found in enumerate(items):
                assert as_bytes(found) == as_bytes(x + index)
                if index == stop:
                    break

    @rule(which=made)
    def look(self, which):
        if which in self.held:
            self.compare(which)

    @rule(which=made)
    def drop(self, which):
        self.held.pop(which, None)

    @rule()
    def trim(self):
        self.pool.trim()

    @rule(shape=SHAPES, dtype=DTYPES, times=st.integers(1, 5))
    def another_thread(self, shape, dtype, times):
        """Copies of its own; a simulation runs the same in this thread."""

        def work():
            for _ in range(times):
                source = random_bits(shape, dtype)
                found = self.attempt(lambda s=source: streamlap.to_cpu(s, pool=self.pool))
                if found is not None:
                    assert as_bytes(found.result()) == as_bytes(source)

        if self.threaded:
            self.threads.append(spawn(work, self.errors))
        else:
            work()

    # -- what must be so

    def compare(self, which):
        found, expected = self.held[which]
        if found is None:
            return
        try:
            value = found.result() if isinstance(found, streamlap.Transfer) else found
        except streamlap.PoolExhausted:  # of an item that was computed later
            del self.held[which]
            return
        values = [value] if isinstance(value, torch.Tensor) else value
        assert [as_bytes(one) for one in values] == expected

    @invariant()
    def the_pool_adds_up(self):
        if not hasattr(self, "pool"):
            return
        stats = self.pool.stats()
        assert max(stats["reserved"], stats["peak"]) <= stats["limit"] == LIMIT, stats
        if not self.threads:  # another one may be giving memory back
            claimed = stats["growing"]  # by the library's own thread, which has yet to get it
            assert stats["reserved"] - claimed <= stats["peak"], stats
        assert stats["waste"] <= stats["live"], stats
        parts = ("live", "in_flight", "cached", "growing")
        assert stats["reserved"] == sum(stats[part] for part in parts), stats
        assert not self.errors, self.errors

    def teardown(self):
        try:
            for thread in self.threads:
                thread.join(60)
                assert not thread.is_alive()
            assert not self.errors, self.errors
            for which in list(self.held):
                self.compare(which)
            self.held.clear()
            for stream in getattr(self, "streams", ()):
                stream.synchronize()
            gc.collect()

            def empty():
                stats = self.pool.stats()
                return stats["live"] == stats["in_flight"] == stats["live_blocks"] == 0

            if hasattr(self, "pool"):
                if not eventually(empty, 0.5):
                    gc.collect()  # what another thread let go of may have been a cycle
                    assert eventually(empty), self.pool.stats()
                self.pool.trim()
                assert self.pool.stats()["reserved"] == self.pool.stats()["waste"] == 0
        finally:
            self.stack.close()


class OnSimulation(Machine):
    """In an order made at random, in one thread."""

    threaded = False


@pytest.mark.filterwarnings("ignore:the pinned pool:RuntimeWarning")
@pytest.mark.parametrize("machine", [Machine, OnSimulation], ids=["threads", "sim"])
def test_whatever_is_done_the_bytes_are_right(machine, seed, repeats, request):
    count = RUNS["threads" if machine.threaded else "sim"] * max(1, len(repeats("cpu")) // 3)
    settings = hypothesis.settings(
        max_examples=count,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
    except BaseException as error:
        error.add_note(f"replay: pytest '{request.node.nodeid}' --seed {seed}")
        raise


def test_a_failure_says_how_to_replay_it(seed, monkeypatch):
    """A library that loses a byte is caught, and the steps to it are few."""
    honest = streamlap.Transfer._value

    def spoilt(self):
        value = honest(self)
        if isinstance(value, torch.Tensor) and value.numel() > 10:
            first = (0,) * value.dim()
            value[first] = 0 if value[first] else 1
        return value

    monkeypatch.setattr(streamlap.Transfer, "_value", spoilt)
    settings = hypothesis.settings(
        max_examples=100,
        stateful_step_count=10,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],  # to make it smaller takes a while
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with pytest.raises(AssertionError) as raised:
        run_state_machine_as_test(hypothesis.seed(seed)(OnSimulation), settings=settings)
    notes = "\n".join(raised.value.__notes__)
    assert "state.begin(seed=" in notes
    assert "state.teardown()" in notes
