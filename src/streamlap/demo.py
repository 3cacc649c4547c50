"""``streamlap demo``: many products and their way to the host, done in several ways."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from streamlap import experiment
from streamlap.arguments import Progress, count, device, positive
from streamlap.devices import devices
from streamlap.experiment import Group, Measured, Outcome, Plan
from streamlap.info import versions
from streamlap.pinned import pool_stats
from streamlap.prediction import MACHINES, predict
from streamlap.sizes import format_size, memory_total
from streamlap.ways import LIMIT_ROWS, WHOLE_ROWS

_DESCRIPTION = """\
Compute x.mm(x) n times and bring all results to the host, by stock PyTorch and by
streamlap, and compare each with the limit: the longer of compute alone and copy alone.
"""
_EXAMPLES = """\
examples:
  streamlap demo                            all GPUs; without one, two logical CPU devices
  streamlap demo --device cuda:0 --dtype bf16
  streamlap demo --device cpu --size 512 --n 20
  streamlap demo --json > demo.json
  streamlap demo --simulate h200            what an H200 would do, without one
"""


_PREDICTED_SIZE = 4000  # whose products were measured


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="compare pipelined_run with stock PyTorch on this machine",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--size",
        type=positive,
        metavar="N",
        help="rows and columns of x (default: by the machine)",
    )
    parser.add_argument(
        "--n", type=count, default=50, metavar="N", help="products per device (default: 50)"
    )
    parser.add_argument(
        "--device", type=device, default="all", help="all, cpu or cuda:N (default: all)"
    )
    parser.add_argument(
        "--dtype",
        choices=list(experiment.DTYPES),
        help="(default: fp32 and tf32 on a GPU, fp32 on a CPU)",
    )
    parser.add_argument(
        "--repeat", type=count, metavar="N", help="rounds (default: 9, fewer on many devices)"
    )
    parser.add_argument(
        "--simulate",
        choices=list(MACHINES),
        help="predict the job on another machine instead; runs nothing on this one",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the demo; the exit status is 1 when a result was wrong."""
    if arguments.simulate:
        return _predict(arguments)
    progress = Progress()
    try:
        progress.show("preparing")
        planned = experiment.plan(
            arguments.device, arguments.dtype, arguments.size, arguments.n, arguments.repeat
        )
        outcome = experiment.measure(planned, progress.show)
    finally:
        progress.clear()
    if arguments.json:
        print(json.dumps(as_json(planned, outcome), indent=2))
    else:
        print(as_text(planned, outcome))
    return 0 if outcome.verified else 1


def _predict(arguments: argparse.Namespace) -> int:
    """Predict the rows on a machine that was measured once."""
    machine = MACHINES[arguments.simulate]
    size = arguments.size or _PREDICTED_SIZE
    rows = []
    for dtype in [arguments.dtype] if arguments.dtype else list(machine.products):
        nbytes = size * size * experiment.DTYPES[dtype].itemsize
        # A product's work grows with the third power; small ones do not fill a GPU.
        compute = machine.products[dtype] * (size / _PREDICTED_SIZE) ** 3
        found = predict(compute, nbytes, arguments.n, machine=machine)
        for name, seconds in (
            ("compute alone", found.compute),
            ("copy alone", found.copy),
            ("run then copy", found.one_by_one),
            ("pipelined_run", found.seconds),
        ):
            ratio = seconds / found.limit
            rows.append({"dtype": dtype, "row": name, "seconds": seconds, "ratio": ratio})
    if arguments.json:
        settings = {"size": size, "n": arguments.n}
        document = {"predicted": True, "machine": machine.name, "settings": settings}
        print(json.dumps(document | {"rows": rows}, indent=2))
        return 0
    print(
        f"predicted for {machine.name}, from what was measured there: {arguments.n} products of "
        f"{size}x{size}, all results to the host; page-locked memory, warm"
    )
    for row in rows:
        if row["row"] == "compute alone":
            print(f"\n{row['dtype']:<24}{'seconds':>10}{'x limit':>10}")
        print(f"  {row['row']:<22}{row['seconds']:>10.4f}{row['ratio']:>10.3f}")
    return 0


# -- output


