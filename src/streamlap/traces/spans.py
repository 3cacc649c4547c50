"""What a timeline is made of: plain data, no runtime behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["compute", "copy", "staging", "growth", "wait"]


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        kind: ``compute`` (a call of ``fn``, or a range of the user's), ``copy``, ``staging`` (a
            last step after a copy), ``growth`` (a pool asks the system for memory), or ``wait``
            (a stream or a thread that waits for another).
        name: what it was, in words.
        lane: the stream or thread it was on: ``cuda:0 compute``, ``cuda:0 to host``,
            ``thread MainThread``.
        begin, end: seconds since the timeline began.
        nbytes: bytes copied or asked for; 0 where it makes no sense.
        device: ``cuda:0``, ``cpu:1``; empty for threads.
        waits_for: of a wait: the lane or the thing waited for.
        path: of a copy: how it was made (see ``Transfer.stats``).
    """

    kind: Kind
    name: str
    lane: str
    begin: float
    end: float
    nbytes: int = 0
    device: str = ""
    waits_for: str = ""
    path: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


Interval = tuple[float, float]


def union(spans: list[Span]) -> list[Interval]:
    """Return the times at which at least one of ``spans`` was running, in order, disjoint."""
    merged: list[Interval] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def both(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the times that two disjoint, ordered lists have in common."""
    common = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: list[Interval]) -> float:
    """Return the seconds in a list of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes as people read them: a device's compute, its copies, then the threads."""
    order = ("compute", "to host", "to device", "worker")

    def key(pair: tuple[str, str]) -> tuple[bool, str, int, str]:
        device, lane = pair
        kind = lane.removeprefix(f"{device} ")
        rank = next((i for i, start in enumerate(order) if kind.startswith(start)), len(order))
        return not device, device, rank, lane

    return [lane for _, lane in sorted({(span.device, span.lane) for span in spans}, key=key)]
