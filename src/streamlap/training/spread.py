"""Which tensors of a block are hidden: large ones, evenly over the block."""

from __future__ import annotations

from collections import Counter

ENOUGH = 2
"""Times the budget: tensors to choose from, so that those chosen are spread over the block."""

PIECES = 4
"""Tensors that the budget is made of, at least, where there are enough that are so small."""


class Choice:
    """What one block takes of the tensors that it offers. Not thread-safe.

    Attributes:
        least: smaller tensors need not be offered.
        expected: bytes that will be offered, as far as is known.
        seen: bytes that were offered, by the size of the tensor and of what is moved for it.
        offered: of these, the bytes of what could be taken.
    """

    def __init__(self, budget: int, least: int, most: int, expected: int, measures: bool) -> None:
        self.least = least
        self.expected = expected
        self.seen: Counter[tuple[int, int]] = Counter()
        self.offered = 0
        self._budget = budget
        self._most = most
        self._measures = measures
        self._taken = 0

    def takes(self, size: int, nbytes: int) -> bool:
        """Return whether a tensor of ``size`` bytes is to be moved, ``nbytes`` of its memory."""
        self.seen[size, nbytes] += nbytes
        if self._measures and not self._taken:
            self._taken = nbytes
            return True
        if nbytes > self._most:
            return False
        self.offered += nbytes
        taken = self._taken + nbytes
        if taken > self._budget or taken * self.expected > self._budget * self.offered:
            return False
        self._taken = taken
        return True

    def gives_back(self, nbytes: int) -> None:
        """Take less: there was no memory for what :meth:`takes` said."""
        self._taken -= nbytes


class Spread:
    """Chooses, of all that a block offers, what adds up to a budget: large ones, evenly.

    Each tensor that is moved costs the host about as much as an operation or two, whatever its
    size. And evenly, because the link is to be busy as long as the block runs. A block that offers
    the same as the one before is given the same answers, whatever the device has done so far: the
    sizes of page-locked memory that are needed stay the same, too. Not thread-safe.

    Args:
        least: of a tensor, in bytes.
    """

    def __init__(self, least: int) -> None:
        self._floor = least
        self._sizes: Counter[tuple[int, int]] = Counter()  # of the last block that offered all

    def begin(self, budget: int, measures: bool = False) -> Choice:
        """Begin with a block; ``measures``: the first tensor is taken, whatever its size."""
        for most in (budget // PIECES, budget):
            least, expected = self._choose(budget, most)
            if expected >= ENOUGH * budget:
                break
        return Choice(budget, least, most, expected, measures)

    def end(self, choice: Choice) -> None:
        """Learn from a block that has come to its end."""
        if choice.least == self._floor:
            self._sizes = choice.seen
        elif not choice.expected <= 2 * choice.offered <= 4 * choice.expected:
            self._sizes = Counter()  # it is not what it was: let the next one offer all

    def _choose(self, budget: int, most: int) -> tuple[int, int]:
        """Return the size from which on there is enough to choose from, and how much that is."""
        found = 0
        last = self._floor
        for (size, nbytes), total in sorted(self._sizes.items(), reverse=True):
            if found >= ENOUGH * budget and size < last:
                return last, found
            if nbytes <= most:
                found += total
            last = size
        return self._floor, found
