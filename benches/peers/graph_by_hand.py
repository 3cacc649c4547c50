"""A side stream by hand, captured once as a CUDA graph and replayed."""

from __future__ import annotations

import torch

from ..checks import poison
from ..rows import Tensors, Way
from ..work import Job


class GraphByHand(Way):
    def __init__(self, job: Job) -> None:
        self.job = job
        self.results_on_host = [
            torch.empty(job.x.shape, dtype=job.x.dtype, pin_memory=True) for _ in range(job.n)
        ]
        self.graph = torch.cuda.CUDAGraph()
        copies = torch.cuda.Stream(job.device)
        self._issue(copies)  # what is loaded or allocated at first use must not be captured
        torch.cuda.synchronize(job.device)
        # thread_local: what other threads ask the driver is none of this capture's business.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._issue(copies)

    def _issue(self, copies: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(self.job.device)
        with torch.no_grad():
            for product, result in zip(self.job.products, self.results_on_host, strict=True):
                torch.mm(self.job.x, self.job.x, out=product)
                event = torch.cuda.Event()
                event.record(current)
                copies.wait_event(event)
                with torch.cuda.stream(copies):
                    result.copy_(product, non_blocking=True)
        current.wait_stream(copies)

    def poison(self) -> None:
        poison(self.job.products)
        poison(self.results_on_host)

    def go(self) -> Tensors:
        self.graph.replay()
        torch.cuda.synchronize(self.job.device)
        return self.results_on_host
