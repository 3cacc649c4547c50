"""The job itself: ``x.mm(x)`` again and again on a GPU, into new pinned memory.

Nothing hides what runs before the first product and after the last copy, and it runs on cold
caches: the general way's checks alone take 0.15 ms then, where 0.7 ms is all that may be lost. So
the usual call has a short way of its own, which does the same with less.
"""

from __future__ import annotations

from typing import Any

import torch

from streamlap import _native, watch
from streamlap.batch import WHOLE, Copied, Part
from streamlap.devices import cuda_place, current_handle
from streamlap.group import Slot
from streamlap.lanes import Control, InlineLane, Job, annotate
from streamlap.pinned import PinnedPool, pool_for
from streamlap.transfer import Transfer


def square(x: torch.Tensor) -> torch.Tensor:
    """Return ``x.mm(x)``: what the pipelines compute by default."""
    return x.mm(x)


class ProductLane(InlineLane):
    """Issues products on the stream that was current when it was made."""

    def __init__(self, job: Job, control: Control, stream: _native.Stream) -> None:
        super().__init__(job, None, control)
        self._stream = stream
        self._pool = job.pool or pool_for(job.place)

    def run(self, n: int) -> list[torch.Tensor]:
        """Return the results of ``n`` products; those of :meth:`add` are issued already."""
        try:
            for index in range(len(self.slots), n):
                self.issue(index)
            return self.collect()
        except BaseException as error:
            self._control.stop(error)
            self.fail(error)
            self._control.forget()
            raise

    def issue(self, index: int) -> None:
        """Issue one product and its copy."""
        job = self._job
        if index >= job.depth:
            self._make_room(index - job.depth)
        try:
            product = job.fn(job.x)
        except BaseException as error:
            annotate(error, index)
            raise
        self.add(product, index)

    def add(self, product: torch.Tensor, index: int) -> None:
        """Issue the copy of a product."""
        slot = Slot()
        try:
            slot.fill(self._copy(product, index))
        except BaseException as error:
            annotate(error, index)
            raise
        self.slots.append(slot)

    def _make_room(self, index: int) -> None:
        # The product was allocated on this stream, so once the stream waits for the copy, its
        # allocator may hand the memory to the next product. No host wait.
        transfer = self.slots[index].transfer
        assert transfer is not None
        for part in transfer._parts:
            part.native.wait_on_stream(self._stream)
            part.native.release_source()

    def _copy(self, value: torch.Tensor, index: int) -> Transfer:
        count = value.numel()
        if not count:
            return super()._copy(value, index)
        place = self._job.place
        dst = self._pool._new(value.shape, value.dtype, None, count)
        native = place.engine.submit(
            device=place.index,
            to_device=False,
            items=[(dst.data_ptr(), value.data_ptr(), count * dst.itemsize, dst.itemsize, None)],
            after=[self._stream],
            chunk_bytes=WHOLE,
            keep_source=(value, self._job.x),  # a caller's x may be another stream's memory
            keep_destination=dst,
        )
        part = Part(native, place, "direct", [0], True, place)
        copied = Copied(dst, self._job.as_numpy, None, part)
        return Transfer([copied], None, [part], [], False)


def usual_products(
    x: Any, n: Any, depth: int | None, pin: bool | None, pool: PinnedPool | None, usual_depth: int
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
    if n < 1 or depth is not None or pin not in (None, True) or pool is not None:
        return None
    if _native.enter() or not watch.started() or torch.cuda.current_device() != x.get_device():
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    place = cuda_place(x.device.index)
    if not pool_for(place)._has_room(shape[0] * shape[0] * x.itemsize, n):
        return None
    try:
        first = square(x)
    except BaseException as error:
        annotate(error, 0)
        raise
    stream = place.runtime.adopt(place.index, current_handle(place.index))
    job = Job(square, x, True, False, usual_depth, None, None, None, place)
    lane = ProductLane(job, Control(), stream)
    lane.add(first, 0)
    del first  # or the device would hold one more than the depth
    return lane.run(n)
