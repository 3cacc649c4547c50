"""Programs made at random, on a simulation in an order made at random, against plain copies.

A program that fails is made smaller by Hypothesis and printed with its schedule; both replay it.
"""

import gc

import hypothesis
import pytest
import torch
from helpers.data import random_bits, same_bits
from helpers.streams import eventually
from hypothesis import strategies as st

import streamlap
from streamlap.serving import help_simulations

EXAMPLES = 60
"""Programs a repeat."""

SHAPES = ((), (0,), (1,), (7, 5), (64, 48), (3, 1, 4), (5000,))
DTYPES = (torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.complex64)
VIEWS = (
    lambda t: t,
    lambda t: t.t() if t.dim() == 2 else t,
    lambda t: t[1:] if t.dim() and len(t) > 1 else t,
    lambda t: t[..., ::2] if t.dim() else t,
)

tensors = st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(VIEWS))
operations = st.one_of(
    st.tuples(st.just("to_cpu"), tensors, st.sampled_from((None, 64, 1000)), st.booleans()),
    st.tuples(st.just("to_device"), tensors),
    st.tuples(st.just("tree"), st.lists(tensors, max_size=4)),
    st.tuples(st.just("overwrite"), tensors, st.sampled_from(("wait_source", "protect", "result"))),
    st.tuples(st.just("run"), st.integers(0, 9), st.integers(1, 5), st.booleans()),
    st.tuples(st.just("map"), st.integers(0, 9), st.integers(1, 5), st.integers(0, 9)),
    st.tuples(st.just("raise"), st.integers(1, 9), st.integers(1, 5)),
    st.tuples(st.just("look"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("move"), st.integers(1, 5)),
)
schedules = st.one_of(
    st.sampled_from(("eager", "lazy")),
    st.integers(0, 10**6).map(lambda seed: f"random({seed})"),
    st.integers(0, 5).map(lambda stream: f"starve({stream})"),
    st.tuples(st.integers(0, 10**6), st.integers(1, 5)).map(lambda p: f"pct({p[0]},{p[1]},200)"),
)


class Program:
    """Runs operations; what they gave is held with what it must be."""

    def __init__(self):
        self.held = []

    def make(self, tensor):
        shape, dtype, view = tensor
        return view(random_bits(shape, dtype))

    def to_cpu(self, tensor, chunk, pin):
        source = self.make(tensor)
        options = {} if chunk is None else {"chunk_bytes": chunk}
        transfer = streamlap.to_cpu(source, pin=None if pin else False, **options)
        self.held.append((transfer, source.clone()))

    def to_device(self, tensor):
        source = self.make(tensor)
        self.held.append((streamlap.to_device(source, "cpu"), source.clone()))

    def tree(self, leaves):
        sources = [self.make(leaf) for leaf in leaves]
        self.held.append((streamlap.to_cpu(sources), [source.clone() for source in sources]))

    def overwrite(self, tensor, how):
        source = self.make(tensor)
        before = source.clone()
        transfer = streamlap.to_cpu(source, protect=how == "protect")
        if how != "protect":
            getattr(transfer, how)()
        source.zero_()
        self.held.append((transfer, before))

    def run(self, n, depth, wait):
        x = torch.randn(8, 8)
        found = streamlap.pipelined_run(x, n=n, depth=depth, wait=wait)
        self.held.append((found, [x.mm(x)] * n))

    def map(self, n, depth, stop_at):
        x = torch.randn(8, 8)
        generator = streamlap.pipelined_map(lambda k: x * k, range(n), depth=depth)
        for index, found in enumerate(generator):
            assert same_bits(found, x * index)
            if index == stop_at:
                generator.close()
                break

    def raise_(self, at, depth):
        def fn(x):
            calls.append(1)
            if len(calls) == at:
                raise ArithmeticError("deliberate")
            return x + 1

        calls = []
        with pytest.raises(ArithmeticError) as raised:
            streamlap.pipelined_run(torch.ones(4), n=9, depth=depth, fn=fn)
        assert raised.value.streamlap_index == at - 1

    def look(self, index):
        if self.held:
            check(*self.held[index % len(self.held)])

    def drop(self, index):
        if self.held:
            self.held.pop(index % len(self.held))

    def move(self, steps):
        for _ in range(steps):
            help_simulations()


def check(found, expected):
    value = found.result() if isinstance(found, streamlap.Transfer) else found
    if isinstance(expected, list):
        assert len(value) == len(expected)
        assert all(same_bits(a, b) for a, b in zip(value, expected, strict=True))
    else:
        assert same_bits(value, expected)


@pytest.mark.timeout(900)  # half a minute, where nothing else runs
def test_programs_made_at_random_are_right_in_any_order(seed, repeats):
    number = EXAMPLES * len(repeats("cpu"))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number, deadline=None, database=None, print_blob=True, derandomize=False
    )
    @hypothesis.given(st.lists(operations, max_size=12), schedules)
    def run(program, schedule):
        with streamlap.use_runtime("sim", schedule=schedule) as simulation:
            made = Program()
            for name, *arguments in program:
                getattr(made, "raise_" if name == "raise" else name)(*arguments)
            for found, expected in made.held:
                check(found, expected)
            made.held.clear()
            found = expected = None
            gc.collect()

            def empty() -> bool:
                stats = simulation.pool.stats()
                return stats["live"] == stats["in_flight"] == 0

            # Last references may die on another thread, a little later.
            assert eventually(empty), simulation.pool.stats()

    run()
