"""Stock torch, ``.to("cpu", non_blocking=True)``: into torch's cached pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..limit import synchronize
from ..rows import Tensors, Way
from ..work import Job


class NonBlocking(Way):
    """All products and all copies on the current stream, then one wait."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def go(self) -> Tensors:
        with torch.no_grad():
            products = [self.job.x.mm(self.job.x) for _ in range(self.job.n)]
        results = [product.to("cpu", non_blocking=True) for product in products]
        synchronize([self.job.device])  # until then the results must not be read
        return results


class CallNonBlocking(Way):
    """The call for one tensor; its result is waited for outside the clock."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source

    def go(self) -> torch.Tensor:
        return self.source.to("cpu", non_blocking=True)

    def results(self, value: torch.Tensor) -> Tensors:
        synchronize([self.source.device])
        return [value]


class EachNonBlocking(Way):
    """Copies of tensors that are there."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.sources = sources

    def go(self) -> Tensors:
        results = [source.to("cpu", non_blocking=True) for source in self.sources]
        synchronize([self.sources[0].device])
        return results
