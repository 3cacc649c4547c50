"""How many bytes the work of a block hides: measured as it runs, not guessed."""

from __future__ import annotations

import time
from typing import Protocol

import torch

PROBE = 64 << 20
"""Bytes that are moved before anything is known: enough to measure the link, soon done."""

PROBES = 2
"""Blocks that are measured before more is moved: the first of a process is no measure, it may
take a multiple of the others."""

SHARE = 0.9
"""Of the time that was measured: the rest is for what differs from step to step."""

CHANGE = 0.05
"""Of the budget: one that follows each measurement would have other tensors moved in each step."""


class Mark(Protocol):
    """A moment in the work of the calling thread or its stream."""

    def passed(self) -> bool:
        """Return whether it is over."""

    def until(self, end: Mark) -> float:
        """Return the seconds to a later one; both must be over."""


class _Moment:
    """On the host."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def passed(self) -> bool:
        return True

    def until(self, end: Mark) -> float:
        assert isinstance(end, _Moment)
        return end.time - self.time


class _Point:
    """On the current stream of a GPU."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()  # site: pace.mark

    def passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def until(self, end: Mark) -> float:
        assert isinstance(end, _Point)
        return float(self.event.elapsed_time(end.event)) / 1e3


def mark() -> Mark:
    """Return the present moment of the current stream; of the host where no GPU is in use."""
    return _Point() if torch.cuda.is_initialized() else _Moment()  # type: ignore[no-untyped-call]


class Spread:
    """Chooses, of all that a block offers, what adds up to a budget: evenly over the block.

    The link is to be busy as long as the block runs. A block that offers the same each time is
    given the same answers, whatever the device has done so far: so the sizes of page-locked memory
    that are needed stay the same, too. Not thread-safe.
    """

    def __init__(self) -> None:
        self._budget = 0
        self._offered = 0
        self._taken = 0
        self._before = 0  # all that the block before has offered

    def begin(self, budget: int) -> None:
        """Begin with a block."""
        self._before = self._offered or self._before
        self._budget = budget
        self._offered = self._taken = 0

    def takes(self, nbytes: int) -> bool:
        """Return whether these bytes of the block are to be moved."""
        self._offered += nbytes
        taken = self._taken + nbytes
        if taken > self._budget or taken * self._before > self._budget * self._offered:
            return False
        self._taken = taken
        return True


class Pace:
    """The shortest time that a block has taken, and the rate of its copies.

    Not thread-safe. The shortest: what was moved too much makes a block longer, never shorter.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[Mark, Mark]] = []
        self._shortest: float | None = None
        self._measured = 0
        self._budget = 0
        self._bytes = 0
        self._seconds = 0.0

    def block(self, begin: Mark, end: Mark) -> None:
        """Note a block that was run."""
        if type(begin) is type(end):  # else a GPU came into use in it
            self._blocks.append((begin, end))

    def copied(self, nbytes: int, seconds: float) -> None:
        """Note a copy, and the time that it took on the link."""
        self._bytes += nbytes
        self._seconds += seconds

    def budget(self) -> int:
        """Return the bytes that can go while such a block runs; small changes are left out."""
        while self._blocks and self._blocks[0][1].passed():
            begin, end = self._blocks.pop(0)
            self._measured += 1
            seconds = begin.until(end)
            self._shortest = seconds if self._shortest is None else min(self._shortest, seconds)
        if self._shortest is None or self._measured < PROBES or not self._seconds:
            return PROBE
        budget = int(SHARE * self._shortest * self._bytes / self._seconds)
        if abs(budget - self._budget) > CHANGE * self._budget:
            self._budget = budget
        return self._budget
