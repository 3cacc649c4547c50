"""Ordinary memory, which the copy engine cannot reach by itself, on the host's side."""

from __future__ import annotations

import functools

import torch

from ..ours import PipelinedRunOut, ToCpu, ToCpuOut, ToDevice
from ..peers.ready_copies import CopyEach, CopyToDevice
from ..peers.stock_cpu import EachToCpu, RunThenCopy
from ..rows import Planned, Row, Setting, Table
from ..sources import Sources
from ..work import Job
from .job import BLOCKING_ROUNDS, dtypes, limit_rows, shape

TITLE = "Ordinary memory"
ABOUT = (
    "Ordinary (pageable) memory as destination and as source. The copy to or from page-locked "
    "memory beside it is the wire: what any way could reach at most. Fresh memory also pays for "
    "its pages. In the job, `pipelined_run` is given ordinary memory for all results."
)
NOT_ON_CPU = "there all memory is ordinary"

MIB = 1 << 20


def _to_host(setting: Setting, count: int, each: int) -> Table:
    sources = Sources(setting.device, count, each)
    tensors = sources.tensors
    return Table(
        [
            Row("pinned copy (the wire)", lambda: CopyEach(tensors, pinned=True), "bound"),
            Row("stock .cpu(), fresh", lambda: EachToCpu(tensors), rounds=BLOCKING_ROUNDS),
            Row("stock copy_, warm", lambda: CopyEach(tensors, pinned=False)),
            Row("to_cpu(pin=False), fresh", lambda: ToCpu(tensors, pin=False), "ours"),
            Row("to_cpu(out=ordinary), warm", lambda: ToCpuOut(tensors), "ours"),
        ],
        [setting.device],
        sources.change,
        sources.expected,
        nbytes=count * each,
        settings={"tensors": count, "bytes_each": each},
    )


def _to_device(setting: Setting, count: int, each: int) -> Table:
    sources = Sources(torch.device("cpu"), count, each)
    tensors, device = sources.tensors, setting.device
    return Table(
        [
            Row("pinned copy (the wire)", lambda: CopyToDevice(tensors, device, True), "bound"),
            Row("stock copy_", lambda: CopyToDevice(tensors, device, False)),
            Row("to_device", lambda: ToDevice(tensors, device), "ours"),
        ],
        [device],
        sources.change,
        sources.expected,
        nbytes=count * each,
        settings={"tensors": count, "bytes_each": each},
    )


def _job(setting: Setting, dtype: str) -> Table:
    size, n = shape(setting)
    job = Job(setting.device, size, dtype, n)
    return Table(
        [
            *limit_rows([job]),
            Row("stock .cpu()", lambda: RunThenCopy(job), rounds=BLOCKING_ROUNDS),
            Row("pipelined_run(out=ordinary)", lambda: PipelinedRunOut(job), "ours"),
        ],
        [setting.device],
        job.change,
        job.expected,
        against="limit",
        nbytes=job.nbytes,
        count=n,
        settings={"size": size, "n": n, "dtype": dtype},
    )


def plan(setting: Setting) -> list[Planned]:
    copies = [(4, MIB)] if setting.quick else [(16, 64 * MIB), (1, 2048 * MIB)]
    planned = []
    for count, each in copies:
        what = f"{count} tensor{'s' * (count > 1)} of {each // MIB} MiB"
        planned += [
            Planned(f"{what} to the host", functools.partial(_to_host, setting, count, each)),
            Planned(f"{what} to the device", functools.partial(_to_device, setting, count, each)),
        ]
    size, n = shape(setting)
    return planned + [
        Planned(
            f"{n} products of {size}x{size} into ordinary memory, {dtype}",
            functools.partial(_job, setting, dtype),
            tf32=dtype == "tf32",
        )
        for dtype in dtypes(setting)
    ]
