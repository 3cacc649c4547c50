"""The bench binary's results as a part of ``docs/performance.md``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .table import seconds

ORDER = ("bandwidth", "overlap", "small", "pool")
ABOUT = {
    "bandwidth": "Copies of one size: page-locked ones behind a gate, ordinary ones by the clock.",
    "overlap": "The job in C++ with cuBLAS, from an idle device until all results are on the host.",
    "small": "Many small tensors to the host; *device*: behind a gate, *wall*: the caller's.",
    "pool": "What page-locked memory costs, by the way it is made, and what a block's reuse costs.",
}
_HIDDEN = {"unit", "samples", "median", "min", "max", "device"}


def lines(folder: Path) -> list[str]:
    """Return the page's part; nothing where there are no results."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not found:
        return []
    page = [
        "## The bench binary",
        "",
        "`streamlap-bench`, built by `make bench-binary`, measures the core library without "
        "Python. Medians, with the least and the greatest sample; every row's bytes were checked.",
        "",
    ]
    for document in sorted(found, key=_place):
        page += _mode(document)
    return page


def _place(document: dict[str, Any]) -> tuple[int, str]:
    return ORDER.index(document["mode"]), json.dumps(document["machine"], sort_keys=True)


def _mode(document: dict[str, Any]) -> list[str]:
    machine = document["machine"]
    where = ", ".join(gpu["name"] for gpu in machine["gpus"]) or machine["cpu"]
    settings = ", ".join(f"{name} {value}" for name, value in document["settings"].items())
    page = [f"### {document['mode']}, {where}", "", f"{ABOUT[document['mode']]} ({settings})", ""]
    columns: list[str] = []
    for row in document["rows"]:
        shown = [key for key in row if key not in _HIDDEN]
        if shown != columns:
            columns = shown
            page += ["", f"| {' | '.join([*columns, 'median', 'min', 'max'])} |"]
            page.append(f"|{'---|' * len(columns)}---:|---:|---:|")
        cells = [_cell(key, row[key]) for key in columns]
        times = [_figure(row[key], row["unit"]) for key in ("median", "min", "max")]
        page.append(f"| {' | '.join([*cells, *times])} |")
    return [line for i, line in enumerate(page) if line or page[i - 1]] + [""]


def _cell(key: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int) and key in ("size", "block", "bytes"):
        step = value >> 10
        return f"{step >> 10} MiB" if step >= 1024 else f"{step} KiB"
    return "" if value is None else str(value)


def _figure(value: float, unit: str) -> str:
    return seconds(value) if unit == "s" else f"{value:.2f} {unit}"
