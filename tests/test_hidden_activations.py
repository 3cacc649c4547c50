"""budget="hide": what is moved, what is measured, and that it is no more than was measured."""

import contextlib
import itertools
import random

import pytest
import torch
from helpers.data import same_bits
from helpers.saving import batch_of, chain
from helpers.streams import CopySide, eventually, finish_all
from helpers.threads import spawn
from torch.utils.checkpoint import checkpoint

import streamlap
from streamlap import offload_activations
from streamlap.training import activations, pace
from streamlap.training.spread import Spread


class Moment:
    """A mark on a clock that a test sets."""

    now = 0.0

    def __init__(self, clock=-1):
        self.clock = clock
        self.time = Moment.now

    def passed(self):
        return self.time < Moment.now

    def until(self, end):
        return end.time - self.time


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(Moment, "now", 0.0)


def test_what_the_block_hides_is_moved_and_no_more(monkeypatch):
    monkeypatch.setattr(activations, "mark", Moment)
    monkeypatch.setattr(pace, "PROBE", 4000)
    x = batch_of("cpu").requires_grad_()  # 1536 bytes
    expected = torch.autograd.grad(chain(x, 20), x)[0]
    moved = []
    # A link of a megabyte a second, and blocks of 20, 10 and again 20 ms; two are only measured.
    with streamlap.use_runtime("sim", costs={"memcpy": 1e6}):
        offload = offload_activations("hide", min_bytes=1)
        for seconds in (0.03, 0.02, 0.01, 0.02, 0.02):
            before = offload.stats()["moved_bytes"]
            with offload:
                loss = chain(x, 20)
                Moment.now += seconds
            moved.append(offload.stats()["moved_bytes"] - before)
            assert same_bits(torch.autograd.grad(loss, x)[0], expected)
            Moment.now += 1
    # 0.6 of 20 kB, then of 10 kB.
    assert moved == [1536 * count for count in (2, 2, 7, 3, 3)]


def test_a_block_that_fails_is_not_measured(monkeypatch):
    monkeypatch.setattr(activations, "mark", Moment)
    offload = offload_activations("hide", min_bytes=1)

    def fails():
        with offload:
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not offload._pace._blocks


@pytest.mark.parametrize("fails", ["mark", "budget"])
def test_a_block_that_cannot_be_measured_leaves_no_hooks(monkeypatch, fails):
    offload = offload_activations("hide", min_bytes=1)

    def fail(*_arguments):
        raise RuntimeError("no clock")

    monkeypatch.setattr(
        *((activations, "mark") if fails == "mark" else (pace.Pace, "budget")), fail
    )
    with pytest.raises(RuntimeError, match="no clock"):
        offload.__enter__()
    (torch.ones(8, requires_grad=True) * 2).sin()
    assert offload.stats()["moved"] + offload.stats()["stayed"] == 0


def test_the_pace_of_real_blocks(where):
    x = batch_of(where).requires_grad_()
    offload = offload_activations("hide", min_bytes=1)
    for _ in range(4):
        with offload:
            loss = chain(x)
        finish_all(where)
        loss.backward()
    finish_all(where)
    with offload:
        pass
    assert offload.stats()["moved"] > 0
    assert 0 < min(offload._pace._times) < 10
    assert offload._pace._bytes > 0


def test_backwards_are_measured_from_the_first_saved_tensor_to_the_end(monkeypatch):
    monkeypatch.setattr(activations, "mark", Moment)
    x = batch_of("cpu").requires_grad_()

    def advance(seconds):
        Moment.now += seconds

    x.register_hook(lambda _grad: advance(0.5))
    offload = offload_activations("hide", min_bytes=1)
    for keep in (lambda _tensor: False, lambda _tensor: True):  # moved or not
        offload._keep = keep
        with offload:
            loss = chain(x)
        advance(1)
        loss.backward()
        advance(1)
        offload._pace.budget()
    with offload:
        y = checkpoint(lambda x: chain(x * x), x, use_reentrant=True)  # a backward in a backward
    y.backward()
    assert [end.time - begin.time for begin, end, *_ in offload._pace._backwards] == [0.5]
    assert len(offload._pace._lately[1]) == 2
    # Tasks within tasks, which ask in turn: one backward, and all of it.
    offload._pace._backwards.clear()
    with offload:
        y = chain(checkpoint(chain, chain(x * x), use_reentrant=True))
        y.backward()
    assert [end.time - begin.time for begin, end, *_ in offload._pace._backwards] == [0.5]
    assert offload._tasks == set()


