"""The suite: chooses groups, runs their tables, and keeps what was measured."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from streamlap.devices import cuda_reason
from streamlap.errors import InvalidArgument

from . import machine
from .groups import GROUPS
from .progress import Progress
from .rows import Planned, Setting
from .runner import run_table
from .work import DTYPES

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
ROUNDS = 9
_QUICK_ROUNDS = 3


def setting(device: str | None, dtype: str | None, rounds: int | None, quick: bool) -> Setting:
    """Return what to run with.

    Raises:
        InvalidArgument: a device or dtype that this machine does not have.
    """
    reason = cuda_reason()
    if device is None:
        device = "cpu" if reason else "cuda:0"
    if not re.fullmatch(r"cpu|cuda:\d{1,3}", device):
        raise InvalidArgument(f"--device {device!r} is unknown; write cpu or cuda:0")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgument(f"--dtype {dtype!r} is unknown; write {', '.join(DTYPES)}")
    chosen = torch.device(device)
    if chosen.type == "cuda":
        if reason:
            raise InvalidArgument(f"no GPU can be used ({reason}); use --device cpu")
        if chosen.index >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise InvalidArgument(f"there is no {device}; the last GPU is cuda:{last}")
        torch.cuda.set_device(chosen)
    elif dtype == "tf32":
        raise InvalidArgument("a CPU has no TF32; use --dtype fp32 or bf16")
    return Setting(chosen, quick, rounds or (_QUICK_ROUNDS if quick else ROUNDS), dtype)


def choose(chosen: Setting, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the groups to run, and notes on those that are left out. No names: all.

    Raises:
        InvalidArgument: a name that is none, or a group that cannot run here.
    """
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise InvalidArgument(f"--group {unknown[0]!r} is unknown; write {', '.join(GROUPS)}")
    groups, notes = [], []
    for name in GROUPS:
        if names and name not in names:
            continue
        reason = _why_not(name, chosen)
        if reason and names:
            raise InvalidArgument(f"--group {name} cannot run on {chosen.device}: {reason}")
        if reason:
            notes.append(f"{name} is left out on {chosen.device}: {reason}")
        else:
            groups.append(name)
    return groups, notes


def _why_not(name: str, chosen: Setting) -> str:
    if not chosen.on_gpu:
        return GROUPS[name].NOT_ON_CPU
    if name == "two_gpus" and torch.cuda.device_count() < 2:
        return "it needs two GPUs, and there is one"
    return ""


def measure(chosen: Setting, names: Sequence[str]) -> dict[str, Any]:
    """Run the groups; return everything that was measured, ready for JSON."""
    groups, notes = choose(chosen, names)
    if not chosen.on_gpu:
        notes.insert(
            0,
            "no GPU takes part: the tables have what means something on a CPU, at small sizes, and "
            "say nothing about a GPU",
        )
    else:
        notes.insert(0, "blocking rows and fresh processes take seconds each and run fewer rounds")
    planned: list[tuple[str, Planned]] = [
        (name, table) for name in groups for table in GROUPS[name].plan(chosen)
    ]
    if chosen.on_gpu:
        torch.cuda.init()
    progress = Progress(len(planned))
    tables = []
    try:
        for name, table in planned:

            def report(line: str, name: str = name) -> None:
                progress.show(f"{name}: {line}")

            tables.append({"group": name, **run_table(table, chosen, report)})
            progress.step()
    finally:
        progress.clear()
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine.machine(chosen.device),
        "versions": machine.versions(chosen.device),
        **machine.commit(FOLDER),
        "settings": {
            "device": str(chosen.device),
            "groups": list(names) or "all",
            "dtype": chosen.dtype,
            "rounds": chosen.rounds,
            "quick": chosen.quick,
        },
        "notes": notes,
        "tables": tables,
    }


def failures(document: dict[str, Any]) -> list[str]:
    """Return a line for each failed row."""
    return [
        f"{table['group']}: {table['title']}: {row['row']}: {row['failed']}"
        for table in document["tables"]
        for row in table["rows"]
        if row["failed"]
    ]


def save(document: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write the document to a file named for the time, the machine and the commit.

    A run of a part is named for it too, so that it replaces no whole one.
    """
    settings = document["settings"]
    when = document["date"][:10] + "-" + document["date"][11:19].replace(":", "")
    parts = [when, _slug(document["machine"]["kind"]), document["commit"][:7]]
    parts += settings["groups"] if settings["groups"] != "all" else []
    parts += [settings["dtype"]] if settings["dtype"] else []
    parts += ["quick"] if settings["quick"] else []
    require_folder(folder)
    path = folder / f"{'-'.join(parts)}.json"
    beside = path.with_suffix(".part")  # a run that is stopped leaves no half of a file
    beside.write_text(as_json(document) + "\n")
    beside.replace(path)
    return path


def require_folder(folder: Path = RESULTS) -> None:
    """Make the folder; raise InvalidArgument where nothing can be kept in it."""
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidArgument(
            f"nothing can be kept in {folder.parent.name}/{folder.name}: make it a folder that can "
            "be written, or pass --no-save"
        )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def as_json(document: dict[str, Any]) -> str:
    """Return the document as JSON."""
    return json.dumps(document, indent=1)
