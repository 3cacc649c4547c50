"""Whether a tensor's memory is still somebody's, without holding it."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class MemoryRef:
    """A weak reference to a storage: to the memory of a tensor and all its views.

    As long as it exists, no other storage has that one's :func:`identity_of`.
    """

    __slots__ = ("_ref",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def alive(self) -> bool:
        """Return whether any tensor holds the memory."""
        return not self._ref.expired()  # type: ignore[no-untyped-call]


def identity_of(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has, nor one that is weakly referred to."""
    return int(storage._cdata)
