"""Whether a tensor's memory is still somebody's, without holding it."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class MemoryRef:
    """A weak reference to the memory of a tensor and all its views.

    Attributes:
        identity: a number that no other storage has as long as this reference exists.
    """

    __slots__ = ("_ref", "identity")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.identity = int(self._ref.cdata)

    def alive(self) -> bool:
        """Return whether any tensor holds the memory."""
        return not self._ref.expired()  # type: ignore[no-untyped-call]
