"""The job itself: ``x.mm(x)`` again and again on a GPU, into new pinned memory.

Nothing hides what runs before the first product and after the last copy, and it runs on cold
caches: the general way's checks alone take 0.15 ms then, where 0.7 ms is all that may be lost. So
the usual call has a short way of its own, which does the same with less.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from streamlap import _native, observe, watch
from streamlap.batch import WHOLE, Copied, Part
from streamlap.devices import Place, cuda_place, current_handle
from streamlap.direct import copy_out
from streamlap.errors import PoolExhausted
from streamlap.grouped import Layout, grouped_products
from streamlap.lanes import Control, InlineLane, Job, annotate
from streamlap.panels import Ends, Panelled
from streamlap.pinned import PinnedPool, pool_for, view_of
from streamlap.policy import policy
from streamlap.transfer import Transfer

Flying = _native.Transfer | Panelled

MULTIPLIED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
)
"""The dtypes that torch multiplies matrices of on a GPU."""


def square(x: torch.Tensor) -> torch.Tensor:
    """Return ``x.mm(x)``: what the pipelines compute by default."""
    return x.mm(x)


def _start_copy(
    product: torch.Tensor,
    x: torch.Tensor,
    place: Place,
    stream: _native.Stream,
    pool: PinnedPool,
    timed: bool,
) -> tuple[_native.Transfer, torch.Tensor]:
    """Enqueue the copy of a product, whole, after what ``stream`` has been given.

    ``timed`` where somebody may ask how long it took: it leaves a gap between two copies.
    """
    nbytes = product.numel() * product.itemsize
    if place.checked:
        place.took_memory()
        place.runtime.declare(stream, product.data_ptr(), nbytes, True)
    native, block = copy_out(
        place,
        pool,
        product,
        nbytes,
        WHOLE,
        timed,
        after=stream,  # site: product.after_stream
        # a caller's x may be another stream's memory
        keep_source=(product, x),  # site: product.keep_source
    )
    return native, view_of(block, product.shape, product.dtype)


def _make_room(native: Flying, stream: _native.Stream) -> None:
    """Let go of a product that is still being copied, without a host wait.

    It was allocated on ``stream``, so once that stream waits for the copy, its allocator may hand
    the memory to the next product.
    """
    native.wait_on_stream(stream)  # site: product.make_room
    native.release_source()  # site: product.release_source


class ProductLane(InlineLane):
    """Products as one lane of several, or behind a handle."""

    def __init__(
        self, job: Job, control: Control, stream: _native.Stream, n: int, timed: bool
    ) -> None:
        super().__init__(job, None, control)
        self._n = n
        self._growth: _native.Growth | None = None
        self._timed = timed
        self._stream = stream
        self._pool = job.pool or pool_for(job.place)

    def fail(self, error: BaseException) -> None:
        """As every lane; and no more memory is made."""
        if self._growth is not None:
            self._growth.cancel()
        super().fail(error)

    def _make_room(self, index: int) -> None:
        transfer = self.slots[index].transfer
        assert transfer is not None
        for part in transfer._parts:
            _make_room(part.native, self._stream)
            observe.stream_waits(self._stream, part.place, part.native)

    def _copy(self, value: torch.Tensor, index: int) -> Transfer:
        if not value.numel():
            return super()._copy(value, index)
        if index == 0:
            self._growth = self._pool._grow_ahead(value.nbytes, self._n)
        place = self._job.place
        try:
            native, dst = _start_copy(
                value, self._job.x, place, self._stream, self._pool, self._timed
            )
        except PoolExhausted:
            if self._job.pin:
                raise
            return super()._copy(value, index)
        part = Part(native, place, "direct", [0], True, place)
        copied = Copied(dst, self._job.as_numpy, None, part)
        return Transfer([copied], None, [part], [], False)


def usual_products(
    x: Any,
    n: Any,
    depth: int | None,
    pin: bool | None,
    pool: PinnedPool | None,
    usual_depth: int,
    panels: int | None = None,
) -> list[torch.Tensor] | None:
    """Return the results of a call with nothing unusual in it; None sends it the general way.

    Whatever the general way would refuse goes there, to be refused. Only what must be known before
    the first product comes before it.
    """
    if type(x) is not torch.Tensor or not x.is_cuda or x.requires_grad or type(n) is not int:
        return None
    shape = x.shape
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0] or x.layout is not torch.strided:
        return None
    if x.dtype not in MULTIPLIED or x.is_nested:
        return None
    if panels and shape[0] % panels:
        return None
    if n < 1 or depth is not None or (pin is not None and pin is not True) or pool is not None:
        return None
    if _native.enter() or not watch.started() or observe.watched():
        return None
    if torch.cuda.current_device() != x.get_device():
        with torch.cuda.device(x.get_device()):
            return usual_products(x, n, depth, pin, pool, usual_depth, panels)
    if torch.cuda.is_current_stream_capturing():
        return None
    place = cuda_place(x.get_device())
    own_pool = pool_for(place)
    nbytes = shape[0] * shape[0] * x.itemsize
    # Autocast would multiply in another dtype, but for a product into given memory.
    tiny = policy().tiny_item_bytes
    whole = panels is None or panels <= 1
    try:
        if whole and nbytes <= tiny and not torch.is_autocast_enabled("cuda"):
            layout = Layout(nbytes, n, usual_depth, tiny)
            if own_pool._has_room(layout.group * layout.pitch, layout.groups):
                return grouped_products(x, n, layout, place, own_pool)
        if own_pool._has_room(nbytes, n):
            return _run(x, n, usual_depth, place, own_pool, panels)
    except PoolExhausted:  # another thread took the room
        if pin:
            raise
    return None


def _run(
    x: torch.Tensor, n: int, depth: int, place: Place, pool: PinnedPool, panels: int | None = None
) -> list[torch.Tensor]:
    flying: list[tuple[Flying | None, torch.Tensor]] = []
    ends = Ends(x, n, panels) if n == 1 else None  # else it would keep the first product waiting
    stream: _native.Stream | None = None
    native: Flying | None = None
    dst: torch.Tensor | None = None
    product: torch.Tensor | None = None
    growth: _native.Growth | None = None
    index = 0
    try:
        for index in range(n):
            if stream is not None and index >= depth:
                native = flying[index - depth][0]
                assert native is not None
                _make_room(native, stream)
            if ends is not None and index == ends.cut:
                first = stream is None
                stream = stream or place.runtime.adopt(place.index, current_handle(place.index))
                flying.append(ends.start(x, place, stream, pool))
                if first:
                    growth = pool._grow_ahead(x.nbytes, n - 1)
                continue
            product = square(x)
            if stream is None:  # only now: the first product has begun
                stream = place.runtime.adopt(place.index, current_handle(place.index))
                growth = pool._grow_ahead(product.nbytes, n)
            flying.append(_start_copy(product, x, place, stream, pool, False))
            product = None  # or the device would hold one more than the depth
            ends = ends or Ends(x, n, panels)
        assert ends is not None
        ends.issued(stream)
        for index in range(n):
            native, dst = flying[index]
            assert native is not None
            assert dst is not None
            native.sync()  # site: product.sync
            ends.copied(index)
            flying[index] = (None, dst)  # the transfer dies while the next one is waited for
    except BaseException as error:
        annotate(error, index)
        if not isinstance(error, KeyboardInterrupt):
            _drain(flying)  # site: product.drain
        flying.clear()
        native = dst = product = None  # the traceback keeps this frame
        raise
    finally:
        if growth is not None:
            growth.cancel()
    ends.end(x, stream)
    return [result for _transfer, result in flying]


def _drain(flying: list[tuple[Flying | None, torch.Tensor]]) -> None:
    for native, _dst in flying:
        if native is not None:
            with contextlib.suppress(Exception):
                native.sync()  # site: product.drain_sync
