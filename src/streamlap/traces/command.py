"""``streamlap timeline``: the job, recorded, as a trace, a picture and a few lines of text."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from streamlap import experiment, limit
from streamlap.arguments import Progress, count, device, positive
from streamlap.errors import InvalidArgument, StreamlapError
from streamlap.pipeline import pipelined_run
from streamlap.traces.timeline import Timeline, timeline

_DESCRIPTION = """\
Compute x.mm(x) n times, bring all results to the host meanwhile, and show what ran when:
OUT.json (open it in ui.perfetto.dev), OUT.png, OUT.svg or OUT.pdf, and a summary.
"""
_EXAMPLES = """\
examples:
  streamlap timeline                        the first GPU, or the CPU
  streamlap timeline --n 8 --format svg     few enough to see each item
  streamlap timeline --dtype tf32 --out tf32
"""
_FORMATS = ("png", "svg", "pdf")
_ROUNDS = 5
_COPY_SOURCES = 4


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "timeline",
        help="record pipelined_run: a trace, a picture, a summary",
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
        "--device", type=device, help="all, cpu or cuda:N (default: the first GPU, or cpu)"
    )
    parser.add_argument(
        "--dtype", choices=list(experiment.DTYPES), default="fp32", help="(default: fp32)"
    )
    parser.add_argument(
        "--repeat",
        type=count,
        default=_ROUNDS,
        metavar="N",
        help=f"rounds; the median one is shown (default: {_ROUNDS})",
    )
    parser.add_argument(
        "--out",
        default="streamlap-timeline",
        metavar="PATH",
        help="where to write, without a suffix (default: streamlap-timeline)",
    )
    parser.add_argument(
        "--format", choices=_FORMATS, default="png", help="of the picture (default: png)"
    )
    parser.add_argument("--no-plot", action="store_true", help="draw no picture")
    parser.set_defaults(run=run_command)


@dataclass
class _Rounds:
    """Seconds of each round, by what was run."""

    compute: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    recorded: list[tuple[float, Timeline]] = field(default_factory=list)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the job, write the files, print the summary."""
    if not arguments.no_plot and importlib.util.find_spec("matplotlib") is None:
        raise StreamlapError(
            'the picture needs matplotlib: pip install "streamlap[viz]", or pass --no-plot'
        )
    targets = _targets(arguments)
    where = arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    progress = Progress()
    try:
        progress.show("preparing")
        planned = experiment.plan(
            where, arguments.dtype, arguments.size, arguments.n, arguments.repeat
        )
        # On a CPU one logical device: several would share the same cores.
        group = planned.groups[-1] if planned.on_gpu else planned.groups[0]
        rounds = _measure(group, planned.n, arguments.repeat, progress)
    finally:
        progress.clear()

    seconds, shown = sorted(rounds.recorded, key=lambda found: found[0])[arguments.repeat // 2]
    shown.save(targets[0])
    products = "1 product" if planned.n == 1 else f"{planned.n} products"
    title = f"{products} of {planned.size}x{planned.size}, {arguments.dtype}"
    for picture in targets[1:]:
        shown.plot(picture, f"{title}: {shown.summary().headline()}")
    print(f"{title} on {group.label}")
    print(shown.summary())
    print(_by_stopwatch(rounds, seconds, shown))
    print(f"written: {', '.join(targets)}")
    return 0


def _targets(arguments: argparse.Namespace) -> list[str]:
    """Return the files to write; refuse before anything is measured what could not be written."""
    base = str(arguments.out)
    for suffix in ("json", *_FORMATS):
        base = base.removesuffix(f".{suffix}")
    folder, name = os.path.split(base)
    folder = folder or "."
    if not name:
        raise InvalidArgument(f"--out {arguments.out!r} names no file: write a name, no suffix")
    if not os.path.isdir(folder):
        raise InvalidArgument(f"there is no folder {folder!r} for --out: make it first")
    files = [f"{base}.json", *([] if arguments.no_plot else [f"{base}.{arguments.format}"])]
    for file in files:
        if os.path.isdir(file) or not os.access(folder, os.W_OK):
            raise InvalidArgument(f"{file!r} cannot be written: choose another --out")
    return files


def _measure(group: experiment.Group, n: int, repeat: int, progress: Progress) -> _Rounds:
    """Run everything once a round; one round first, to warm up."""
    xs = group.xs
    job = functools.partial(pipelined_run, xs if len(xs) > 1 else xs[0], n=n)
    found = _Rounds()
    with experiment.matmul_precision(group.dtype):
        pairs = limit.ready_pairs(xs, n, _COPY_SOURCES)
        for index in range(repeat + 1):
            progress.show(f"round {index} of {repeat}" if index else "warm-up")
            compute = limit.timed(lambda: limit.products(xs, n), group.devices)[0]
            copy = limit.timed(lambda: limit.copies(pairs), group.devices)[0]
            plain, results = limit.timed(job, group.devices, ready=True)
            del results
            limit.synchronize(group.devices)
            recording = timeline()
            with recording:
                results = job()
            del results
            if index:
                found.compute.append(compute)
                found.copy.append(copy)
                found.plain.append(plain)
                found.recorded.append((recording.seconds, recording))
    return found


def _by_stopwatch(rounds: _Rounds, recorded: float, shown: Timeline) -> str:
    """Return the same figures by the clock: nothing was recorded while it ran."""
    compute, copy = statistics.median(rounds.compute), statistics.median(rounds.copy)
    plain = statistics.median(rounds.plain)
    hidden = (compute + copy - plain) / min(compute, copy)
    share = f"{hidden:.1%} hidden" if hidden > 0 else "nothing hidden"
    return (
        f"by the stopwatch: compute alone {compute:.4f} s, copy alone {copy:.4f} s, both "
        f"{plain:.4f} s: {plain / max(compute, copy):.3f} x that limit, {share}; "
        f"recorded {recorded:.4f} s ({recorded / plain - 1:+.1%})"
    )
