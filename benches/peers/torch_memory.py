"""Host memory from torch: its pinned cache on a GPU machine, ordinary memory elsewhere."""

from __future__ import annotations

import torch

from ..rows import Tensors, Way

PAGE = 4096


def touch(tensor: torch.Tensor) -> torch.Tensor:
    """Write to every page: until then ordinary memory is a promise."""
    tensor[::PAGE] = 1
    return tensor


class TorchGrowth(Way):
    """One new block, with nothing cached."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.nbytes = nbytes
        self.pinned = pinned
        self.block: torch.Tensor | None = None

    def before(self) -> None:
        self.block = None
        if self.pinned:
            torch._C._host_emptyCache()

    def go(self) -> Tensors:
        self.block = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
        if not self.pinned:
            touch(self.block)
        return [self.block]


class TorchReuse(Way):
    """A block taken and let go of, again and again."""

    def __init__(self, nbytes: int, pinned: bool, times: int) -> None:
        self.nbytes = nbytes
        self.pinned = pinned
        self.times = times

    def go(self) -> Tensors:
        for _ in range(self.times):
            block = None  # let go first, so that it is this one that comes back
            block = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
            if not self.pinned:
                touch(block)
        assert block is not None
        return [block]