def budgets_of(known, seconds):
    """The budget after each block of so many seconds."""
    found = []
    for length in seconds:
        begin = Moment()
        Moment.now += length
        known.block(begin, Moment())
        Moment.now += 1
        found.append(known.budget())
    return found


def test_a_budget_follows_large_changes_only():
    known = pace.Pace()
    known.copied(10_000, 0.0)  # of a copy that has failed
    assert budgets_of(known, [1, 1]) == [pace.PROBE] * 2
    known.copied(1000, 1.0)
    assert budgets_of(known, [1, 0.97, 0.96]) == [600] * 3
    assert budgets_of(known, [0.9]) == [810]  # nothing has become longer


def test_moments_of_different_clocks_are_not_compared():
    known = pace.Pace()
    for note, noted in ((known.block, known._blocks), (known.backward, known._backwards)):
        note(Moment(0), Moment(1))  # as of a model on two GPUs
        note(Moment(), Moment(0))
        assert not noted
        note(Moment(1), Moment(1))
        assert len(noted) == 1


def test_a_short_block_is_forgotten():
    known = pace.Pace()
    known.copied(1000, 1.0)
    assert budgets_of(known, [1] * 8)[-1] == 900
    assert budgets_of(known, [0.5])[-1] == 450
    assert budgets_of(known, [1] * pace.RECENT) == [450] * (pace.RECENT - 1) + [900]


def steps_of(known, count, takes):
    """The budgets of so many steps.

    ``takes(budget, first)`` gives forward's and backward's time, and what was saved; ``first``:
    with this budget.
    """
    budgets = [known.budget()]
    for _ in range(count):
        first = len(budgets) < 2 or budgets[-1] != budgets[-2]
        forward, backward, *saved = takes(budgets[-1], first)
        begin = Moment()
        Moment.now += forward
        known.block(begin, Moment(), *saved)
        begin = Moment()
        Moment.now += backward
        known.backward(begin, Moment())
        Moment.now += 1
        budgets.append(known.budget())
    return budgets


GIGA = 10**9


def link_of_ten():
    known = pace.Pace()
    known.copied(10 * GIGA, 1.0)
    return known


def test_more_is_hidden_if_that_makes_no_step_longer():
    budgets = steps_of(link_of_ten(), 20, lambda _budget, first: (0.15 if first else 0.1, 0.2))
    assert budgets[:2] == [pace.PROBE] * 2
    assert budgets[2:5] == [pytest.approx(0.6 * GIGA)] * 3
    assert budgets[5:] == [pytest.approx(0.9 * GIGA)] * 16


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("cold", [1, 2])
@pytest.mark.parametrize("hides", [0.7, 0.3, 0.1, 0.05])
def test_a_budget_that_makes_the_step_longer_falls_until_it_does_not(where, cold, hides):
    """``hides``: so many gigabytes. ``cold``: the first two steps take so much longer."""
    known = link_of_ten()
    steps = iter(range(100))

    def takes(budget, first):
        longer = max(0, budget / GIGA - hides) / 10 + (0.05 if first else 0)
        slow = cold if next(steps) < 2 else 1
        in_forward = {"forward": 1, "backward": 0, "both": 0.5}[where]
        return slow * 0.1 + in_forward * longer, slow * 0.2 + (1 - in_forward) * longer

    budgets = steps_of(known, 40, takes)
    assert budgets[2] == pytest.approx(0.6 * cold * GIGA, rel=0.1)
    assert not known.learns()
    assert sum(takes(budgets[-1], False)) <= 0.3 * 1.025
    assert budgets[-1] >= 0.3 * hides * GIGA
    assert sum(sum(takes(budget, False)) > 0.3 * 1.03 for budget in budgets[2:]) <= 8 * cold


def test_what_cannot_be_hidden_at_all_is_hardly_moved():
    budgets = steps_of(link_of_ten(), 40, lambda budget, _first: (0.1 + budget / 10 / GIGA, 0.2))
    assert budgets[-1] <= pace.PROBE


def test_nothing_is_moved_where_that_is_best():
    budgets = steps_of(link_of_ten(), 40, lambda budget, _first: (0.1 + budget / GIGA, 0.2))
    assert budgets[-1] == 0


@pytest.mark.parametrize("rate", [1, 1000])
@pytest.mark.parametrize("long", [2, 3, 4, 5, 6, 7, 8, 9])
def test_one_step_that_is_longer_tells_nothing(rate, long):
    known = pace.Pace()
    known.copied(10 * GIGA, rate)  # at 10 MB/s the budget is below what is worth probing
    steps = iter(range(100))

    def takes(_budget, _first):
        slow = 1.2 if next(steps) == long else 1
        return slow * 0.1, slow * 0.2

    assert steps_of(known, 40, takes)[-1] == pytest.approx(0.9 * GIGA / rate, rel=0.01)


