"""``streamlap bench tune``: measure this machine, and print the policy that suits it.

Each line of the table is a trial; what is chosen is the smallest setting that comes within a few
per cent of the best, because threads, slots and chunks beyond that only take from others.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from streamlap import _native
from streamlap.arguments import Progress
from streamlap.devices import cuda_reason
from streamlap.policy import KIB, MIB, Policy, for_machine, usable_cores
from streamlap.sizes import default_pinned_limit, format_size, memory_total

_CLOSE = 0.95
"""Of the best rate: what counts as good enough."""

_DESCRIPTION = """\
Measure what this machine's memory and its link to the GPU do, by threads and by sizes, and
print the call of streamlap.configure() that suits it. What needs a GPU is left out without
one, and keeps its default.
"""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One line of the table: what was tried, with which setting, at how many GB/s."""

    what: str
    setting: int
    rate: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """A value of the policy, and why."""

    name: str
    value: int
    why: str


@dataclasses.dataclass
class Tuning:
    """What was measured and chosen."""

    trials: list[Trial]
    choices: list[Choice]
    left_out: list[str]

    def line(self) -> str:
        """Return the call that sets it."""
        return f"streamlap.configure({', '.join(f'{c.name}={c.value}' for c in self.choices)})"


def add_parser(commands: Any) -> None:
    """Add the command to those of ``bench``."""
    parser = commands.add_parser(
        "tune",
        help="measure this machine, and print the policy that suits it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; does it work?")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Print what was measured, and the call."""
    found = tune(arguments.quick)
    print(as_json(found) if arguments.json else as_text(found))
    return 0


def tune(quick: bool = False) -> Tuning:
    """Measure, and choose.

    Args:
        quick: with sizes that say nothing about the machine.
    """
    show = Progress()
    # Large enough that no cache holds it; a sixteenth of the memory where that is little.
    size = 4 * MIB if quick else min(512 * MIB, max(4 * MIB, memory_total() // 16))
    rounds = 2 if quick else 5
    cores = usable_cores()
    usual = for_machine(cores, default_pinned_limit())
    counts = _doubling(cores)
    found = Tuning([], [], [])
    try:
        show.show("memory, copied by threads")
        copied = _measure(found, "memcpy", counts, size, rounds, _Memcpy(size).seconds)
        show.show("memory, made present by threads")
        populated = _measure(
            *(found, "populate", counts, size, rounds),
            lambda threads: _native.populate_seconds(size, threads),
        )
        reason = cuda_reason()
        if reason:
            found.left_out += [
                f"{what}: needs a GPU ({reason})"
                for what in ("registration", "copies by chunk", "staging by slot")
            ]
            wire = None
        else:
            show.show("copies from the GPU, by chunk")
            wire = _on_gpu(found, usual, size, rounds)
    finally:
        show.clear()
    # One core is left to the thread that issues.
    spare = {threads: rate for threads, rate in copied.items() if threads <= max(1, cores - 1)}
    _choose_threads(found, spare, populated, wire)
    return found


def _doubling(most: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 <= min(most, 16):
        counts.append(counts[-1] * 2)
    return counts


def _measure(
    found: Tuning,
    what: str,
    settings: Sequence[int],
    size: int,
    rounds: int,
    seconds: Callable[[int], float],
) -> dict[int, float]:
    """Return the rate of each setting, in GB/s; settings take turns, so a slow moment hits all."""
    samples: dict[int, list[float]] = {setting: [] for setting in settings}
    for _ in range(rounds):
        for setting in settings:
            samples[setting].append(seconds(setting))
    rates = {
        setting: size / max(statistics.median(taken), 1e-9) / 1e9
        for setting, taken in samples.items()
    }
    found.trials += [Trial(what, setting, rate) for setting, rate in rates.items()]
    return rates


class _Memcpy:
    """A copy of touched memory, cut into a piece for each thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._src = torch.ones(size, dtype=torch.uint8)
        self._dst = torch.ones(size, dtype=torch.uint8)

    def seconds(self, threads: int) -> float:
        piece = (self._size - 1) // threads + 1

        def copy(offset: int) -> None:  # memmove runs without the interpreter's lock
            count = min(piece, self._size - offset)
            ctypes.memmove(self._dst.data_ptr() + offset, self._src.data_ptr() + offset, count)

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: None, range(threads)))  # its threads are there
            begin = time.perf_counter()
            list(pool.map(copy, range(0, self._size, piece)))
            return time.perf_counter() - begin


