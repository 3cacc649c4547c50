"""How many bytes the work of a block hides: measured as it runs, not guessed."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch

PROBE = 64 << 20
"""Bytes that are moved before anything is known: enough to measure the link, soon done."""

PROBES = 2
"""Blocks that are measured before more is moved: the first of a process is no measure, it may
take a multiple of the others."""

RECENT = 16
"""Blocks of which the shortest counts: one of a smaller batch is forgotten after so many."""

SHARES = (0.6, 0.9)
"""Of the time that was measured: at first, and if that makes no step longer. The rest is for what
differs from step to step."""

LESS = (0.25, 0.5)
"""Of a share that was too large, at least and at most: a measurement may be wrong, and if half of
it makes no difference that is seen, all of it makes little."""

LONGER = 0.01
"""Of forward and backward: what is not longer by so much is as long."""

PLAINLY = 0.04
"""Longer by so much is too long; shorter by so much is seen in one block, else the shorter of two
counts."""

CHANGE = 0.05
"""Of the budget: one that follows each measurement would have other tensors moved in each step."""


class Mark(Protocol):
    """A moment in the work of the calling thread or its stream.

    Attributes:
        clock: moments of the same one can be compared: a GPU's index, or -1 for the host's.
    """

    clock: int

    def passed(self) -> bool:
        """Return whether it is over."""

    def until(self, end: Mark) -> float:
        """Return the seconds to a later one; both must be over."""


class _Moment:
    """On the host."""

    clock = -1

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
        self.clock = torch.cuda.current_device()
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()  # site: pace.mark

    def passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def until(self, end: Mark) -> float:
        assert isinstance(end, _Point)
        return float(self.event.elapsed_time(end.event)) / 1e3


_Noted = tuple[Mark, Mark, int | None, int]
"""Begin and end, the term that it was of (None: the first of one), and the bytes saved in it."""


def mark() -> Mark:
    """Return the present moment of the current stream; of the host where no GPU is in use."""
    return _Point() if torch.cuda.is_initialized() else _Moment()  # type: ignore[no-untyped-call]


class Pace:
    """The shortest time that a block has taken lately, and the rate of its copies.

    Not thread-safe. The shortest: what was moved too much makes a block longer, never shorter.

    What the link carries in that time is only the first guess. A block may save most of its bytes
    in a part of the time, the host may have no time to spare, or the way back takes longer; and the
    first blocks of a process are long. So forward and backward are compared: as long as moving
    less makes them shorter, less is moved. They are compared by the byte that was saved, so that
    larger batches among smaller ones mean nothing.
    """

    def __init__(self) -> None:
        # Some: there may be backwards without end, and no block that asks.
        self._blocks: deque[_Noted] = deque(maxlen=RECENT)
        self._backwards: deque[_Noted] = deque(maxlen=RECENT)
        self._times: deque[float] = deque(maxlen=RECENT)
        self._budget = 0
        self._bytes = 0
        self._seconds = 0.0
        # A term: as long as the budget is the same. Its first block makes page-locked memory.
        self._term = 0
        self._blocks_of_term = 0
        self._share = SHARES[0]
        self._compared: tuple[float, float] | None = None  # with the share and time of before
        self._learns = True
        # Seconds a byte, of forward and backward.
        self._saved = 1
        self._lately = (deque[float](maxlen=RECENT), deque[float](maxlen=RECENT))
        self._of_term: tuple[list[float], list[float]] = ([], [])

    def block(self, begin: Mark, end: Mark, saved: int = 1) -> None:
        """Note a block that was run, and the bytes of all tensors that it has saved."""
        self._saved = saved
        self._note(self._blocks, begin, end, self._blocks_of_term == 0)
        self._blocks_of_term += 1

    def backward(self, begin: Mark, end: Mark) -> None:
        """Note a backward that was run: the last block's, most likely."""
        self._note(self._backwards, begin, end, self._blocks_of_term <= 1)

    def _note(self, into: deque[_Noted], begin: Mark, end: Mark, first: bool) -> None:
        if begin.clock == end.clock:  # else a GPU came into use in it, or it went to another
            into.append((begin, end, None if first else self._term, self._saved))

    def copied(self, nbytes: int, seconds: float) -> None:
        """Note a copy, and the time that it took on the link."""
        if seconds > 0:  # none of one that has failed
            self._bytes += nbytes
            self._seconds += seconds

    def knows_link(self) -> bool:
        """Return whether a copy was measured."""
        return self._seconds > 0

    def learns(self) -> bool:
        """Return whether it has use for the times of backwards."""
        return self._learns

    def budget(self) -> int:
        """Return the bytes that can go while such a block runs; small changes are left out."""
        self._times.extend(self._take(self._blocks, 0))
        self._take(self._backwards, 1)
        if len(self._times) < PROBES or not self.knows_link():
            return PROBE
        if self._term and self._learns:
            self._learn()
        budget = int(self._share * min(self._times) * self._bytes / self._seconds)
        if abs(budget - self._budget) > CHANGE * self._budget:
            self._budget = budget
            self._term += 1
            self._blocks_of_term = 0
            self._of_term = ([], [])
        return self._budget

    def _take(self, noted: deque[_Noted], which: int) -> list[float]:
        """Take the times of those that are over."""
        times = []
        while noted and noted[0][1].passed():
            begin, end, term, saved = noted.popleft()
            seconds = begin.until(end)
            if seconds <= 0:  # of two streams: it tells nothing
                continue
            times.append(seconds)
            self._lately[which].append(seconds / saved)
            if term == self._term:
                self._of_term[which].append(seconds / saved)
        return times

    def _learn(self) -> None:
        """Compare this term's times with those of before, and change the share."""
        forward, backward = self._of_term
        if not forward or (self._lately[1] and not backward):
            return
        now = min(forward) + min(backward, default=0.0)
        shortest = sum(min(times, default=0.0) for times in self._lately)
        plainly_less = self._compared is not None and now < (1 - PLAINLY) * self._compared[1]
        if len(forward) < 2 and not plainly_less:
            return  # any block may be longer once
        too_long = (now - shortest) / shortest
        if self._compared is None:
            if too_long <= PLAINLY:
                self._try(SHARES[1], now)
            else:
                self._try_less(now, too_long)
            return
        share, before = self._compared
        if self._share > share:
            if now <= (1 + LONGER) * before:
                self._learns = False
            else:
                self._share = share
                self._try_less(before, too_long)
        elif now >= (1 - LONGER) * before:  # it was something else
            self._share, self._learns = share, False
        elif self._share > 0:
            self._try_less(now, too_long)
        else:
            self._learns = False

    def _try(self, share: float, now: float) -> None:
        self._compared = (self._share, now)
        self._share = share

    def _try_less(self, now: float, too_long: float) -> None:
        """Try what would hide if all that is too long were copies; nothing, where that is little.

        ``too_long``: a part of forward and backward, which is some three times forward.
        """
        left = 1 - 3 * too_long / self._share
        less = self._share * min(max(left, LESS[0]), LESS[1])
        self._try(less if self._budget >= PROBE // 2 else 0.0, now)
