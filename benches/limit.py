"""The least time the job can take, in plain torch. Imports nothing of streamlap, nor of the suite.

The limit is the longer of two things that no overlap can shorten: all products into memory that is
there, and all copies into page-locked memory that is ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Tensors = list[torch.Tensor]


def synchronize(devices: Iterable[torch.device]) -> None:
    """Block until the GPUs among ``devices`` are idle."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def host_memory(like: torch.Tensor, n: int) -> Tensors:
    """Return ``n`` host tensors, page-locked for a GPU's results, all pages touched."""
    pinned = like.device.type == "cuda"
    made = [torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned) for _ in range(n)]
    for tensor in made:
        tensor.zero_()
    return made


def compute(xs: Sequence[torch.Tensor], products: Sequence[Tensors]) -> None:
    """Compute ``x.mm(x)`` into each of its products; the devices work at the same time."""
    with torch.no_grad():
        for outs in zip(*products, strict=True):
            for x, out in zip(xs, outs, strict=True):
                torch.mm(x, x, out=out)
    synchronize([x.device for x in xs])


def copy(sources: Sequence[Tensors], results: Sequence[Tensors], n: int) -> None:
    """Copy ``n`` sources of each device in turn to its results; the devices copy at once."""
    for index in range(n):
        for ring, outs in zip(sources, results, strict=True):
            outs[index].copy_(ring[index % len(ring)], non_blocking=True)
    synchronize([ring[0].device for ring in sources])
