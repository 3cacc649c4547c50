"""A side stream by hand, with the product at the critical end cut into row panels.

Compute-bound, the last copy is not hidden: its product is cut, so that most of the copy is.
Copy-bound, the first product is not hidden: it is cut, so that the first copy starts sooner.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch

from ..checks import poison
from ..limit import synchronize
from ..rows import Tensors, Way
from ..work import Job

PANELS = 4
_CALIBRATION_ITEMS = 8


class RowPanels(Way):
    def __init__(self, job: Job) -> None:
        self.job = job
        self.results_on_host = [
            torch.empty(job.x.shape, dtype=job.x.dtype, pin_memory=True) for _ in range(job.n)
        ]
        self.stream = torch.cuda.Stream(job.device)
        self.events = [torch.cuda.Event() for _ in range(job.n + PANELS)]
        rows = job.x.shape[0]
        edges = [rows * panel // PANELS for panel in range(PANELS + 1)]
        self.panels = list(itertools.pairwise(edges))
        self.cut = 0 if self._copies_take_longer() else job.n - 1

    def _copies_take_longer(self) -> bool:
        """A short measurement of both, as somebody who tunes by hand would make."""
        x, n = self.job.x, min(self.job.n, _CALIBRATION_ITEMS)
        products, results = self.job.products, self.results_on_host

        def seconds(step: Callable[[int], object]) -> float:
            step(0)
            synchronize([self.job.device])
            begin = time.perf_counter()
            for index in range(n):
                step(index)
            synchronize([self.job.device])
            return time.perf_counter() - begin

        with torch.no_grad():
            compute = seconds(lambda index: torch.mm(x, x, out=products[index]))
        return seconds(lambda i: results[i].copy_(products[i], non_blocking=True)) > compute

    def poison(self) -> None:
        poison(self.job.products)
        poison(self.results_on_host)

    def go(self) -> Tensors:
        x = self.job.x
        current = torch.cuda.current_stream(self.job.device)
        events = iter(self.events)
        whole = [(0, x.shape[0])]
        with torch.no_grad():
            for index, product in enumerate(self.job.products):
                result = self.results_on_host[index]
                for begin, end in self.panels if index == self.cut else whole:
                    part = product[begin:end]
                    torch.mm(x[begin:end], x, out=part)
                    event = next(events)
                    event.record(current)
                    with torch.cuda.stream(self.stream):
                        self.stream.wait_event(event)
                        result[begin:end].copy_(part, non_blocking=True)
        self.stream.synchronize()
        return self.results_on_host

    def expected(self, plain: Tensors) -> Tensors:
        # A panel's product may be computed by another kernel, with other bits than the whole.
        x = self.job.x
        with torch.no_grad():
            cut = torch.cat([x[begin:end].mm(x) for begin, end in self.panels])
        return [cut if index == self.cut else item for index, item in enumerate(plain)]
