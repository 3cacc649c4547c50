"""Spans as a trace in the Chrome format, which Perfetto reads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from os import PathLike
from typing import Any

from streamlap.errors import InvalidArgument
from streamlap.traces.files import replace
from streamlap.traces.spans import Span, lanes_of


def events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the trace's events: a process a device, a thread a lane, times in microseconds.

    The format is that of "Trace Event Format" (Google, complete events, ``ph: X``).
    """
    devices = sorted({_process(span) for span in spans})
    lanes = lanes_of(spans)
    found: list[dict[str, Any]] = []
    for number, device in enumerate(devices):
        found.append(_named("process_name", number, None, device))
    homes = {span.lane: _process(span) for span in spans}
    for position, lane in enumerate(lanes):
        number = devices.index(homes[lane])
        found.append(_named("thread_name", number, position, lane))
        found.append(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "pid": number,
                "tid": position,
                "args": {"sort_index": position},
            }
        )
    for span in spans:
        arguments = {"bytes": span.nbytes, "path": span.path, "waits_for": span.waits_for}
        found.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": devices.index(_process(span)),
                "tid": lanes.index(span.lane),
                "ts": span.begin * 1e6,
                "dur": span.seconds * 1e6,
                "args": {name: value for name, value in arguments.items() if value},
            }
        )
    return found


def save(spans: Sequence[Span], path: str | PathLike[str]) -> None:
    """Write the trace; see ``Timeline.save``."""
    name = os.fsdecode(path)
    if not name.lower().endswith(".json"):
        raise InvalidArgument(f"a trace is a .json file, not {name!r}")
    text = json.dumps({"traceEvents": events(spans), "displayTimeUnit": "ms"})
    replace(name, text.encode())


def _process(span: Span) -> str:
    return span.device or "threads"


def _named(what: str, pid: int, tid: int | None, name: str) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "name": what, "pid": pid, "args": {"name": name}}
    if tid is not None:
        event["tid"] = tid
    return event
