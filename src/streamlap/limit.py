"""The least time the work can take, measured by plain torch code that imports nothing of ours.

``limit`` is the longer of two things that no overlap can shorten: all products, and all copies into
page-locked memory that is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def synchronize(devices: Iterable[torch.device]) -> None:
    """Block until the GPUs among ``devices`` are idle."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def timed(
    body: Callable[[], Any], devices: Sequence[torch.device], ready: bool = False
) -> tuple[float, Any]:
    """Return the seconds from idle devices until the work is done, and what ``body`` returned.

    ``ready`` says that all is done when ``body`` returns; else the clock waits for the devices.
    """
    synchronize(devices)
    begin = time.perf_counter()
    value = body()
    if not ready:
        synchronize(devices)
    return time.perf_counter() - begin, value


def products(xs: Sequence[torch.Tensor], n: int) -> None:
    """Compute ``x.mm(x)`` ``n`` times for each of ``xs``, keeping no result."""
    with torch.no_grad():
        for _ in range(n):
            for x in xs:
                x.mm(x)


def ready_pairs(
    xs: Sequence[torch.Tensor], n: int, sources: int = 4
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ``n`` pairs of (destination, source) for each of ``xs``, all memory touched.

    Destinations of a GPU's results are page-locked. A few sources take turns, so that a copy does
    not find its bytes in a cache.
    """
    made = [[x.clone() for _ in range(min(sources, n))] for x in xs]
    pairs = []
    for index in range(n):
        for x, ring in zip(xs, made, strict=True):
            pinned = x.device.type == "cuda"
            target = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned)
            if not pinned:
                target.zero_()  # page-locked memory is there; ordinary pages come when touched
            pairs.append((target, ring[index % len(ring)]))
    synchronize([x.device for x in xs])
    return pairs


def copies(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each source to its destination; devices copy at the same time."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
