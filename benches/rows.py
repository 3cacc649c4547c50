"""What a table is made of: ways to do the same work, one row each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .limit import synchronize

Tensors = list[torch.Tensor]


class Unavailable(Exception):
    """A way cannot be gone; the message says why, whole."""


class Way:
    """One way to do a table's work. Made once, outside the clock.

    Only ``go`` is timed. It ends when its results can be read.
    """

    def before(self) -> None:
        """Get ready for a round."""

    def poison(self) -> None:
        """Overwrite the memory that the results will come to, where it is used again."""

    def go(self) -> Any:
        raise NotImplementedError

    def timed(self, devices: Sequence[torch.device]) -> tuple[float, Any]:
        """Return the seconds from idle devices to the end of ``go``, and what it returned."""
        synchronize(devices)
        begin = time.perf_counter()
        value = self.go()
        return time.perf_counter() - begin, value

    def results(self, value: Any) -> Tensors:
        """Return the results to be compared, from what ``go`` returned."""
        return list(value)

    def expected(self, plain: Tensors) -> Tensors:
        """Return what they must be; ``plain`` is what the table expects of every row."""
        return plain

    def close(self) -> None:
        """End threads, free what is nobody's."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        kind: ``limit`` (the longest of these is the limit), ``bound`` (does less than the work, to
            compare with), ``peer`` or ``ours``.
        rounds: no more than these; for what takes seconds.
    """

    name: str
    make: Callable[[], Way]
    kind: str = "peer"
    rounds: int | None = None


@dataclass
class Table:
    """Rows that do the same work, and what that work is.

    Attributes:
        devices: must be idle when the clock starts.
        change: gives the sources new content, for the round of this number.
        expected: what the results must be, bit for bit.
        check: looks at the results where there is nothing to compare them with. With neither of
            the two the rows check for themselves.
        against: what ratios are to: ``limit`` or ``best peer``.
        nbytes: bytes moved, for GB/s.
        count: items, for the time of each.
        warmups: rounds that are not counted.
        rounds: None: as asked for.
        calls: so many in each round, for what takes microseconds: a round's time is their median.
    """

    rows: list[Row]
    devices: list[torch.device]
    change: Callable[[int], None] = lambda _round: None
    expected: Callable[[], Tensors] | None = None
    check: Callable[[Tensors], None] | None = None
    against: str = "best peer"
    nbytes: int | None = None
    count: int | None = None
    warmups: int = 2
    rounds: int | None = None
    calls: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A table that is made when its turn comes, so that its memory is not held before."""

    title: str
    build: Callable[[], Table]
    tf32: bool = False


@dataclass(frozen=True)
class Setting:
    """What was asked for."""

    device: torch.device
    quick: bool
    rounds: int
    dtype: str | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"
