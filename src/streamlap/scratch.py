"""Device memory through which a gather goes on its way to the host.

A kernel that writes page-locked memory reaches 95 % of what a copy engine does. One that packs into
device memory is done after some microseconds, and the copy engine takes it from there.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from dataclasses import dataclass

import torch

from streamlap import _native
from streamlap.batch import on_stream
from streamlap.devices import Place
from streamlap.policy import policy

LEAST = 4 << 20
"""Bytes from which on it is worth a second stream."""

PAUSE = 60.0
"""Seconds without another try after the device had no memory: torch has then emptied its cache, and
would do so each time."""


@dataclass(frozen=True)
class Scratch:
    """Memory for one transfer, which keeps it until it is known to be done."""

    memory: torch.Tensor
    blocks: int
    chunk_bytes: int

    @property
    def given(self) -> tuple[int, int, int]:
        """Return it as the native call takes it."""
        return self.memory.data_ptr(), self.blocks, self.chunk_bytes


class _InUse:
    """What transfers of one device have; each is known by a number."""

    def __init__(self) -> None:
        # Re-entrant, because a collection of garbage inside may run anything.
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._reserved: dict[int, int] = {}
        self._taken: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._again = 0.0

    def reserve(self, nbytes: int, most: int) -> int | None:
        """Return the number of ``nbytes`` that may be taken now; None: there is too much."""
        with self._lock:
            for number in [key for key, (memory, _) in [*self._taken.items()] if memory() is None]:
                self._taken.pop(number, None)
            taken = sum(size for _, size in [*self._taken.values()])
            if taken + sum([*self._reserved.values()]) + nbytes > most:
                return None
            if time.monotonic() < self._again:
                return None
            number = next(self._numbers)
            self._reserved[number] = nbytes
            return number

    def take(self, number: int, memory: torch.Tensor) -> None:
        """Note the memory that was reserved for."""
        with self._lock:
            self._taken[number] = (weakref.ref(memory), self._reserved[number])

    def settle(self, number: int, failed: bool) -> None:
        """End the reservation, taken or not."""
        with self._lock:
            self._reserved.pop(number, None)
            if failed:
                self._again = time.monotonic() + PAUSE


_in_use: dict[int, _InUse] = {}


def scratch_for(
    place: Place,
    plan: _native.TreePlan,
    producer: _native.Stream | None,
    chunk_bytes: int | None = None,
) -> Scratch | None:
    """Return scratch memory for a gather to the host; None where the kernel writes there itself.

    So it does what is small, counts, is of several moves, or finds that transfers which are not
    known to be done have taken the policy's ``scratch_bytes``, or that the device has no memory.

    Args:
        producer: the stream that the gather comes after. The memory is allocated there, so that
            what it was used for before is over by then.
        chunk_bytes: no single copy from it is longer; None: as the policy says.
    """
    nbytes = plan.range_bytes
    if not place.is_cuda or nbytes < LEAST or plan.counts or plan.move_count != 1:
        return None
    now = policy()
    in_use = _in_use.get(place.index) or _in_use.setdefault(place.index, _InUse())
    number = in_use.reserve(nbytes, now.scratch_bytes)
    if number is None:
        return None
    failed = False
    try:
        with on_stream(producer, place):  # site: scratch.on_producer
            memory = _new(place, nbytes)
        if memory is None:
            failed = True
            return None
        in_use.take(number, memory)
    finally:
        in_use.settle(number, failed)
    place.took_memory()
    return Scratch(memory, now.pack_blocks, chunk_bytes or now.chunk_bytes)


def _new(place: Place, nbytes: int) -> torch.Tensor | None:
    # The allocator may ask the driver, which must not break a capture of another thread.
    held = place.runtime.hold_device(place.index)
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{place.index}")
    except RuntimeError:  # out of memory, or of use
        return None
    finally:
        del held
