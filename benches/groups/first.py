"""The first call of a process, when no pinned memory is there yet."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..rows import Planned, Row, Setting, Table, Unavailable, Way
from .job import shape

TITLE = "The first call"
ABOUT = (
    "The job as the first of its kind in a fresh process: CUDA is up and one product has been "
    "computed, but no page-locked memory is there. Every way allocates its own, inside the clock. "
    "Each sample is a process."
)
NOT_ON_CPU = "there is no memory to lock"

ROUNDS = 3  # a process takes seconds to start
_SUITE = Path(__file__).resolve().parent.parent
_LIMIT_S = 300


class FreshProcess(Way):
    """Runs one way in a process of its own, which measures and checks it."""

    def __init__(self, name: str, setting: Setting, dtype: str) -> None:
        size, n = shape(setting)
        self.request: dict[str, Any] = {
            "way": name,
            "device": str(setting.device),
            "size": size,
            "n": n,
            "dtype": dtype,
        }

    def timed(self, devices: Sequence[torch.device]) -> tuple[float, Any]:
        module = f"{_SUITE.name}.first_child"
        paths = os.pathsep.join([str(_SUITE.parent), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(self.request)],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env=os.environ | {"PYTHONPATH": paths},
        )
        lines = done.stdout.splitlines()
        if not lines:
            said = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
            raise Unavailable(f"the process ended with status {done.returncode}: {said}")
        answer = json.loads(lines[-1])
        if answer["failed"]:
            raise Unavailable(answer["failed"])
        return answer["seconds"], None


def _touch_memory(nbytes: int) -> None:
    """Touch as much memory as a process will take.

    A virtual machine may get its memory from its host only when touched: the first process would
    pay for all.
    """
    block = torch.empty(nbytes, dtype=torch.uint8)
    block.fill_(1)


def plan(setting: Setting) -> list[Planned]:
    size, n = shape(setting)
    dtype = setting.dtype or "fp32"
    names = {
        "stock non_blocking": "peer",
        "side stream by hand": "peer",
        "CuPy by hand": "peer",
        "pipelined_run": "ours",
        "pipelined_run(pin=False)": "ours",
    }

    def build() -> Table:
        # A process may find the size of its memory rounded up to a power of two.
        _touch_memory(2 * n * size * size * 4)
        rows = [
            Row(name, functools.partial(FreshProcess, name, setting, dtype), kind)
            for name, kind in names.items()
        ]
        return Table(
            rows,
            [],
            warmups=0,
            rounds=1 if setting.quick else min(ROUNDS, setting.rounds),
            settings={"size": size, "n": n, "dtype": dtype},
        )

    return [Planned(f"{n} products of {size}x{size}, {dtype}, in a fresh process", build)]
