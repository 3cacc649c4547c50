"""The short way to the host: a tensor's bytes into new pinned memory, in one native call.

The general way looks at trees, streams, destinations and dtypes; for a small tensor on a GPU that
takes several times as long as the driver's calls.
"""

from __future__ import annotations

from typing import Any

import torch

from streamlap import _native, observe
from streamlap.arrays import Source, version_of
from streamlap.batch import Copied, Part
from streamlap.devices import Place, cuda_place, current_handle
from streamlap.errors import PoolExhausted
from streamlap.pinned import PinnedPool, pool_for
from streamlap.policy import policy
from streamlap.transfer import Transfer


def copy_out(
    place: Place,
    pool: PinnedPool,
    handle: int,
    source: torch.Tensor,
    nbytes: int,
    chunk_bytes: int,
    timed: bool,
    keep: Any,
) -> tuple[_native.Transfer, _native.Block]:
    """Start copying ``nbytes`` from ``source`` on, after what the stream ``handle`` was given.

    Args:
        keep: what has to live until the copy is done; the block lives by itself.

    Raises:
        PoolExhausted, CaptureError: nothing was enqueued.
    """
    start = _native.copy_out
    rest = (place.index, handle, source.data_ptr(), nbytes, source.itemsize, chunk_bytes, timed)
    try:
        return start(place.engine, pool._pool(), *rest, keep)
    except PoolExhausted:
        if not pool._refresh_limit():
            raise
        return start(place.engine, pool._pool(), *rest, keep)


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
    place = cuda_place(tensor.get_device())
    pool, handle = pool_for(place), current_handle(place.index)
    return start_transfer(tensor, place, pool, handle, policy().chunk_bytes)


def start_transfer(
    tensor: torch.Tensor, place: Place, pool: PinnedPool, handle: int, chunk_bytes: int
) -> Transfer:
    """Copy a contiguous tensor after what the stream ``handle`` of ``place`` was given."""
    source = Source(tensor.detach(), False, version_of(tensor))
    count = tensor.numel()
    nbytes = count * tensor.itemsize
    native, block = copy_out(place, pool, handle, tensor, nbytes, chunk_bytes, True, source.tensor)
    dst = torch.frombuffer(block, dtype=tensor.dtype, count=count)
    if tensor.ndim != 1:
        dst = dst.view(tensor.shape)
    part = Part(native, place, "direct", [0], place.is_cuda, place)
    return Transfer([Copied(dst, False, None, part)], None, [part], [source], False)
