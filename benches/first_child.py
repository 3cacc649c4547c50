"""A fresh process of the group ``first``: does the job once, in one way, and says how long it took.

Takes the request as JSON in its only argument, and prints the answer as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .checks import require_equal
from .limit import synchronize
from .peers.cupy_by_hand import CuPyByHand
from .peers.side_stream import SideStream
from .peers.stock_non_blocking import NonBlocking
from .rows import Way
from .work import Job


def _ours(job: Job) -> Way:
    from .ours import PipelinedRun

    return PipelinedRun([job])


def _ours_ordinary(job: Job) -> Way:
    from .ours import PipelinedRunOrdinary

    return PipelinedRunOrdinary(job)


# The module is imported before the clock starts: reading code is no part of the call.
WAYS: dict[str, tuple[str, Callable[[Job], Way]]] = {
    "stock non_blocking": ("torch", NonBlocking),
    "side stream by hand": ("torch", lambda job: SideStream([job])),
    "CuPy by hand": ("cupyx", CuPyByHand),
    "pipelined_run": ("streamlap", _ours),
    "pipelined_run(pin=False)": ("streamlap", _ours_ordinary),
}


def measure(request: dict[str, Any]) -> float:
    """Return the seconds from an idle GPU to all results on the host, memory included."""
    module, make = WAYS[request["way"]]
    importlib.import_module(module)
    if module == "streamlap":
        importlib.import_module(".ours", __package__)
    torch.backends.cuda.matmul.allow_tf32 = request["dtype"] == "tf32"
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    job = Job(device, request["size"], request["dtype"], request["n"])
    with torch.no_grad():
        job.x.mm(job.x)
    synchronize([device])
    begin = time.perf_counter()
    way = make(job)
    value = way.go()
    seconds = time.perf_counter() - begin
    require_equal(way.results(value), job.expected())
    return seconds


def main() -> int:
    warnings.simplefilter("ignore")
    try:
        answer: dict[str, Any] = {"seconds": measure(json.loads(sys.argv[1])), "failed": None}
    except Exception as error:
        line = " ".join(str(error).split())
        answer = {"seconds": None, "failed": f"{type(error).__name__}: {line}"}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
