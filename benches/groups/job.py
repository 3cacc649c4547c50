"""The job, warm: many products, all results on the host."""

from __future__ import annotations

import functools

import torch

from .. import limit
from ..checks import poison
from ..ours import PipelinedRun
from ..peers.cupy_by_hand import CuPyByHand
from ..peers.row_panels import RowPanels
from ..peers.side_stream import SideStream
from ..peers.stock_cpu import RunThenCopy
from ..peers.stock_non_blocking import NonBlocking
from ..peers.thread_by_hand import ThreadByHand
from ..rows import Planned, Row, Setting, Table, Tensors, Way
from ..work import Job

TITLE = "The job, warm"
ABOUT = (
    "`x.mm(x)` again and again, every result to the host, with memory that is warm. The limit is "
    "the longer of compute alone and copy alone, measured in the same rounds by plain torch."
)
NOT_ON_CPU = ""

BLOCKING_ROUNDS = 3  # on a GPU they take seconds each, and say the same every time
_SOURCES = 4  # they take turns, so that a copy does not find its bytes in a cache


class ComputeAlone(Way):
    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs

    def poison(self) -> None:
        for job in self.jobs:
            poison(job.products)

    def go(self) -> Tensors:
        limit.compute([job.x for job in self.jobs], [job.products for job in self.jobs])
        return [product for job in self.jobs for product in job.products]


class CopyAlone(Way):
    def __init__(self, jobs: list[Job]) -> None:
        self.n = jobs[0].n
        self.sources = [
            [torch.rand_like(job.x) for _ in range(min(_SOURCES, job.n))] for job in jobs
        ]
        self.results_on_host = [limit.host_memory(job.x, job.n) for job in jobs]

    def poison(self) -> None:
        for results in self.results_on_host:
            poison(results)

    def go(self) -> Tensors:
        limit.copy(self.sources, self.results_on_host, self.n)
        return [result for results in self.results_on_host for result in results]

    def expected(self, plain: Tensors) -> Tensors:
        return [ring[index % len(ring)] for ring in self.sources for index in range(self.n)]


def limit_rows(jobs: list[Job]) -> list[Row]:
    """Return the rows that the limit is made of."""
    return [
        Row("compute alone", lambda: ComputeAlone(jobs), "limit"),
        Row("copy alone", lambda: CopyAlone(jobs), "limit"),
    ]


def _rows(job: Job, on_gpu: bool) -> list[Row]:
    rows = limit_rows([job])
    if on_gpu:
        rows += [
            Row("stock .cpu()", lambda: RunThenCopy(job), rounds=BLOCKING_ROUNDS),
            Row("stock non_blocking", lambda: NonBlocking(job)),
            Row("side stream by hand", lambda: SideStream([job])),
            Row("row panels by hand", lambda: RowPanels(job)),
            Row("CuPy by hand", lambda: CuPyByHand(job)),
        ]
    else:
        rows += [
            Row("run, then copy", lambda: RunThenCopy(job)),
            Row("thread by hand", lambda: ThreadByHand(job)),
        ]
    rows.append(Row("pipelined_run", lambda: PipelinedRun([job]), "ours"))
    if on_gpu:
        rows.append(Row("pipelined_run, panels=1", lambda: PipelinedRun([job], 1), "ours"))
    return rows


def dtypes(setting: Setting) -> list[str]:
    if setting.dtype:
        return [setting.dtype]
    return ["fp32", "tf32", "bf16"] if setting.on_gpu else ["fp32"]


def shape(setting: Setting) -> tuple[int, int]:
    """Return the size of the matrix, and how many products."""
    if setting.quick:
        return (256, 8) if setting.on_gpu else (128, 6)
    return (4000, 50) if setting.on_gpu else (512, 50)


def plan(setting: Setting) -> list[Planned]:
    size, n = shape(setting)

    def build(dtype: str) -> Table:
        job = Job(setting.device, size, dtype, n)
        return Table(
            _rows(job, setting.on_gpu),
            [setting.device],
            job.change,
            job.expected,
            against="limit",
            nbytes=job.nbytes,
            count=n,
            settings={"size": size, "n": n, "dtype": dtype},
        )

    return [
        Planned(
            f"{n} products of {size}x{size}, {dtype}",
            functools.partial(build, dtype),
            tf32=dtype == "tf32",
        )
        for dtype in dtypes(setting)
    ]
