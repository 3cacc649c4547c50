"""Tiny and small products: what a call costs."""

from __future__ import annotations

import functools

from ..ours import PipelinedRun, PlanCall
from ..peers.cupy_by_hand import CuPyByHand
from ..peers.graph_by_hand import GraphByHand
from ..peers.side_stream import SideStream
from ..peers.stock_non_blocking import NonBlocking
from ..rows import Planned, Row, Setting, Table
from ..work import Job
from .job import dtypes

TITLE = "Tiny products"
ABOUT = (
    "The same job with 256x256 matrices: the GPU is done at once, and what is left is the cost of "
    "the calls. A graph that was captured before has the least of them. With 1024x1024 a copy "
    "takes longer than the calls for an item, which must not be seen."
)
NOT_ON_CPU = "its cost is that of CUDA calls"

SIZES = (256, 1024)
CALLS = 10


def _rows(job: Job) -> list[Row]:
    return [
        Row("stock non_blocking", lambda: NonBlocking(job)),
        Row("side stream by hand", lambda: SideStream([job])),
        Row("CuPy by hand", lambda: CuPyByHand(job)),
        Row("captured graph by hand", lambda: GraphByHand(job)),
        Row("pipelined_run", lambda: PipelinedRun([job]), "ours"),
        Row("Pipeline", lambda: PlanCall(job, None), "ours"),
        Row("Pipeline, one compute stream", lambda: PlanCall(job, 1), "ours"),
    ]


def plan(setting: Setting) -> list[Planned]:
    n = 8 if setting.quick else 50

    def build(size: int, dtype: str) -> Table:
        job = Job(setting.device, size, dtype, n)
        return Table(
            _rows(job),
            [setting.device],
            job.change,
            job.expected,
            nbytes=job.nbytes,
            count=n,
            calls=1 if setting.quick else CALLS,
            settings={"size": size, "n": n, "dtype": dtype},
        )

    dtype = setting.dtype or dtypes(setting)[0]
    return [
        Planned(
            f"{n} products of {size}x{size}, {dtype}",
            functools.partial(build, size, dtype),
            tf32=dtype == "tf32",
        )
        for size in SIZES
    ]