def _on_gpu(found: Tuning, usual: Policy, size: int, rounds: int) -> float:
    """Measure the GPU's side and choose its sizes; return the rate of the wire in GB/s."""
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def by_chunk(chunk: int) -> float:
        offsets = range(0, size, chunk)
        pairs = [(target[at : at + chunk], source[at : at + chunk]) for at in offsets]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for to, start in pairs:
            to.copy_(start, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    chunks = [chunk for chunk in (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB) if chunk <= size]
    rates = _measure(found, "to host by chunk", chunks, size, rounds, by_chunk)
    wire = max(rates.values())
    chunk = _smallest(rates)
    found.choices.append(
        Choice("chunk_bytes", chunk, f"{rates[chunk]:.1f} of {wire:.1f} GB/s with such chunks")
    )
    _measure(found, "register", [size], size, rounds, lambda _: _register_seconds(size))
    slots = {slot: rate for slot, rate in rates.items() if slot <= usual.stage_slot_bytes}
    slot = _smallest(slots)
    found.choices.append(
        Choice("stage_slot_bytes", slot, f"{slots[slot]:.1f} GB/s, and it stays in the caches")
    )
    return wire


def _register_seconds(size: int) -> float:
    memory = torch.ones(size, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    begin = time.perf_counter()
    status = int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))
    taken = time.perf_counter() - begin
    if status != 0:
        return float("inf")  # refused: a rate of nothing
    runtime.cudaHostUnregister(memory.data_ptr())
    return taken


def _smallest(rates: dict[int, float]) -> int:
    best = max(rates.values())
    return min(setting for setting, rate in rates.items() if rate >= _CLOSE * best)


def _choose_threads(
    found: Tuning,
    copied: dict[int, float],
    populated: dict[int, float],
    wire: float | None,
) -> None:
    if wire is None:
        threads = _smallest(copied)
        why = f"memcpy: {copied[threads]:.1f} of {max(copied.values()):.1f} GB/s"
    else:
        enough = [threads for threads, rate in copied.items() if rate >= wire]
        threads = min(enough) if enough else _smallest(copied)
        why = f"memcpy: {copied[threads]:.1f} GB/s, the wire {wire:.1f}"
    found.choices.append(Choice("stage_threads", threads, why))
    threads = _smallest(populated)
    best = max(populated.values())
    found.choices.append(
        Choice("populate_threads", threads, f"{populated[threads]:.1f} of {best:.1f} GB/s")
    )


def as_json(found: Tuning) -> str:
    """Return everything as one JSON object."""
    return json.dumps(dataclasses.asdict(found) | {"configure": found.line()}, indent=2)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def as_text(found: Tuning) -> str:
    """Return the table, the choices with their reasons, and the call."""
    lines = [f"{'what':<18}{'setting':>12}{'GB/s':>8}"]
    for trial in found.trials:
        sized = trial.what in ("to host by chunk", "register")
        setting = format_size(trial.setting) if sized else _threads(trial.setting)
        lines.append(f"{trial.what:<18}{setting:>12}{trial.rate:>8.1f}")
    lines += [f"left out: {reason}" for reason in found.left_out]
    lines.append("")
    lines += [f"{choice.name} = {choice.value}: {choice.why}" for choice in found.choices]
    lines += ["", found.line()]
    return "\n".join(lines)
