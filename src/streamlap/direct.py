"""The short way to the host: a tensor's bytes into new pinned memory, in one native call.

The general way looks at trees, streams, destinations and dtypes; for a small tensor on a GPU that
takes several times as long as the driver's calls.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from streamlap import _native, observe
from streamlap.arrays import Source, version_of
from streamlap.batch import Copied, Part
from streamlap.devices import Place, cuda_place, current_handle
from streamlap.errors import PoolExhausted
from streamlap.pinned import PinnedPool, pool_for, view_of
from streamlap.policy import policy
from streamlap.transfer import Transfer


def copy_out(
    place: Place,
    pool: PinnedPool,
    source: torch.Tensor,
    nbytes: int,
    chunk_bytes: int,
    timed: bool,
    *,
    after: _native.Stream | int | None,
    keep_source: Any,
) -> tuple[_native.Transfer, _native.Block]:
    """Start copying ``nbytes`` from ``source`` on into a new block of ``pool``.

    Args:
        after: a stream, or the handle of one of ``place``, after whose work so far the copy
            starts; None: it starts at once.
        keep_source: what has to live until the copy is done; the block lives by itself.

    Raises:
        PoolExhausted, CaptureError: nothing was enqueued.
    """
    handle: int | None
    if isinstance(after, _native.Stream):
        handle = after.handle if after.device == place.index else None
    else:
        handle = after
    if handle is None or observe.watched():
        return _copy_out_slowly(place, pool, source, nbytes, chunk_bytes, timed, after, keep_source)
    start = _native.copy_out
    rest = (place.index, handle, source.data_ptr(), nbytes, source.itemsize, chunk_bytes, timed)
    try:
        return start(place.engine, pool._pool(), *rest, keep_source)
    except PoolExhausted:
        if not pool._refresh_limit():
            raise
        return start(place.engine, pool._pool(), *rest, keep_source)


def _copy_out_slowly(
    place: Place,
    pool: PinnedPool,
    source: torch.Tensor,
    nbytes: int,
    chunk_bytes: int,
    timed: bool,
    after: _native.Stream | int | None,
    keep_source: Any,
) -> tuple[_native.Transfer, _native.Block]:
    """Do the same in calls of their own, which those who watch are told of."""
    block = pool._allocate(nbytes)
    if isinstance(after, int):
        after = place.runtime.adopt(place.index, after)
    submit = functools.partial(
        place.engine.submit,
        device=place.index,
        to_device=False,
        items=[(block.address, source.data_ptr(), nbytes, source.itemsize, None)],
        after=[] if after is None else [after],  # site: direct.after
        chunk_bytes=chunk_bytes,
        keep_source=keep_source,  # site: direct.keep_source
        keep_destination=block,  # site: direct.keep_destination
    )
    copy = observe.Copy(place, False, "direct" if place.is_cuda else "host", nbytes)
    return observe.submitted(submit, copy, timed), block


def usual_transfer(tensor: Any) -> Transfer | None:
    """Return the transfer of what ``to_cpu`` is mostly given: one tensor on a GPU, dense bytes.

    None sends it the general way: so does whatever would be refused there.
    """
    if type(tensor) is not torch.Tensor or not tensor.is_cuda or observe.watched():
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return None
    if is_functorch_wrapped_tensor(tensor) or not tensor.data_ptr():
        return None
    place = cuda_place(tensor.get_device())
    pool, handle = pool_for(place), current_handle(place.index)
    return start_transfer(tensor, place, pool, handle, policy().chunk_bytes)


def start_transfer(
    tensor: torch.Tensor, place: Place, pool: PinnedPool, handle: int, chunk_bytes: int
) -> Transfer:
    """Copy a contiguous tensor after what the stream ``handle`` of ``place`` was given."""
    source = Source(tensor.detach(), False, version_of(tensor))
    native, block = copy_out(
        place,
        pool,
        tensor,
        tensor.numel() * tensor.itemsize,
        chunk_bytes,
        True,
        after=handle,  # site: direct.transfer_after
        keep_source=source.tensor,  # site: direct.transfer_keeps_source
    )
    dst = view_of(block, tensor.shape, tensor.dtype)
    part = Part(native, place, "direct", [0], place.is_cuda, place)
    return Transfer([Copied(dst, False, None, part)], None, [part], [source], False)
