"""Two GPUs: each alone, and both at once."""

from __future__ import annotations

import functools

import torch

from ..ours import PipelinedRun
from ..peers.side_stream import SideStream
from ..rows import Planned, Row, Setting, Table, Tensors
from ..work import Job
from .job import dtypes, limit_rows, shape

TITLE = "Two GPUs"
ABOUT = (
    "The job on two GPUs at once. The limit is the longer of all products and all copies, both "
    "GPUs at work; each alone is there to compare with."
)
NOT_ON_CPU = "it needs two GPUs"


class HandAlone(SideStream):
    """One GPU's part of the work."""

    def expected(self, plain: Tensors) -> Tensors:
        return self.jobs[0].expected()


class RunAlone(PipelinedRun):
    """One GPU's part of the work."""

    def expected(self, plain: Tensors) -> Tensors:
        return self.jobs[0].expected()


def _alone(job: Job) -> list[Row]:
    return [
        Row(f"GPU {job.device.index} alone, by hand", lambda: HandAlone([job]), "bound"),
        Row(f"GPU {job.device.index} alone, pipelined_run", lambda: RunAlone([job]), "bound"),
    ]


def _expected_of_all(jobs: list[Job]) -> Tensors:
    return [item for job in jobs for item in job.expected()]


def plan(setting: Setting) -> list[Planned]:
    size, n = shape(setting)
    first = setting.device.index or 0
    second = (first + 1) % torch.cuda.device_count()
    devices = [torch.device("cuda", first), torch.device("cuda", second)]

    def build(dtype: str) -> Table:
        jobs = [Job(device, size, dtype, n) for device in devices]

        def change(index: int) -> None:
            for offset, job in enumerate(jobs):
                job.change(2 * index + offset)  # no GPU has what the other has

        rows = limit_rows(jobs)
        for job in jobs:
            rows += _alone(job)
        rows += [
            Row("both by hand", lambda: SideStream(jobs)),
            Row("both, pipelined_run", lambda: PipelinedRun(jobs), "ours"),
        ]
        return Table(
            rows,
            devices,
            change,
            functools.partial(_expected_of_all, jobs),
            against="limit",
            settings={"size": size, "n": n, "dtype": dtype, "gpus": 2},
        )

    return [
        Planned(
            f"{n} products of {size}x{size} on each of two, {dtype}",
            functools.partial(build, dtype),
            tf32=dtype == "tf32",
        )
        for dtype in dtypes(setting)
        if setting.dtype or dtype != "bf16"
    ]
