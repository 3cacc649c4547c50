"""The job: ``x.mm(x)`` ``n`` times on one device, all results to the host."""

from __future__ import annotations

import functools

import torch

from .rows import Tensors

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


class Job:
    """The input of the job, and products that the ways written by hand share.

    The products of one call are equal, because that is the job. So ``x`` changes every round: what
    is left of an earlier one is wrong.
    """

    def __init__(self, device: torch.device, size: int, dtype: str, n: int) -> None:
        self.device = device
        self.n = n
        self.x = torch.empty(size, size, device=device, dtype=DTYPES[dtype])
        self.change(0)

    def change(self, index: int) -> None:
        generator = torch.Generator(self.device).manual_seed(index)
        self.x.uniform_(0.0, 1.0, generator=generator)

    @functools.cached_property
    def products(self) -> Tensors:
        return [torch.empty_like(self.x) for _ in range(self.n)]

    @property
    def nbytes(self) -> int:
        return self.n * self.x.numel() * self.x.itemsize

    def expected(self) -> Tensors:
        with torch.no_grad():
            return [self.x.mm(self.x)] * self.n
