"""Sizes in bytes, as ints or as strings like ``"2GiB"``, and how much memory there is to share."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from streamlap.checks import as_count
from streamlap.errors import InvalidArgument

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_size(size: int | str, what: str = "size") -> int:
    """Return ``size`` in bytes.

    Args:
        size: bytes as an int, or a string: a number and B, KB, MB, GB, TB (powers of 1000) or
            KiB, MiB, GiB, TiB (powers of 1024); case does not matter.
        what: what the size is of, for the error.

    Raises:
        InvalidArgument: negative, or a string that is none of these.
        InvalidType: neither int nor str.
    """
    if not isinstance(size, str):
        return as_count(size, what)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", size)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InvalidArgument(
            f"{what} {size!r} is no size: write a number and B, KiB, MiB, GiB, TiB, KB, MB, "
            "GB or TB, like '512MiB'"
        )
    number = float(match[1]) if "." in match[1] else int(match[1])
    return as_count(int(number * unit), what)


def format_size(size: float) -> str:
    """Return ``size`` bytes for people: ``'61.0 MiB'``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_total(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory this process may use: the machine's, or its cgroup's if less."""
    text = (proc / "meminfo").read_text()
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        raise OSError("no MemTotal in meminfo")
    total = int(match[1]) * 1024
    group = cgroup
    # Without version 2 of cgroups, or if it cannot be seen, the root's files say what there is.
    with contextlib.suppress(OSError, IndexError):
        group = cgroup / (proc / "self/cgroup").read_text().split("0::/", 1)[1].split("\n")[0]
    while True:
        for name in ("memory.max", "memory/memory.limit_in_bytes"):
            try:
                value = (group / name).read_text().strip()
            except OSError:
                continue
            if value.isdigit():
                total = min(total, int(value))
        if group == cgroup or cgroup not in group.parents:
            return total
        group = group.parent


def default_pinned_limit() -> int:
    """Return the limit of a pinned pool that was given none.

    A quarter of the memory, divided by the number of processes of this job on this machine
    (``LOCAL_WORLD_SIZE``, which torchrun sets); ``STREAMLAP_PINNED_LIMIT`` overrides it.
    """
    given = os.environ.get("STREAMLAP_PINNED_LIMIT")
    if given:
        return parse_size(given, "STREAMLAP_PINNED_LIMIT")
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return memory_total() // 4 // max(1, int(processes) if processes.isdecimal() else 1)
