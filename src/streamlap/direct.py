"""The short way to the host: a tensor's bytes into new pinned memory, in one native call.

The general way looks at trees, streams, destinations and dtypes; for a small tensor on a GPU that
takes several times as long as the driver's calls.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from streamlap import _native, observe
from streamlap.arrays import Source, version_of
from streamlap.batch import Copied, Part
from streamlap.devices import Place, cuda_place, current_handle
from streamlap.errors import PoolExhausted
from streamlap.pinned import PinnedPool, view_of
from streamlap.policy import Policy, policy
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
    copy = observe.Copy(place, False, _path(place), nbytes)
    return observe.submitted(submit, copy, timed), block


class TensorTransfer(Transfer):
    """The transfer of one tensor, which makes its parts when somebody asks for one of them.

    A loop that hands over one small tensor after the other spends as much time on them as on the
    driver's calls; later there is time.
    """

    _counts = None
    _spec = None
    _to_device = False
    _error: Exception | None = None
    _modified: str | None = None

    def __init__(
        self, native: _native.Transfer, place: Place, alias: torch.Tensor, version: int | None
    ) -> None:
        self._native = native
        self._place = place
        self._borrowed = [Source(alias, False, version)]
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name not in ("_leaves", "_parts", "_nbytes"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self._lock:
            if "_parts" not in self.__dict__:
                self._make_parts()
        return self.__dict__[name]

    def _make_parts(self) -> None:
        place, source = self._place, self._borrowed[0]
        assert isinstance(source, Source)
        dst = view_of(self._native.take_block(), source.tensor.shape, source.tensor.dtype)
        part = Part(self._native, place, _path(place), [0], place.is_cuda, place)
        self._leaves = [Copied(dst, False, None, part)]
        self._nbytes = dst.nbytes
        self._parts = [part]

    def _return_borrowed(self) -> None:
        self._parts  # noqa: B018 - what they are made from goes
        super()._return_borrowed()


def _path(place: Place) -> str:
    return "direct" if place.is_cuda else "host"


_USUAL = (torch.Tensor, torch.nn.Parameter)


def usual_transfer(tensor: Any) -> Transfer | None:
    """Return the transfer of what ``to_cpu`` is mostly given: one tensor on a GPU, dense bytes.

    None sends it the general way: so does whatever would be refused there.
    """
    if type(tensor) not in _USUAL or not tensor.is_cuda or observe.watched():
        return None
    place = cuda_place(tensor.get_device())
    return start_transfer(tensor, place, place.pool, current_handle(place.index), policy())


def start_transfer(
    tensor: torch.Tensor, place: Place, pool: PinnedPool, handle: int, numbers: Policy
) -> Transfer | None:
    """Copy a contiguous tensor after what the stream ``handle`` of ``place`` was given.

    None: it is not one of those that the table of torch's says everything about.
    """
    alias = tensor.detach()  # keeps the memory, whatever becomes of the caller's object
    if alias.is_neg() or alias.is_conj():
        return None
    native = _native.copy_tensor_out(
        place.engine,
        pool._pool(),
        place.index,
        handle,  # site: direct.transfer_after
        alias,  # site: direct.transfer_keeps_source
        numbers.chunk_bytes,
        numbers.timed_bytes,
    )
    return None if native is None else TensorTransfer(native, place, alias, version_of(tensor))