def as_json(planned: Plan, outcome: Outcome) -> dict[str, Any]:
    """Return everything that was measured, ready for JSON."""
    rows = []
    for measured in outcome.rows:
        group = measured.group
        rows.append(
            {
                "dtype": group.dtype,
                "device": group.label,
                "row": measured.row,
                "seconds": measured.seconds,
                "ratio": measured.seconds / outcome.limit(group),
                "pinned_bytes": measured.pinned_bytes,
                "device_bytes": measured.device_bytes,
                "samples": measured.samples,
            }
        )
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory_total(),
            "devices": [vars(device) for device in devices()],
        },
        "versions": versions(),
        "settings": {
            "size": planned.size,
            "n": planned.n,
            "rounds": planned.rounds,
            "pinned_limit_bytes": pool_stats(planned.groups[0].devices[0])["limit"],
        },
        "notes": planned.notes,
        "warmup_seconds": outcome.warmup_seconds,
        "first_call_seconds": outcome.first_seconds,
        "verified": outcome.verified,
        "limits": [
            {"dtype": group.dtype, "device": group.label, "seconds": outcome.limit(group)}
            for group in planned.groups
        ],
        "rows": rows,
        "result": sentence(planned, outcome),
    }


def as_text(planned: Plan, outcome: Outcome) -> str:
    """Return the table for people, the result in its last line."""
    numbers = versions()
    cores = len(os.sched_getaffinity(0))
    used = {str(device) for group in planned.groups for device in group.devices}
    names = [device for device in devices() if device.name in used]
    hardware = ", ".join(f"{device.name} {device.description}" for device in names)
    lines = [
        f"streamlap {numbers['streamlap']}, torch {numbers['torch']}, Python {numbers['python']}",
        hardware or f"CPU, {cores} cores",
        f"{_number(planned.n, 'product')} of {planned.size}x{planned.size} per device, all results "
        f"to the host; medians of {_number(planned.rounds, 'round')}",
        *[f"note: {note}" for note in planned.notes],
        _warmup_line(outcome),
        *_legend(planned, outcome),
    ]
    for group in planned.groups:
        lines += ["", *_table(group, outcome, planned.on_gpu)]
    right = "every result of pipelined_run is bit-identical to x.mm(x)"
    wrong = "WRONG: a result of pipelined_run differs from x.mm(x)"
    return "\n".join([*lines, "", right if outcome.verified else wrong, sentence(planned, outcome)])


def _warmup_line(outcome: Outcome) -> str:
    first = ", ".join(
        f"first {name} {outcome.first_seconds[name]:.2f} s"
        for name in ("pipelined_run", "stock non_blocking")
        if name in outcome.first_seconds
    )
    return f"warm-up took {outcome.warmup_seconds:.1f} s ({first})"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _legend(planned: Plan, outcome: Outcome) -> list[str]:
    """Say what the columns mean."""
    lines = [
        "x limit: the time, divided by the longer of compute alone and copy alone (plain torch, "
        "measured here)"
    ]
    if not planned.on_gpu:
        lines.append("pool: ordinary memory from streamlap's pool; on a CPU none is page-locked")
    whole = [measured for measured in outcome.rows if measured.row in WHOLE_ROWS]
    if any(float(_ratio(measured, outcome)) < 1 for measured in whole):
        lines.append("below 1.000: noise; nothing can be faster than the limit")
    return lines


def _ratio(measured: Measured, outcome: Outcome) -> str:
    return f"{measured.seconds / outcome.limit(measured.group):.3f}"


def _table(group: Group, outcome: Outcome, on_gpu: bool) -> list[str]:
    heading = f"{group.label}, {group.dtype}"
    memory = "pinned" if on_gpu else "pool"
    lines = [f"{heading:<24}{'seconds':>10}{'x limit':>10}{memory:>12}{'device':>12}"]
    order = [*LIMIT_ROWS, *[row.name for row in group.rows]]
    for name in dict.fromkeys(order):
        measured = outcome.find(group, name)
        if measured is None:
            continue
        ratio = _ratio(measured, outcome)
        pinned = format_size(measured.pinned_bytes)
        on_device = "-" if measured.device_bytes is None else format_size(measured.device_bytes)
        lines.append(f"  {name:<22}{measured.seconds:>10.4f}{ratio:>10}{pinned:>12}{on_device:>12}")
    return lines


def sentence(planned: Plan, outcome: Outcome) -> str:
    """Return the result: how far each way is from the limit on the first device."""
    first = planned.groups[0]
    groups = [group for group in planned.groups if group.label == first.label]
    parts: list[str] = []
    for name in WHOLE_ROWS:
        ratios = []
        for group in groups:
            measured = outcome.find(group, name)
            if measured is not None:
                ratio = measured.seconds / outcome.limit(group)
                digits = 3 if name == "pipelined_run" else 2
                ratios.append(f"{ratio:.{digits}f}" + (f" ({group.dtype})" if groups[1:] else ""))
        if ratios:
            parts.append(f"{name} {'took ' if not parts else ''}{' and '.join(ratios)}")
    parts[0] += " of the limit"
    return f"On {first.label}, {'; '.join(parts)}."
