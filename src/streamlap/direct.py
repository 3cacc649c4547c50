"""The short way to the host: a tensor's bytes into new pinned memory, in one native call.

The general way looks at trees, streams, destinations and dtypes; for a small tensor on a GPU that
takes several times as long as the driver's calls.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from streamlap import _native, observe, watch
from streamlap.arrays import Source, version_of
from streamlap.batch import Copied, Part
from streamlap.devices import Place
from streamlap.errors import PoolExhausted
from streamlap.pinned import PinnedPool
from streamlap.serving import Serving, current
from streamlap.transfer import Transfer
from streamlap.uncompiled import uncompiled


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

    A loop that hands over one small tensor after the other would spend as much time on them as on
    the driver's calls; later there is time. What they are was settled by the call.
    """

    _counts = None
    _spec = None
    _to_device = False
    _error: Exception | None = None
    _modified: str | None = None
    _dst: torch.Tensor | None = None

    def __init__(
        self,
        made: tuple[_native.Transfer, Place, torch.Tensor | torch.dtype, int | None, bool],
    ) -> None:
        """``made``: what the native short way has given; once it is done, a dtype for a source."""
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if name not in ("_parts", "_leaves", "_borrowed", "_lock", "_nbytes"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _native.require_usable()  # in a forked child the lock may be another thread's for ever
        with _making:
            if "_parts" not in self.__dict__:
                self._make_parts()
        return self.__dict__[name]

    def done(self) -> bool:
        """Return whether the copy is done; see :meth:`Transfer.done`."""
        known = self._done()
        return super().done() if known is None else known

    def elapsed(self) -> float:
        """Return the seconds that the copy took; see :meth:`Transfer.elapsed`."""
        made = self.__dict__.get("_made")
        if made is None or not self._done():
            return super().elapsed()
        native: _native.Transfer = made[0]
        return native.elapsed_from(native)

    @uncompiled
    def _done(self) -> bool | None:
        """Return whether it is done, without making its parts; None: they have to say."""
        made = self.__dict__.get("_made")
        if made is None:
            return None
        native, place, source, version, inference = made
        try:
            if not native.done():
                return False
        except Exception:
            return None
        if isinstance(source, torch.Tensor):
            if version is not None and version_of(source) != version:
                return None
            with _making:
                if self.__dict__.get("_made") is not made:
                    return None
                self._made = (native, place, source.dtype, None, inference)
            native.release_all()  # site: direct.release_all
        return True

    @uncompiled
    def _make_parts(self) -> None:
        native, place, source, version, inference = self._made
        if self._dst is None:
            # As the call would have made it, whoever asks.
            with torch.inference_mode(inference):
                dst = native.take_result()
                dtype = source if isinstance(source, torch.dtype) else source.dtype
                if dst.dtype is not dtype:  # there are several of one byte
                    dst = dst.view(dtype)
            self._dst = dst
        part = Part(native, place, _path(place), [0], place.is_cuda, place)
        if "_parts" in self.__dict__:  # a finalizer that ran just now has asked, too
            return
        self._lock = threading.Lock()
        self._leaves = [Copied(self._dst, False, None, part)]
        self._borrowed = (
            [Source(source, False, version)] if isinstance(source, torch.Tensor) else []
        )
        self._nbytes = self._dst.nbytes
        self._parts = [part]
        del self._dst
        source = self.__dict__.pop("_made")[2]  # what is borrowed is let go of with the rest
        if isinstance(source, torch.dtype):  # a finalizer that ran just now has seen it done
            self._borrowed = []


# Re-entrant: a collection of garbage inside may run anything.
_making = threading.RLock()


def _path(place: Place) -> str:
    return "direct" if place.is_cuda else "host"


def usual_transfer(
    tensor: Any, timed: bool | None = None, chunk_bytes: int | None = None
) -> Transfer | None:
    """Return the transfer of what ``to_cpu`` is mostly given: one tensor on a GPU, dense bytes.

    None sends it the general way: so does whatever would be refused there.
    """
    if observe.recorder is not None or observe.ranges:
        return None
    serving = current.get()
    made = _start_short(serving.short_handle, tensor, timed, chunk_bytes)
    if made is None:
        return None
    if type(made) is not tuple:
        try:
            made = _start_again(made, serving, tensor, timed, chunk_bytes)
        except PoolExhausted:  # the general way asks for the limit anew, or takes other memory
            made = None
        if made is None:
            return None
    transfer = _new(TensorTransfer)  # without a frame for __init__
    transfer._made = made
    return transfer


_new = object.__new__
_start_short = _native.start_short


def _start_again(
    made: int | bool,
    serving: Serving,
    tensor: torch.Tensor,
    timed: bool | None,
    chunk_bytes: int | None,
) -> Any:
    """Start it on a device that is new to the short way, or raise what kept it from starting."""
    if made is not False:
        watch.enter()
        place = serving.place(made, cuda=True)
        serving.short.add(made, place.engine, place.pool._pool(), place)
    return serving.short.start(tensor, timed, chunk_bytes)
