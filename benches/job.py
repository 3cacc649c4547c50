"""The job against its limit and a side stream written by hand, interleaved in one run, on one GPU.

    python benches/job.py --dtype tf32

Every row starts on an idle device and ends when its results are on the host. ``limit`` is the
longer of compute alone and copy alone; what measures it uses nothing of streamlap.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import streamlap

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class ByHand:
    """What a careful user writes: a ring of outputs, pinned results, an event for each item."""

    def __init__(self, x: torch.Tensor, n: int) -> None:
        self.x, self.n = x, n
        self.products = [torch.empty_like(x) for _ in range(n)]
        self.results = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for _ in range(n)]
        self.stream = torch.cuda.Stream()

    def compute(self) -> None:
        for product in self.products:
            torch.mm(self.x, self.x, out=product)
        torch.cuda.synchronize()

    def copy(self) -> None:
        with torch.cuda.stream(self.stream):
            for result, product in zip(self.results, self.products, strict=True):
                result.copy_(product, non_blocking=True)
        torch.cuda.synchronize()

    def side_stream(self) -> None:
        current = torch.cuda.current_stream()
        for result, product in zip(self.results, self.products, strict=True):
            torch.mm(self.x, self.x, out=product)
            event = torch.cuda.Event()
            event.record(current)
            with torch.cuda.stream(self.stream):
                self.stream.wait_event(event)
                result.copy_(product, non_blocking=True)
        torch.cuda.synchronize()


def measure(rows: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each row; two rounds of warm-up are not counted."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for index in range(rounds + 2):
        for name, row in rows.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            value = row()
            seconds = time.perf_counter() - begin
            del value
            if index >= 2:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=4000)
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benches/job.py needs a GPU; `streamlap demo` runs without one", file=sys.stderr)
        return 2
    if min(options.size, options.n, options.rounds) < 1:
        parser.error("--size, --n and --rounds must be at least 1")
    torch.backends.cuda.matmul.allow_tf32 = options.dtype == "tf32"
    x = torch.rand(options.size, options.size, device="cuda").to(DTYPES[options.dtype])
    by_hand = ByHand(x, options.n)
    seconds = measure(
        {
            "compute alone": by_hand.compute,
            "copy alone": by_hand.copy,
            "side stream by hand": by_hand.side_stream,
            "pipelined_run": lambda: streamlap.pipelined_run(x, n=options.n),
        },
        options.rounds,
    )
    limit = max(seconds["compute alone"], seconds["copy alone"])
    right = torch.equal(streamlap.pipelined_run(x, n=1)[0], x.mm(x).cpu())
    rows = {name: {"seconds": value, "limit": value / limit} for name, value in seconds.items()}
    print(json.dumps({"dtype": options.dtype, "n": options.n, "right": right, "rows": rows}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
