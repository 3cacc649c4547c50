"""Device memory through which a gather goes on its way to the host.

A kernel that writes page-locked memory reaches 95 % of what a copy engine does. One that packs into
device memory is done after some microseconds, and the copy engine takes it from there.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch

from streamlap import _native
from streamlap.devices import Place, current_stream
from streamlap.policy import policy

LEAST = 4 << 20
"""Bytes from which on it is worth a second stream."""


@dataclass(frozen=True)
class Scratch:
    """Memory for one transfer, which keeps it until its copies are done."""

    memory: torch.Tensor
    blocks: int
    chunk_bytes: int

    @property
    def given(self) -> tuple[int, int, int]:
        """Return it as the native call takes it."""
        return self.memory.data_ptr(), self.blocks, self.chunk_bytes


_lock = threading.Lock()
_in_use: dict[int, list[tuple[weakref.ref[torch.Tensor], int]]] = {}


def scratch_for(
    place: Place, plan: _native.TreePlan, after: list[_native.Stream]
) -> Scratch | None:
    """Return scratch memory for a gather to the host; None where the kernel writes there itself.

    So it does what is small, counts, is of several moves, or finds that transfers which are under
    way have taken the policy's ``scratch_bytes``, or that the device has no memory left.

    Args:
        after: gets the stream that the memory may have been in use on until now.
    """
    nbytes = plan.range_bytes
    if not place.is_cuda or nbytes < LEAST or plan.counts or plan.move_count != 1:
        return None
    now = policy()
    stream = current_stream(place)
    if stream is None or stream.capturing():
        return None
    with _lock:
        alive = [(it, size) for it, size in _in_use.get(place.index, []) if it() is not None]
        _in_use[place.index] = alive
        if sum(size for _it, size in alive) + nbytes > now.scratch_bytes:
            return None
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{place.index}")
        except torch.OutOfMemoryError:
            return None
        alive.append((weakref.ref(memory), nbytes))
    place.took_memory()
    after.append(stream)  # site: scratch.after
    return Scratch(memory, now.pack_blocks, now.chunk_bytes)
