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
    """New blocks, with nothing cached."""

    def __init__(self, nbytes: int, pinned: bool, count: int = 1) -> None:
        self.nbytes = nbytes
        self.pinned = pinned
        self.count = count
        self.blocks: Tensors = []

    def before(self) -> None:
        self.blocks = []
        if self.pinned:
            torch._C._host_emptyCache()

    def go(self) -> Tensors:
        for _ in range(self.count):
            block = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
            self.blocks.append(block if self.pinned else touch(block))
        return self.blocks

    def close(self) -> None:
        self.before()


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
