"""Runs a table: every row once a round, checked in the first round and in the last."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import streamlap
from streamlap.devices import place_of
from streamlap.pinned import pool_for

from .checks import WrongResult, require_equal
from .rows import Planned, Row, Setting, Table, Unavailable, Way

Report = Callable[[str], None]

_LONGEST_REASON = 200
_PATH = re.compile(r"(?<![\w.])/(?:[^\s/'\"()]+/)*([^\s/'\"():,;]+)")


def run_table(planned: Planned, setting: Setting, report: Report) -> dict[str, Any]:
    """Measure one table; return it ready for JSON. What fails is in it, as a failed row."""
    with _matmul_precision(planned.tf32):
        try:
            table = planned.build()
        except Exception as error:
            table = Table([Row("set-up", _never)], [])
            run = _Run(table, setting.rounds)
            run.failed["set-up"] = reason_of(error)
        else:
            run = _Run(table, table.rounds or setting.rounds)
            run.measure(lambda line: report(f"{planned.title}: {line}"))
    found = {"title": planned.title, **run.as_json()}
    del run, table
    release(setting.device)
    return found


def _never() -> Way:
    raise AssertionError


def reason_of(error: BaseException) -> str:
    """Return an error in one line, without paths."""
    if isinstance(error, WrongResult):
        return f"wrong result: {error}"
    line = text = " ".join(str(error).split())
    if not isinstance(error, Unavailable):
        line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return _PATH.sub(r"\1", line)[:_LONGEST_REASON]


def release(device: torch.device) -> None:
    """Give back what a table used: its pinned memory would stand in the way of the next."""
    gc.collect()
    with contextlib.suppress(streamlap.StreamlapError, RuntimeError):
        pool_for(place_of(device)).trim()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            if hasattr(torch._C, "_host_emptyCache"):
                torch._C._host_emptyCache()
    cupy = sys.modules.get("cupy")
    if cupy is not None and device.type == "cuda":
        with contextlib.suppress(Exception):  # its rows have failed then, and said why
            cupy.get_default_memory_pool().free_all_blocks()
            cupy.get_default_pinned_memory_pool().free_all_blocks()


@contextlib.contextmanager
def _matmul_precision(tf32: bool) -> Iterator[None]:
    with warnings.catch_warnings():
        # Newer versions of torch point to a newer name for it, and libraries have more to say:
        # what matters is a failed row.
        warnings.simplefilter("ignore")
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


class _Run:
    def __init__(self, table: Table, rounds: int) -> None:
        self.table = table
        self.rounds = rounds
        self.ways: dict[str, Way] = {}
        self.samples: dict[str, list[float]] = {row.name: [] for row in table.rows}
        self.checks: dict[str, int] = {row.name: 0 for row in table.rows}
        self.failed: dict[str, str] = {}

    def measure(self, report: Report) -> None:
        try:
            for row in self.table.rows:
                report(f"set-up: {row.name}")
                with self._failing(row):
                    self.ways[row.name] = row.make()
            last = self.table.warmups + self.rounds
            for index in range(last):
                if not self._change(index):
                    return
                # Another order each time: no row always runs in the wake of the same one.
                order = list(self.table.rows)
                random.Random(index).shuffle(order)
                gc.collect()
                for row in order:
                    report(f"round {index + 1} of {last}: {row.name}")
                    if row.name not in self.failed:
                        with self._failing(row):
                            self._once(row, index)
        finally:
            for row in self.table.rows:
                if row.name in self.ways:
                    with self._failing(row):
                        self.ways[row.name].close()

    def _change(self, index: int) -> bool:
        """Give the sources new content; where that fails, as on a lost device, every row has."""
        try:
            self.table.change(index)
        except Exception as error:
            for row in self.table.rows:
                self.failed.setdefault(row.name, f"before round {index + 1}: {reason_of(error)}")
            return False
        return True

    @contextlib.contextmanager
    def _failing(self, row: Row) -> Iterator[None]:
        """Turn an exception into a failed row; the others go on."""
        try:
            yield
        except Exception as error:
            self.failed.setdefault(row.name, reason_of(error))

    def _once(self, row: Row, index: int) -> None:
        table, way = self.table, self.ways[row.name]
        rounds = min(row.rounds or self.rounds, self.rounds)
        counted = index - table.warmups
        if counted >= rounds or (row.rounds and 0 < index < table.warmups):
            return
        by_itself = table.expected is None and table.check is None
        checked = index == 0 or counted == rounds - 1 or by_itself
        if checked:
            way.poison()
        way.before()
        times = []
        for _ in range(table.calls):
            seconds, value = way.timed(table.devices)
            times.append(seconds)
        if checked:
            # Computed anew for each row: fifty products on a device are not held for longer.
            if table.expected is not None:
                require_equal(way.results(value), way.expected(table.expected()))
            elif table.check is not None:
                table.check(way.results(value))
            self.checks[row.name] += 1
        if counted >= 0:
            self.samples[row.name].append(statistics.median(times))

    # -- figures

    def as_json(self) -> dict[str, Any]:
        table = self.table
        rows = [self._row(row) for row in table.rows]
        reference = _reference(rows, table.against)
        for row in rows:
            seconds = row["seconds"]
            row["ratio"] = seconds / reference if seconds and reference else None
        return {
            "against": table.against,
            "reference_seconds": reference,
            "rounds": self.rounds,
            "bytes": table.nbytes,
            "count": table.count,
            "settings": table.settings,
            "rows": rows,
        }

    def _row(self, row: Row) -> dict[str, Any]:
        failed = self.failed.get(row.name)
        samples = [] if failed else self.samples[row.name]
        found: dict[str, Any] = {"row": row.name, "kind": row.kind, "failed": failed}
        found |= {"seconds": None, "min": None, "q1": None, "q3": None, "max": None}
        found |= {"gbps": None, "us_each": None}
        if samples:
            seconds = statistics.median(samples)
            q1, _, q3 = (
                statistics.quantiles(samples, method="inclusive")
                if len(samples) > 1
                else samples * 3
            )
            found |= {"seconds": seconds, "min": min(samples), "max": max(samples)}
            found |= {"q1": q1, "q3": q3}
            if self.table.nbytes:
                found["gbps"] = self.table.nbytes / seconds / 1e9
            if self.table.count:
                found["us_each"] = seconds / self.table.count * 1e6
        counts = {"rounds": len(samples), "checks": self.checks[row.name]}
        return found | counts | {"samples": samples}


def _reference(rows: list[dict[str, Any]], against: str) -> float | None:
    """Return the limit, or the time of the best peer; None where that was not measured."""
    if against == "limit":
        limits = [row["seconds"] for row in rows if row["kind"] == "limit"]
        return None if None in limits or not limits else max(limits)
    return min(
        (row["seconds"] for row in rows if row["kind"] == "peer" and row["seconds"]), default=None
    )
