"""Rows that take turns, for the benches of training loops: medians, peaks and results."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .limit import synchronize
from .rows import Unavailable
from .runner import reason_of


@dataclass
class Turn:
    """A row.

    Attributes:
        go: does the work; returns what must be the same in all rows that are checked.
        checked: whether it is compared with the first row's.
        moved: bytes that one ``go`` moved to or from the host, asked for after the last; None: not
            known.
    """

    name: str
    go: Callable[[], Any]
    checked: bool = True
    moved: Callable[[], int] | None = None
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    failed: str = ""


def missing(name: str, reason: str) -> Turn:
    """Return the row of a peer that is not there."""

    def go() -> None:
        raise Unavailable(f"missing: {reason}")

    return Turn(name, go)


def arguments(doc: str, given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    default = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"(default: {default})")
    parser.add_argument("--rounds", type=int, default=None, help="(default: 9; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work?")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    found = parser.parse_args(given)
    found.device = torch.device(found.device)
    found.rounds = found.rounds or (3 if found.quick else 9)
    return found


def take_turns(rows: list[Turn], device: torch.device, rounds: int, warmups: int = 2) -> None:
    """Run every row once a round; what fails is left out from then on."""
    expected: Any = None
    for index in range(warmups + rounds):
        for row in rows:
            if row.failed:
                continue
            gc.collect()
            synchronize([device])
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            begin = time.perf_counter()
            try:
                value = row.go()
                synchronize([device])
            except Exception as error:
                row.failed = reason_of(error)
                continue
            seconds = time.perf_counter() - begin
            if row is rows[0]:
                expected = value
            elif row.checked and value != expected:
                row.failed = "wrong result"
            if index >= warmups:
                row.seconds.append(seconds)
                if device.type == "cuda":
                    row.peak = max(row.peak, torch.cuda.max_memory_allocated(device))


def report(rows: list[Turn], as_json: bool) -> int:
    """Print the rows; the status is 1 if one failed for another reason than that it is missing."""
    found = []
    for row in rows:
        moved = row.moved() if row.moved and not row.failed else None
        seconds = statistics.median(row.seconds) if row.seconds and not row.failed else None
        entry = {"row": row.name, "seconds": seconds, "peak_bytes": row.peak or None}
        found.append(entry | {"moved_bytes": moved, "failed": row.failed or None})
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{'':40}{'median ms':>12}{'x first':>9}{'peak MB':>10}{'moved MB':>10}")
        first = found[0]["seconds"]
        for entry in found:
            if entry["failed"]:
                print(f"{entry['row']:40}  {entry['failed']}")
                continue
            ratio = f"{entry['seconds'] / first:9.3f}" if first else f"{'-':>9}"
            sizes = [entry["peak_bytes"], entry["moved_bytes"]]
            columns = "".join(f"{'-' if n is None else f'{n / 1e6:.1f}':>10}" for n in sizes)
            print(f"{entry['row']:40}{entry['seconds'] * 1e3:12.3f}{ratio}{columns}")
    wrong = [row for row in rows if row.failed and not row.failed.startswith("missing")]
    return 1 if wrong else 0
