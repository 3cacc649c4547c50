"""Tensors to be copied, all of different content."""

from __future__ import annotations

import torch

from .rows import Tensors


class Sources:
    """``count`` tensors of ``each`` bytes; new content every round."""

    def __init__(self, device: torch.device, count: int, each: int) -> None:
        size = each // 4
        self._all = torch.empty(count * size, dtype=torch.int32, device=device)
        # Tensors of their own: views of one would be one copy to a clever peer.
        self.tensors = [torch.empty(size, dtype=torch.int32, device=device) for _ in range(count)]
        self._device = device
        self.change(0)

    def change(self, index: int) -> None:
        generator = torch.Generator(self._device).manual_seed(index)
        self._all.random_(generator=generator)
        torch._foreach_copy_(self.tensors, list(self._all.split(self.tensors[0].numel())))

    def expected(self) -> Tensors:
        return self.tensors
