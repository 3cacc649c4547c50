"""What a timeline says: how much overlapped, who was idle, who waited, and what would help."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamlap.sizes import format_size
from streamlap.traces.spans import Interval, Span, both, length, union

_LEAST_GAP = 20e-6  # seconds; what any two operations have between them is no gap
_MUCH = 0.1  # of the whole time: a part that is worth a word
_FAR = 1.15  # x the limit: from here on something stood still that need not


@dataclass(frozen=True)
class Idle:
    """When a stream had nothing to do, between its first work and its last.

    Attributes:
        lane: the stream.
        gaps: how many times it stood still for more than 20 us.
        seconds: all of them together.
        longest: the longest one, in seconds.
    """

    lane: str
    gaps: int
    seconds: float
    longest: float


@dataclass(frozen=True)
class Summary:
    """The figures of a timeline; ``str()`` is the text for people.

    Attributes:
        seconds: from the first work on a stream to the end of the last.
        compute_seconds, copy_seconds: how long at least one call, or one copy, was running; the
            most that any device has.
        limit: the longer of the two: no overlap makes it shorter.
        overlap_fraction: the time at which a device computed and copied at once, over the shorter
            of its two; all devices together. 1 is all that can be hidden; NaN where there is
            nothing to hide.
        copied_bytes: by all copies.
        growth_seconds: threads waited so long for the system's memory.
        idle: one entry a stream.
        waits: seconds by (who waited, for whom).
        advice: one line.
    """

    seconds: float
    compute_seconds: float
    copy_seconds: float
    limit: float
    overlap_fraction: float
    copied_bytes: int
    growth_seconds: float
    idle: list[Idle] = field(default_factory=list)
    waits: dict[tuple[str, str], float] = field(default_factory=dict)
    advice: str = ""

    @property
    def over_limit(self) -> float:
        """The time over the limit; NaN where nothing ran."""
        return self.seconds / self.limit if self.limit else float("nan")

    def headline(self) -> str:
        """Return the figures in one line."""
        if not self.limit:
            return "nothing was recorded"
        line = f"{self.seconds:.4f} s, {self.over_limit:.3f} x the limit"
        if self.overlap_fraction == self.overlap_fraction:
            one_by_one = self.compute_seconds + self.copy_seconds
            line += f" ({one_by_one:.4f} s one by one, {self.overlap_fraction:.1%} hidden)"
        return line

    def __str__(self) -> str:
        if not self.limit:
            return f"{self.headline()}\n{self.advice}"
        lines = [
            self.headline(),
            f"  compute {self.compute_seconds:.4f} s, copies {self.copy_seconds:.4f} s "
            f"({format_size(self.copied_bytes)})",
        ]
        if self.growth_seconds:
            lines.append(f"  page-locked memory from the system: {self.growth_seconds:.4f} s")
        for idle in self.idle:
            if idle.gaps:
                lines.append(
                    f"  {idle.lane} stood still {idle.gaps} times, {idle.seconds:.4f} s in all, "
                    f"{idle.longest:.4f} s at most"
                )
        for (who, whom), seconds in sorted(self.waits.items(), key=lambda item: -item[1]):
            lines.append(f"  {who} waited {seconds:.4f} s for {whom}")
        return "\n".join([*lines, self.advice])


def summarize(spans: Iterable[Span]) -> Summary:
    """Return the summary of spans. Pure arithmetic."""
    by_device: dict[str, list[Span]] = defaultdict(list)
    by_lane: dict[str, list[Span]] = defaultdict(list)
    waits: dict[tuple[str, str], float] = defaultdict(float)
    growth = 0.0
    for span in spans:
        if span.kind == "wait":
            waits[span.lane, span.waits_for] += span.seconds
        elif span.kind == "growth":
            growth += span.seconds
        else:
            by_device[span.device].append(span)
            by_lane[span.lane].append(span)
    compute = {device: union(_of(own, "compute")) for device, own in by_device.items()}
    copying = {device: union(_of(own, "copy", "staging")) for device, own in by_device.items()}
    copies = [span for own in by_device.values() for span in _of(own, "copy")]
    work = [span for own in by_device.values() for span in own]
    seconds = max((s.end for s in work), default=0.0) - min((s.begin for s in work), default=0.0)
    longest_compute = max(map(length, compute.values()), default=0.0)
    longest_copy = max(map(length, copying.values()), default=0.0)
    hidden = sum(length(both(compute[device], copying[device])) for device in by_device)
    possible = sum(min(length(compute[device]), length(copying[device])) for device in by_device)
    fraction = hidden / possible if possible else float("nan")
    return Summary(
        seconds=seconds,
        compute_seconds=longest_compute,
        copy_seconds=longest_copy,
        limit=max(longest_compute, longest_copy),
        overlap_fraction=fraction,
        copied_bytes=sum(span.nbytes for span in copies),
        growth_seconds=growth,
        idle=[_idle(lane, union(own)) for lane, own in sorted(by_lane.items())],
        waits=dict(waits),
        advice=_advice(seconds, longest_compute, longest_copy, growth, copies, dict(waits)),
    )


def overlap(spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """Return when each device computed and copied at once."""
    by_device: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in ("compute", "copy", "staging"):
            by_device[span.device].append(span)
    return {
        device: both(union(_of(own, "compute")), union(_of(own, "copy", "staging")))
        for device, own in by_device.items()
    }


def _of(spans: list[Span], *kinds: str) -> list[Span]:
    return [span for span in spans if span.kind in kinds]


def _idle(lane: str, busy: list[Interval]) -> Idle:
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(busy)]
    gaps = [gap for gap in gaps if gap > _LEAST_GAP]
    return Idle(lane, len(gaps), sum(gaps), max(gaps, default=0.0))


def _advice(
    seconds: float,
    compute: float,
    copy: float,
    growth: float,
    copies: list[Span],
    waits: dict[tuple[str, str], float],
) -> str:
    """Say the one thing that would help most; the first that applies."""
    over_limit = seconds / max(compute, copy) if compute or copy else 0.0
    if not compute and not copy:
        return "advice: nothing of streamlap ran in the block; mark your own work with tl.range()"
    if growth > _MUCH * seconds:
        return (
            f"advice: cold pool: {growth:.3f} s went into page-locked memory; results that are "
            "dropped give it back to the next call, or pass out="
        )
    ordinary = sum(span.seconds for span in copies if span.path == "staged")
    if ordinary > _MUCH * seconds:
        return (
            f"advice: ordinary memory: {ordinary:.3f} s of copies to or from pages that are not "
            "locked; use pin=None or empty_pinned() for the host's side"
        )
    if not copy:
        return "advice: only compute was recorded: there is no copy to hide"
    if not compute:
        return "advice: only copies were recorded: mark your own work with tl.range() to see both"
    if over_limit > _FAR:
        most = max(waits, key=lambda pair: waits[pair]) if waits else None
        why = f"; {most[0]} waited {waits[most]:.3f} s for {most[1]}" if most else ""
        return (
            f"advice: {over_limit:.2f} x the limit: compute and copies took turns, or both stood "
            f"still{why}; start copies earlier (pipelined_run, pipelined_map, to_cpu), or give "
            "them larger pieces of work"
        )
    if copy > compute:
        return (
            "advice: copy-bound: the wire is the limit; fewer bytes help (dtype=torch.bfloat16, "
            "fewer results), a faster fn does not"
        )
    return (
        "advice: compute-bound: the copies are hidden; only a faster fn helps (TF32, bfloat16, a "
        "smaller problem)"
    )
