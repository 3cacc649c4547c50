"""A side stream by hand: what a careful user of torch writes, for one GPU or several."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks import poison
from ..rows import Tensors, Way
from ..work import Job


class SideStream(Way):
    """Outputs and pinned results that are ready, a copy stream for each GPU, an event an item."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        self.n = jobs[0].n
        self.products = [job.products for job in jobs]
        self.results_on_host = [
            [torch.empty(job.x.shape, dtype=job.x.dtype, pin_memory=True) for _ in range(job.n)]
            for job in jobs
        ]
        self.streams = [torch.cuda.Stream(job.device) for job in jobs]
        self.events = [[torch.cuda.Event() for _ in range(job.n)] for job in jobs]

    def poison(self) -> None:
        for products, results in zip(self.products, self.results_on_host, strict=True):
            poison(products)
            poison(results)

    def go(self) -> Tensors:
        current = [torch.cuda.current_stream(job.device) for job in self.jobs]
        with torch.no_grad():
            for index in range(self.n):
                for lane, job in enumerate(self.jobs):
                    product = self.products[lane][index]
                    torch.mm(job.x, job.x, out=product)
                    event = self.events[lane][index]
                    event.record(current[lane])
                    stream = self.streams[lane]
                    with torch.cuda.stream(stream):
                        stream.wait_event(event)
                        self.results_on_host[lane][index].copy_(product, non_blocking=True)
        for stream in self.streams:
            stream.synchronize()
        return [result for results in self.results_on_host for result in results]
