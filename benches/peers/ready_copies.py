"""Stock torch copies of tensors that are there, into host memory that is ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks import poison
from ..limit import synchronize
from ..rows import Tensors, Way


def _like(sources: Sequence[torch.Tensor], pinned: bool) -> Tensors:
    made = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in sources]
    for tensor in made:
        tensor.zero_()  # ordinary pages come when touched
    return made


class _Ready(Way):
    def __init__(self, sources: Sequence[torch.Tensor], pinned: bool) -> None:
        self.sources = list(sources)
        self.ready = _like(sources, pinned)

    def poison(self) -> None:
        poison(self.ready)


class CopyEach(_Ready):
    """``copy_`` of each. Into ordinary memory this is the driver's own pageable copy."""

    def go(self) -> Tensors:
        for result, source in zip(self.ready, self.sources, strict=True):
            result.copy_(source, non_blocking=True)
        synchronize([self.sources[0].device])
        return self.ready


class CopyToDevice(Way):
    """``copy_`` of each from host memory, pinned or ordinary."""

    def __init__(self, sources: Sequence[torch.Tensor], device: torch.device, pinned: bool) -> None:
        self.given = list(sources)
        self.sources = [source.pin_memory() for source in sources] if pinned else self.given
        self.pinned = pinned
        self.ready = [torch.empty_like(source, device=device) for source in sources]

    def before(self) -> None:
        if self.pinned:  # what is to be copied changes every round
            for own, given in zip(self.sources, self.given, strict=True):
                own.copy_(given)

    def poison(self) -> None:
        poison(self.ready)

    def go(self) -> Tensors:
        for result, source in zip(self.ready, self.sources, strict=True):
            result.copy_(source, non_blocking=True)
        synchronize([self.ready[0].device])
        return self.ready


class ForeachCopy(_Ready):
    """``torch._foreach_copy_``: one call for the list."""

    def go(self) -> Tensors:
        torch._foreach_copy_(self.ready, self.sources, non_blocking=True)
        synchronize([self.sources[0].device])
        return self.ready


class CatThenCopy(Way):
    """``torch.cat`` on the device, then one copy; the results are views."""

    def __init__(self, sources: Sequence[torch.Tensor], pinned: bool) -> None:
        self.sources = list(sources)
        self.sizes = [source.numel() for source in sources]
        self.flat = torch.empty(sum(self.sizes), dtype=sources[0].dtype, pin_memory=pinned)
        self.flat.zero_()

    def poison(self) -> None:
        poison([self.flat])

    def go(self) -> Tensors:
        if self.sources[0].device.type == "cuda":
            self.flat.copy_(torch.cat(self.sources), non_blocking=True)
            synchronize([self.sources[0].device])
        else:
            torch.cat(self.sources, out=self.flat)  # on the host this is the copy
        return list(self.flat.split(self.sizes))
