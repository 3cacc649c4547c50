"""streamlap's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import streamlap
from streamlap.devices import place_of
from streamlap.pinned import pool_for

from .checks import poison
from .peers.torch_memory import touch
from .rows import Tensors, Way
from .work import Job


class PipelinedRunOut(Way):
    """``pipelined_run`` into ordinary memory whose pages are there."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.out = torch.zeros(job.n, *job.x.shape, dtype=job.x.dtype)

    def poison(self) -> None:
        poison([self.out])

    def go(self) -> Tensors:
        return streamlap.pipelined_run(self.job.x, n=self.job.n, out=self.out)


class PipelinedRunOrdinary(Way):
    """``pipelined_run`` into new ordinary memory."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def go(self) -> Tensors:
        return streamlap.pipelined_run(self.job.x, n=self.job.n, pin=False)


class PipelinedRun(Way):
    """``pipelined_run``, on one device or several."""

    def __init__(self, jobs: Sequence[Job], panels: int | None = None) -> None:
        self.jobs = list(jobs)
        self.panels = panels
        self.xs = [job.x for job in jobs]
        self.n = jobs[0].n

    def go(self) -> Tensors:
        if len(self.xs) == 1:
            return streamlap.pipelined_run(self.xs[0], n=self.n, panels=self.panels)
        lists = streamlap.pipelined_run(self.xs, n=self.n)
        return [result for results in lists for result in results]


class PlanCall(Way):
    """One call of a ``Pipeline``: a graph that was captured when it was made."""

    def __init__(self, job: Job, compute_streams: int | None) -> None:
        self.job = job
        self.plan = streamlap.Pipeline(
            like=job.x, n=job.n, graph=True, compute_streams=compute_streams
        )
        self.results_on_host: Tensors = self.plan(job.x)

    def poison(self) -> None:
        poison(self.results_on_host)

    def go(self) -> Tensors:
        return self.plan(self.job.x)

    def close(self) -> None:
        self.plan.close()
        self.results_on_host = []


class ToCpu(Way):
    """``to_cpu`` of a list, into new memory."""

    def __init__(self, sources: Sequence[torch.Tensor], pin: bool | None = None) -> None:
        self.sources = list(sources)
        self.pin = pin

    def go(self) -> Tensors:
        return streamlap.to_cpu(self.sources, pin=self.pin).result()


class CallToCpu(Way):
    """The call of ``to_cpu`` for one tensor; its result is waited for outside the clock."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source

    def go(self) -> streamlap.Transfer:
        return streamlap.to_cpu(self.source)

    def results(self, value: streamlap.Transfer) -> Tensors:
        return [value.result()]


class ToCpuOut(Way):
    """``to_cpu`` of a list, into ordinary memory whose pages are there."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.sources = list(sources)
        self.out = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]

    def poison(self) -> None:
        poison(self.out)

    def go(self) -> Tensors:
        return streamlap.to_cpu(self.sources, out=self.out).result()


class ToDevice(Way):
    """``to_device`` of a list, into memory that is there."""

    def __init__(self, sources: Sequence[torch.Tensor], device: torch.device) -> None:
        self.sources = list(sources)
        self.device = device
        self.out = [torch.empty_like(source, device=device) for source in sources]

    def poison(self) -> None:
        poison(self.out)

    def go(self) -> Tensors:
        return streamlap.to_device(self.sources, self.device, out=self.out).result()


class PoolGrowth(Way):
    """New blocks of a pool, with nothing cached; ``ahead`` has them made in one go before."""

    def __init__(
        self, nbytes: int, device: torch.device, count: int = 1, ahead: bool = False
    ) -> None:
        self.nbytes = nbytes
        self.count = count
        self.ahead = ahead
        self.pinned = device.type == "cuda"
        self.pool = pool_for(place_of(device))  # empty: the suite trims it between tables
        self.blocks: Tensors = []

    def before(self) -> None:
        self.blocks = []
        self.pool.trim()

    def go(self) -> Tensors:
        if self.ahead:
            streamlap.prewarm(self.count * self.nbytes, block=self.nbytes, pool=self.pool)
        for _ in range(self.count):
            self.blocks.append(streamlap.empty_pinned(self.nbytes, torch.uint8, self.pool))
            if not self.pinned:
                touch(self.blocks[-1])
        return self.blocks

    def close(self) -> None:
        self.before()


class PoolReuse(Way):
    """A block taken and let go of, again and again."""

    def __init__(self, nbytes: int, device: torch.device, times: int) -> None:
        self.nbytes = nbytes
        self.pinned = device.type == "cuda"
        self.times = times
        self.pool = pool_for(place_of(device))

    def go(self) -> Tensors:
        for _ in range(self.times):
            block = None
            block = streamlap.empty_pinned(self.nbytes, torch.uint8, self.pool)
            if not self.pinned:
                touch(block)
        assert block is not None
        return [block]
