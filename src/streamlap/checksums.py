"""A number for a tensor's bytes, made where the tensor is."""

from __future__ import annotations

from typing import Any

from streamlap import _native, watch
from streamlap.arrays import as_source, is_plain
from streamlap.batch import on_stream
from streamlap.devices import place_of
from streamlap.errors import InvalidType
from streamlap.pinned import pool_for
from streamlap.plan_host import producer_of
from streamlap.policy import policy
from streamlap.uncompiled import uncompiled

BLOCKS = 64
"""Enough to read a device's memory faster than its link to the host."""


@uncompiled
def checksum(tensor: Any) -> int:
    """Return a 64-bit number that depends on every byte of a tensor, and on its place.

    Two tensors whose elements have the same bytes in the same order have the same number, wherever
    they are and however they lie. It finds faults, and is no signature.

    Args:
        tensor: a tensor of torch, an array of NumPy or CuPy, or anything with DLPack.

    Raises:
        InvalidType: no tensor and no array.
        UnsupportedTensor, CaptureError: as :func:`to_cpu`.

    Stream order: after the work of the current stream; blocks until the number is there.
    Thread-safe.
    """
    watch.enter()
    source = as_source(tensor)
    if source is None:
        raise InvalidType(f"a checksum is of a tensor or an array, not of {type(tensor).__name__}")
    data = source.tensor
    place = place_of(data.device)
    producer = producer_of(source.stream if place.is_cuda else None, place, "checksum()")
    if not (data.is_contiguous() and is_plain(data)):
        with on_stream(producer, place):
            data = data.resolve_conj().resolve_neg().contiguous()
    nbytes = data.numel() * data.itemsize
    if not nbytes:
        return _native.checksum_of(0, 0)
    block = pool_for(place)._allocate(8 * BLOCKS)
    native = _native.submit_checksum(
        place.engine,
        device=place.index,
        data=data.data_ptr(),
        nbytes=nbytes,
        sums=block.address,
        blocks=BLOCKS,
        threads=policy().move_threads,
        after=[] if producer is None else [producer],  # site: checksums.after
        keep_source=data,  # site: checksums.keep_source
        keep_destination=block,  # site: checksums.keep_destination
    )
    _wait(native)
    total = sum(memoryview(block)[: 8 * BLOCKS].cast("Q"))
    return _native.checksum_of(total % (1 << 64), nbytes)


def _wait(native: _native.Transfer) -> None:
    native.sync()  # site: checksums.wait
