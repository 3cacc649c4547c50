"""Copies between devices and host: ``to_cpu``, ``to_device`` and d2l's ``copy_to_cpu``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from streamlap import watch
from streamlap.arrays import Tree, TreeSpec, flatten
from streamlap.batch import Planned
from streamlap.checks import as_count, as_dtype, as_flag, as_pin
from streamlap.devices import StreamLike, parse_device
from streamlap.direct import usual_transfer
from streamlap.errors import InvalidArgument, PoolExhausted
from streamlap.moving import Change
from streamlap.pinned import PinnedPool, as_pool
from streamlap.plan_device import plan_to_device
from streamlap.plan_host import plan_to_cpu
from streamlap.policy import policy
from streamlap.rows import tree_to_cpu, tree_to_device
from streamlap.transfer import Transfer
from streamlap.uncompiled import uncompiled


def _out_leaves(out: Tree | None, spec: TreeSpec, count: int) -> list[Any]:
    if out is None:
        return [None] * count
    leaves, out_spec = flatten(out)
    if out_spec != spec:
        raise InvalidArgument(
            f"out is a tree of another shape than the source: {out_spec} instead of {spec}"
        )
    return leaves


def _as_chunk(chunk_bytes: int | None) -> int:
    return policy().chunk_bytes if chunk_bytes is None else as_count(chunk_bytes, "chunk_bytes", 1)


@functools.partial(uncompiled, quick=usual_transfer, otherwise=lambda tree: _to_cpu(tree))
def to_cpu(
    tree: Tree,
    out: Tree | None = None,
    dtype: torch.dtype | None = None,
    pin: bool | None = None,
    stream: StreamLike = None,
    protect: bool = False,
    *,
    pool: PinnedPool | None = None,
    chunk_bytes: int | None = None,
    nonfinite: bool = False,
    timed: bool | None = None,
) -> Transfer:
    """Start copying tensors to the host; return at once.

    Args:
        tree: a tensor, a NumPy or CuPy array, anything with DLPack, or a tree of them. Leaves that
            are none of these pass through. CPU tensors are copied too.
        out: where to copy to: tensors or NumPy arrays of the same tree, shapes and dtypes.
        dtype: convert to this dtype on the source's device: float32, float16 and bfloat16 into each
            other on the way (to nearest, ties to even; a NaN stays one), others before it.
        pin: results in page-locked memory (None and True) or in ordinary memory (False).
        stream: where the sources were written; None: the caller's current stream.
        protect: make that stream wait until the sources have been read (a host source: block).
        pool: where pinned memory comes from; the process's own pool if left out.
        chunk_bytes: no single copy is longer than this; None: as :func:`configure` says. What a
            kernel writes to the host itself is not cut.
        nonfinite: count infinite and NaN elements of float32, float16 and bfloat16 leaves in the
            same pass, for :meth:`Transfer.nonfinite`. Needs page-locked results.
        timed: note on a GPU when the copy of one tensor begins and ends, for
            :meth:`Transfer.elapsed`. The notes take 2 us of the call and widen the gap between two
            copies from 2 to 8 us, so None is from ``policy().timed_bytes`` on. What is no single
            dense tensor is always timed.

    Returns:
        A :class:`Transfer`. Results are contiguous, or have the source's strides where those are
        dense; of NumPy and CuPy sources they are NumPy arrays.

    Raises:
        UnsupportedTensor: a leaf that is no plain tensor (sparse, quantized, meta, ...), or a dtype
            that values cannot be converted to.
        InvalidType: an argument of the wrong type.
        InvalidArgument: a device that is not known, or an ``out`` that does not fit.
        PoolExhausted: with ``pin=True``, no pinned memory within the limit.
        OutOfMemory: the system gives no memory, pinned or ordinary.
        CaptureError: during CUDA graph capture.

    Stream order: starts after the work that ``stream`` has been given, and, with ``out``, after
    that of the current stream, which may still read it. Never waits for a device. Thread-safe.
    """
    usual = stream is None and pool is None and protect is False and nonfinite is False
    usual = usual and (pin is None or pin is True)
    if timed is not None:
        as_flag(timed, "timed")
    if chunk_bytes is not None:
        chunk_bytes = as_count(chunk_bytes, "chunk_bytes", 1)
    if usual and out is None and dtype is None:
        transfer = usual_transfer(tree, timed, chunk_bytes)
        if transfer is not None:
            return transfer
    usual = usual and chunk_bytes is None
    return _to_cpu(tree, out, dtype, pin, stream, protect, pool, chunk_bytes, nonfinite, usual)


def _to_cpu(
    tree: Tree,
    out: Tree | None = None,
    dtype: torch.dtype | None = None,
    pin: bool | None = None,
    stream: StreamLike = None,
    protect: bool = False,
    pool: PinnedPool | None = None,
    chunk_bytes: int | None = None,
    nonfinite: bool = False,
    usual: bool = True,
) -> Transfer:
    """Do what :func:`to_cpu` does with all but the tensors of the short way.

    ``usual``: of the arguments, only ``out``, ``dtype`` and ``pin=True`` may be given.
    """
    watch.enter()
    dtype = as_dtype(dtype)
    leaves, spec = flatten(tree)
    outs = _out_leaves(out, spec, len(leaves))
    if usual and len(leaves) > 1:
        try:
            transfer = tree_to_cpu(leaves, spec, None if out is None else outs, dtype)
        except PoolExhausted:
            if pin:
                raise
            transfer = None
        if transfer is not None:
            return transfer
    pin, pool = as_pin(pin), as_pool(pool)
    protect = as_flag(protect, "protect")
    chunk = _as_chunk(chunk_bytes)
    change = Change(as_flag(nonfinite, "nonfinite"))
    planned = plan_to_cpu(leaves, outs, dtype, pin, stream, pool, chunk, None, change)
    return _started(planned, spec, False, stream, protect, nonfinite)


@uncompiled
def to_device(
    tree: Tree,
    device: str | int | torch.device,
    out: Tree | None = None,
    dtype: torch.dtype | None = None,
    stream: StreamLike = None,
    protect: bool = False,
    *,
    chunk_bytes: int | None = None,
) -> Transfer:
    """Start copying tensors to a device; return at once.

    Args:
        tree: as for :func:`to_cpu`; sources on another device are copied from there. From pinned
            memory the copy engine reads directly; ordinary memory goes through slots of it, which
            threads of our own fill; many small leaves of it are packed by the calling thread.
        device: ``"cuda:1"``, ``"cuda"`` (the current one), ``"cpu"`` or a logical ``"cpu:1"``.
        out: destinations on that device, of the same tree, shapes and dtypes.
        dtype: convert to this dtype, on the destination's device.
        stream: the consumer's stream on ``device``; None: its current stream.
        protect: block until host sources have been read; a device source's stream waits instead.
        chunk_bytes: as for :func:`to_cpu`.

    Returns:
        A :class:`Transfer`; ``wait()`` orders the consumer and returns the destination.

    Raises:
        As :func:`to_cpu`.

    Stream order: destinations are allocated on ``stream``, and the copy starts after what that
    stream has been given. Thread-safe.
    """
    watch.enter()
    dtype, protect = as_dtype(dtype), as_flag(protect, "protect")
    chunk = _as_chunk(chunk_bytes)
    target = parse_device(device)
    leaves, spec = flatten(tree)
    outs = _out_leaves(out, spec, len(leaves))
    if len(leaves) > 1 and stream is None and chunk_bytes is None and not protect:
        transfer = tree_to_device(leaves, spec, target, None if out is None else outs, dtype)
        if transfer is not None:
            return transfer
    planned = plan_to_device(leaves, outs, target, dtype, stream, chunk)
    return _started(planned, spec, True, None, protect, False)


def _started(
    planned: Planned,
    spec: TreeSpec,
    to_device: bool,
    stream: StreamLike,
    protect: bool,
    counted: bool,
) -> Transfer:
    counts = planned.counts if counted else None
    transfer = Transfer(planned.leaves, spec, planned.parts, planned.borrowed, to_device, counts)
    if protect:
        transfer.wait_source(stream)  # site: copies.protect
    return transfer


def copy_to_cpu(tree: Tree, non_blocking: bool = False) -> Tree | Transfer:
    """Copy tensors to the host: d2l's helper, overlapped.

    Args:
        tree: as for :func:`to_cpu`.
        non_blocking: return the :class:`Transfer` at once instead of the finished result. Its items
            can be indexed and iterated over as the list's, each waiting for itself only.

    Raises:
        As :func:`to_cpu`.

    Stream order: as :func:`to_cpu` on the current streams. Thread-safe.
    """
    non_blocking = as_flag(non_blocking, "non_blocking")
    transfer = to_cpu(tree)
    return transfer if non_blocking else transfer.result()
