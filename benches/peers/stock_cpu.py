"""Stock torch, blocking: ``.cpu()`` of each result, into fresh ordinary memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..limit import synchronize
from ..rows import Tensors, Way
from ..work import Job


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    # A CPU tensor is on the host already; copy=True makes torch copy it nevertheless.
    return tensor.to("cpu", copy=True)


class RunThenCopy(Way):
    """All products, then all copies."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def go(self) -> Tensors:
        with torch.no_grad():
            products = [self.job.x.mm(self.job.x) for _ in range(self.job.n)]
        synchronize([self.job.device])
        return [to_host(product) for product in products]


class EachToCpu(Way):
    """Copies of tensors that are there."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.sources = sources

    def go(self) -> Tensors:
        return [to_host(source) for source in self.sources]
