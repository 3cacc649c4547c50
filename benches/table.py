"""The tables, for a terminal."""

from __future__ import annotations

from typing import Any

from streamlap.sizes import format_size


def seconds(value: float) -> str:
    """Return a time with a unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value * scale >= 1:
            return f"{value * scale:.3f} {unit}"
    return f"{value * 1e6:.2f} us"


def rate_heading(table: dict[str, Any]) -> str:
    return "GB/s" if table["bytes"] else "us each" if table["count"] else ""


def rate(table: dict[str, Any], row: dict[str, Any]) -> str:
    """Return GB/s, or the time of each item; nothing for a row that moves no bytes to the host."""
    if row["row"] == "compute alone":
        return ""
    if table["bytes"]:
        return f"{row['gbps']:.2f}"
    return f"{row['us_each']:.2f}" if table["count"] else ""


def ratio(row: dict[str, Any]) -> str:
    return "-" if row["ratio"] is None else f"{row['ratio']:.3f}"


def header(document: dict[str, Any]) -> list[str]:
    """Return the machine and the versions, a line each."""
    machine, versions = document["machine"], document["versions"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {format_size(machine['memory_bytes'])}"
    if machine["gpus"]:
        driver = f", driver {machine['driver']}" if machine["driver"] else ""
        pcie = machine["pcie"]
        link = f", PCIe Gen{pcie['gen']} x{pcie['width']}" if pcie else ""
        hardware = f"{machine['kind']}{link}{driver}; {hardware}"
    names = ["streamlap", "torch", "cuda", "cupy", "numpy", "python"]
    software = ", ".join(f"{name} {versions[name]}" for name in names if versions[name])
    return [hardware, software]


def commit(document: dict[str, Any]) -> str:
    """Return the short commit, and whether there were changes to it."""
    dirty = " with changes" if document["dirty"] else ""
    return f"commit {document['commit'][:7]}{dirty}"


def as_text(document: dict[str, Any]) -> str:
    rounds = document["settings"]["rounds"]
    plural = "" if rounds == 1 else "s"
    lines = [
        *header(document),
        f"{commit(document)}; medians of {rounds} round{plural}, rows interleaved",
        *[f"note: {note}" for note in document["notes"]],
        "x limit: the time, divided by the longer of compute alone and copy alone",
        "x best peer: divided by the time of the fastest row that is not streamlap's",
    ]
    for table in document["tables"]:
        lines += ["", *_table(table, rounds)]
    return "\n".join(lines)


def _table(table: dict[str, Any], rounds: int) -> list[str]:
    width = max(28, *(len(row["row"]) for row in table["rows"]))
    against = f"x {table['against']}"
    headings = f"{'median':>12}{'min':>12}{'max':>12}{rate_heading(table):>10}{against:>13}"
    lines = [f"{table['group']}: {table['title']}", f"  {'':<{width}}{headings}"]
    for row in table["rows"]:
        if row["failed"]:
            lines.append(f"  {row['row']:<{width}}  FAILED: {row['failed']}")
            continue
        times = "".join(f"{seconds(row[name]):>12}" for name in ("seconds", "min", "max"))
        fewer = f"  ({len(row['samples'])} rounds)" if len(row["samples"]) < rounds else ""
        figures = f"{rate(table, row):>10}{ratio(row):>13}"
        lines.append(f"  {row['row']:<{width}}{times}{figures}{fewer}")
    return lines