@pytest.mark.parametrize("seed", range(8))
def test_batches_of_any_length_are_no_lesson(seed):
    generator = random.Random(seed)

    def takes(_budget, _first):
        size = generator.uniform(1, 3)
        return size * 0.1, size * 0.2, int(size * 1e6)

    known = link_of_ten()
    steps_of(known, 60, takes)
    assert known._share == 0.9


@pytest.mark.parametrize("share", [0, 1])
def test_what_is_too_small_to_be_probed_is_tried_without(share):
    """A link of 100 MB/s; and what is moved costs the host as much again, or nothing."""
    known = pace.Pace()
    known.copied(GIGA // 10, 1)
    budgets = steps_of(known, 40, lambda budget, _first: (0.1 + (1 - share) * budget / 1e8, 0.2))
    assert budgets[-1] == (0 if share == 0 else pytest.approx(0.9e7, rel=0.01))


def test_times_that_are_none_are_left_out():
    known = link_of_ten()
    lengths = iter([0.1] * 3 + [0, -0.1] + [0.1] * 30)
    backward = iter([0.2] * 3 + [0.3, 0.3] + [0.2] * 30)
    budgets = steps_of(known, 30, lambda _budget, _first: (next(lengths), next(backward)))
    assert budgets[-1] == pytest.approx(0.9 * GIGA)


@pytest.mark.parametrize("first", [0.05, 0.1])
def test_a_step_that_is_longer_for_another_reason_keeps_its_budget(first):
    lengths = iter([first] * 2 + [0.1] * 40)
    budgets = steps_of(link_of_ten(), 40, lambda _budget, _first: (next(lengths), 0.2))
    assert budgets[-1] == pytest.approx({0.05: 0.6, 0.1: 0.9}[first] * GIGA)


def test_what_changes_later_is_no_lesson():
    known = link_of_ten()
    lengths = iter([0.1] * 8 + [0.2] * 12)
    budgets = steps_of(known, 20, lambda _budget, _first: (next(lengths), 0.2))
    assert budgets[5:] == [pytest.approx(0.9 * GIGA)] * 16
    assert not known.learns()


def test_a_full_pool_takes_nothing_of_what_is_to_be_hidden(monkeypatch):
    to_cpu, calls = streamlap.to_cpu, []

    def full_at_first(*arguments, **how):
        calls.append(1)
        if len(calls) == 1:
            raise streamlap.PoolExhausted("full", 1, 1)
        return to_cpu(*arguments, **how)

    monkeypatch.setattr(streamlap, "to_cpu", full_at_first)
    monkeypatch.setattr(pace, "PROBE", 1)  # nothing fits but the one that is measured
    x = batch_of("cpu").requires_grad_()
    offload = offload_activations("hide", min_bytes=1)
    with pytest.warns(UserWarning, match="pool is full"), offload:
        chain(x).backward()
    assert len(calls) == 2
    assert offload.stats()["moved"] == 1


@pytest.mark.parametrize("length", [1, 12])
def test_one_tensor_a_block_is_enough_to_measure_the_link(where, monkeypatch, length):
    x = batch_of(where).requires_grad_()
    monkeypatch.setattr(pace, "PROBE", x.nbytes)
    offload = offload_activations("hide", min_bytes=1)
    for _ in range(pace.PROBES):
        copies = CopySide(where)
        gate = copies.hold()  # what is moved is still there when backward asks for it
        with offload:
            loss = chain(x, length)
        gate.open()
        finish_all(where)
        for memory in list(offload._all.values()):
            assert eventually(memory.left)
        del memory
        loss.backward()
    finish_all(where)
    assert offload.stats()["moved"] == pace.PROBES
    assert offload._pace.knows_link()
    assert offload._pace._bytes == pace.PROBES * x.nbytes  # each once
    assert offload._pace.budget() != x.nbytes


def test_what_is_to_be_hidden_is_chosen_evenly_and_alike(monkeypatch):
    monkeypatch.setattr(activations, "mark", Moment)
    monkeypatch.setattr(pace, "PROBE", 2000)
    x = batch_of("cpu").requires_grad_()  # 1536 bytes
    places = []
    with streamlap.use_runtime("sim", costs={"memcpy": 1e6}):
        moved = []  # before each tensor that is offered
        offload = offload_activations(
            "hide", min_bytes=1, keep=lambda _tensor: moved.append(offload.stats()["moved"])
        )
        for seconds in (0.02, 0.015, 0.0153, 0.0147, 0.015):  # 9 kB, or a little less
            moved.clear()
            with offload:
                loss = chain(x, 20)
                Moment.now += seconds
            loss.backward()
            Moment.now += 1
            moved.append(offload.stats()["moved"])
            places.append([i for i, (a, b) in enumerate(itertools.pairwise(moved)) if a < b])
    assert places[2] == places[3] == places[4]
    gaps = [b - a for a, b in itertools.pairwise(places[2])]
    assert len(gaps) == 4
    assert max(gaps) - min(gaps) <= 1


def offer(spread, budget, sizes, measures=False):
    choice = spread.begin(budget, measures)
    taken = [size for size in sizes if size >= choice.least and choice.takes(size, size)]
    spread.end(choice)
    return taken


def test_large_tensors_are_preferred_as_long_as_there_are_enough():
    spread = Spread(1)
    block = [4, 50, 30, 1, 30, 30, 7, 30] * 3
    offer(spread, 20, block)  # it is looked at
    assert offer(spread, 100, block) == [30, 30, 30]
    assert spread.begin(100).least == 30
    # What is larger than the budget is no reason to take less of the others.
    assert [offer(spread, 100, [500, *block]) for _ in range(3)] == [[30, 30, 30]] * 3
    # A quarter of the budget is the most where there are enough of those.
    others = Spread(1)
    offer(others, 20, [50, 10, 10, 10] * 30)
    assert offer(others, 100, [50, 10, 10, 10] * 30) == [10] * 10
    # A link that nobody knows is measured with the first that comes.
    assert offer(Spread(1), 20, [64, 5, 30], measures=True) == [64]
    # All of it is less than twice the budget: nothing is too small.
    assert sum(offer(spread, 400, block)) > 380
    assert spread.begin(400).least == 1
    # Other sizes: all are offered once, then the large ones again.
    spread = Spread(1)
    offer(spread, 20, block)
    offer(spread, 100, block)
    smaller = [2, 25, 15] * 10
    assert offer(spread, 100, smaller) == []
    assert spread.begin(100).least == 1
    assert sum(offer(spread, 100, smaller)) <= 100
    assert set(offer(spread, 100, smaller)) == {25}
    assert spread.begin(100).least == 25


def several_sizes(x):
    """Saves 200 kB at once, and 30 times 4 kB and 1 kB."""
    large, h, s = (x.repeat(50) * 2).sin().sum(), x * 2, x[:250] * 2
    for _ in range(30):
        h, s = h.sin(), s.sin()
    return large + h.sum() + s.sum()


@pytest.mark.parametrize("between", ["nothing", "evaluation", "half", "nested", "error", "threads"])
def test_a_budget_that_is_to_be_hidden_is_kept_whatever_comes_between(between, monkeypatch):
    x = torch.rand(1000).requires_grad_()
    offload = offload_activations("hide", min_bytes=1)
    with offload:
        several_sizes(x).backward()  # the link is measured
    monkeypatch.setattr(offload._pace, "budget", lambda: 40_000)

    def other():
        if between == "half":
            before = offload.stats()["moved_bytes"]
            with offload:
                several_sizes(x[:500]).backward()  # a quarter of it
            assert offload.stats()["moved_bytes"] - before <= 40_000
        if between == "evaluation":
            with offload, torch.no_grad():
                several_sizes(x)
        if between == "nested":
            with offload:
                pass
        if between == "error":
            with contextlib.suppress(KeyError), offload:
                x.sin().sum()
                raise KeyError
        if between == "threads":
            with offload:
                x[:1].sin().sum()

    moved = []
    for _ in range(6):
        before = offload.stats()["moved_bytes"]
        measured = len(offload._pace._blocks)
        with offload:
            loss = several_sizes(x)
            if between == "nested":
                other()
            if between == "threads":  # their own blocks, while this one is open
                spawn(other, []).join()
                spawn(other, []).join()
            loss = loss + several_sizes(x)
        loss.backward()
        moved.append(offload.stats()["moved_bytes"] - before)
        if between not in ("nested", "threads"):
            other()
        ran = len(offload._pace._blocks) - measured
        assert ran == {"half": 2, "threads": 1}.get(between, 1)
    assert all(0 < nbytes <= 40_000 for nbytes in moved)
    if between not in ("half", "threads"):
        assert set(moved[2:]) == {40_000}
