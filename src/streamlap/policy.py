"""The numbers that say how copies are cut, staged, grouped and given memory: all of them, here.

The defaults suit one GPU behind PCIe; where there are few cores or little memory they are smaller.
``streamlap bench tune`` measures a machine and prints the call of :func:`configure` for it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any

from streamlap import _native
from streamlap.checks import LARGEST, as_count
from streamlap.errors import InvalidArgument
from streamlap.sizes import default_pinned_limit, parse_size

KIB = 1 << 10
MIB = 1 << 20

_MOST_THREADS = 64
_MOST_BLOCKS = 1024
_SMALLEST_BLOCK = 4 * KIB


@dataclasses.dataclass(frozen=True)
class Policy:
    """The numbers in force: what :func:`policy` gives. Sizes are in bytes.

    Attributes:
        chunk_bytes: no single copy of ``to_cpu`` or ``to_device`` is longer than this; those that
            helpers of training loops start, than four times as much.
        depth: items of a pipeline in flight.
        stage_slots: slots of the ring that ordinary memory is copied through, one each way.
        stage_slot_bytes: the size of one.
        stage_threads: threads that copy between them and ordinary memory.
        populate_threads: threads that make the pages of new ordinary memory present.
        slab_threads: the same of new page-locked memory, where more of them get into each other's
            way: with 8, a GiB took 1.2 to 1.6 times as long as with 4.
        slab_bytes: pinned blocks below 1 MiB are cut from slabs of up to this size.
        small_leaf_bytes: leaves of a tree up to this size share a block.
        gather_leaves: so many small leaves of a tree, or more, are moved by one kernel; 0: never.
        move_blocks: blocks of such a kernel that writes to the host itself: see ``scratch_bytes``.
        cast_blocks: the same where elements are changed on the way.
        strided_blocks: the same where elements lie apart.
        scatter_blocks: the same where the kernel reads host memory: more reads must be under way.
        move_threads: threads of a block.
        scratch_bytes: device memory, at most, through which such kernels and casts go to the host:
            they pack into it, and a copy engine takes it from there; 0: they write there
            themselves.
        pack_blocks: blocks of a kernel that packs.
        timed_bytes: the copy of one tensor on a GPU is timed from this size on, unless a call says
            otherwise: for smaller ones the time stamps cost more than a quarter of a per cent.
        tiny_item_bytes: products up to this size leave the device in groups; 0: none do.
        graph_item_bytes: a plan of items up to this size is captured as a graph unasked; 0: none
            is. Issuing an item from Python costs about as long as copying 2 MiB (30 to 40 us at 55
            GB/s): a larger one hides what its call costs.
        panels: row panels of a pipeline's last product, of an ``x`` whose rows they divide; or
            ``"auto"``.
    """

    chunk_bytes: int = 16 * MIB
    depth: int = 4
    stage_slots: int = 16
    stage_slot_bytes: int = 4 * MIB
    stage_threads: int = 8
    populate_threads: int = 8
    slab_threads: int = 4
    slab_bytes: int = 2 * MIB
    small_leaf_bytes: int = 256 * KIB
    gather_leaves: int = 8
    move_blocks: int = 4
    cast_blocks: int = 8
    strided_blocks: int = 32
    scatter_blocks: int = 16
    move_threads: int = 512
    scratch_bytes: int = 256 * MIB
    pack_blocks: int = 264
    timed_bytes: int = 128 * MIB
    tiny_item_bytes: int = MIB
    graph_item_bytes: int = 2 * MIB
    panels: int | str = "auto"

    @property
    def bulk_chunk_bytes(self) -> int:
        """The same as ``chunk_bytes`` for copies that nobody reads in pieces.

        One H200 gave 55.0 GB/s in pieces of 64 MiB and 54.2 in pieces of 16.
        """
        return min(4 * self.chunk_bytes, LARGEST)

    def moves_together(self, leaves: int, nbytes: int) -> bool:
        """Return whether leaves are worth a kernel: many, and small on the average."""
        return 0 < self.gather_leaves <= leaves and nbytes <= leaves * self.small_leaf_bytes

    def blocks_of_move(self, gathers: bool, changes: bool, strided: bool) -> int:
        """Return how many blocks a kernel gets, by what it does."""
        if strided:
            return self.strided_blocks
        if not gathers:
            return self.scatter_blocks
        return self.cast_blocks if changes else self.move_blocks


def for_machine(cores: int, pinned_limit: int) -> Policy:
    """Return the defaults of a machine.

    Args:
        cores: how many this process may use.
        pinned_limit: bytes of page-locked memory that a pool may reserve there.
    """
    usual = Policy()
    # Half of the cores are left to whoever issues, and to the caller.
    threads = max(1, min(usual.stage_threads, cores // 2))
    # An eighth of the limit for what only helps, half of it each way: the rest is for results.
    room = min(pinned_limit // 16, _native.most_staged)
    slot = min(usual.stage_slot_bytes, max(_SMALLEST_BLOCK, _power_of_two(room // 4)))
    return dataclasses.replace(
        usual,
        stage_threads=threads,
        populate_threads=max(1, min(usual.populate_threads, max(cores // 2, min(cores, 2)))),
        slab_threads=max(1, min(usual.slab_threads, cores)),
        stage_slot_bytes=slot,
        stage_slots=max(2, min(usual.stage_slots, room // slot)),
    )


def _power_of_two(size: int) -> int:
    return 1 << max(size, 1).bit_length() - 1


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _size(least: int) -> Callable[[Any, str], int]:
    def check(value: Any, what: str) -> int:
        if isinstance(value, str):
            value = parse_size(value, what)
        return as_count(value, what, least)

    return check


def _number(least: int, most: int) -> Callable[[Any, str], int]:
    def check(value: Any, what: str) -> int:
        count = as_count(value, what, least)
        if count > most:
            raise InvalidArgument(f"{what} must be at most {most}, not {count}")
        return count

    return check


def _threads(value: Any, what: str) -> int:
    count = _number(32, 512)(value, what)
    if count % 32:
        raise InvalidArgument(f"{what} must be a multiple of 32, not {count}")
    return count


def _panels(value: Any, what: str) -> int | str:
    if isinstance(value, str):
        if value != "auto":
            raise InvalidArgument(f"{what} must be 'auto' or a number from 1 up, not {value!r}")
        return value
    return as_count(value, what, 1)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "chunk_bytes": _size(1),
    "depth": _number(1, 1 << 20),
    "stage_slots": _number(2, 1 << 16),
    "stage_slot_bytes": _size(_SMALLEST_BLOCK),
    "stage_threads": _number(1, _MOST_THREADS),
    "populate_threads": _number(1, _MOST_THREADS),
    "slab_threads": _number(1, _MOST_THREADS),
    "slab_bytes": _size(_SMALLEST_BLOCK),
    "small_leaf_bytes": _size(0),
    "gather_leaves": _number(0, 1 << 20),
    "move_blocks": _number(1, _MOST_BLOCKS),
    "cast_blocks": _number(1, _MOST_BLOCKS),
    "strided_blocks": _number(1, _MOST_BLOCKS),
    "scatter_blocks": _number(1, _MOST_BLOCKS),
    "pack_blocks": _number(1, _MOST_BLOCKS),
    "scratch_bytes": _size(0),
    "move_threads": _threads,
    "timed_bytes": _size(0),
    "tiny_item_bytes": _size(0),
    "graph_item_bytes": _size(0),
    "panels": _panels,
}

_lock = threading.Lock()
_current: Policy | None = None


def policy() -> Policy:
    """Return the numbers in force. Thread-safe."""
    return _current or _first()


def _first() -> Policy:
    global _current
    made = for_machine(usable_cores(), default_pinned_limit())
    with _lock:
        if _current is None:
            _current = made
            _tell(made)
        return _current


class Configured:
    """What :func:`configure` gives: leave it alone, or restore at the end of a ``with`` block."""

    def __init__(self, before: dict[str, Any], after: Policy) -> None:
        self._before = before
        self._after = after

    def __enter__(self) -> Policy:
        return self._after

    def __exit__(self, *_error: object) -> None:
        _apply(self._before)


def configure(**changes: Any) -> Configured:
    """Change numbers of the policy, for the whole process, from the next call on.

    Args:
        changes: fields of :class:`Policy`. Sizes are ints or strings like ``"4MiB"``.

    Returns:
        A context manager: ``with streamlap.configure(depth=2): ...`` gives these fields back the
        values that they had. Without ``with`` they stay.

    Raises:
        InvalidArgument: an unknown name, a value out of range, or a ring or a slab that is larger
            than the default limit of pinned memory. Nothing was changed.
        InvalidType: a value of the wrong type.

    Blocks of several threads that change the same field undo each other. Thread-safe. What exists
    already (pools, a pipeline that runs) keeps what it was made with.
    """
    unknown = [name for name in changes if name not in _CHECKS]
    if unknown:
        raise InvalidArgument(
            f"the policy has no {unknown[0]!r}; there is {', '.join(sorted(_CHECKS))}"
        )
    checked = {name: _CHECKS[name](value, name) for name, value in changes.items()}
    return Configured(*_apply(checked, fits=True))


def _apply(changes: dict[str, Any], fits: bool = False) -> tuple[dict[str, Any], Policy]:
    global _current
    policy()
    with _lock:
        assert _current is not None
        before = {name: getattr(_current, name) for name in changes}
        after = dataclasses.replace(_current, **changes)
        if fits:
            _check_fits(after, changes)
        _current = after
        _tell(after)
    return before, after


def _tell(numbers: Policy) -> None:
    """Hand on what is needed where no line of Python should be run to ask."""
    _native.use_populate_threads(numbers.slab_threads)
    _native.use_short_way(numbers.chunk_bytes, numbers.timed_bytes)


def _check_fits(after: Policy, changes: dict[str, Any]) -> None:
    limit = default_pinned_limit()
    ring = after.stage_slots * after.stage_slot_bytes
    if {"stage_slots", "stage_slot_bytes"} & changes.keys():
        said = f"a ring of {after.stage_slots} slots of {after.stage_slot_bytes} bytes takes {ring}"
        if ring > limit:
            raise InvalidArgument(
                f"{said}, and pinned memory is limited to {limit} (STREAMLAP_PINNED_LIMIT)"
            )
        if ring > _native.most_staged:
            raise InvalidArgument(f"{said}, and may take {_native.most_staged} each way")
    if after.slab_bytes > limit and "slab_bytes" in changes:
        raise InvalidArgument(
            f"a slab of {after.slab_bytes} bytes is larger than the limit of pinned memory, "
            f"{limit} (STREAMLAP_PINNED_LIMIT)"
        )
