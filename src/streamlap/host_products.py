"""Small default products of CPU tensors: computed where their results are wanted.

On a logical CPU device a product and the memory that it is copied to are the same memory. Where a
product takes microseconds, the copy and two changes of threads an item cost more than the product.
So a group of them is one task of the worker, and each is computed straight into its result.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from streamlap import _native, observe, watch
from streamlap.devices import Place, compute_on, place_of
from streamlap.grouped import Layout, multiply
from streamlap.lanes import Control, annotate
from streamlap.modes import on_worker
from streamlap.pinned import PinnedPool, pool_for, view_of
from streamlap.policy import policy

MULTIPLIED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


def small_products(
    x: Any, n: Any, depth: int | None, pin: bool | None, pool: PinnedPool | None
) -> list[torch.Tensor] | None:
    """Return the results of a call with nothing unusual in it; None sends it the general way.

    Whatever the general way would refuse goes there, to be refused.
    """
    if type(x) is not torch.Tensor or x.device.type != "cpu" or x.requires_grad:
        return None
    if x.layout is not torch.strided or x.dtype not in MULTIPLIED or x.is_nested:
        return None
    shape, nbytes = x.shape, x.nbytes
    tiny = policy().tiny_item_bytes
    if len(shape) != 2 or shape[0] != shape[1] or not 0 < nbytes <= tiny:
        return None
    if type(n) is not int or n < 1 or depth is not None or pool is not None:
        return None
    if (
        (pin is not None and pin is not True)
        or torch.is_autocast_enabled("cpu")
        or on_worker()
        or observe.watched()
    ):
        return None
    watch.enter()
    place = place_of(x.device)
    own_pool = pool_for(place)
    layout = Layout(nbytes, n, policy().depth, tiny)
    if not own_pool._has_room(layout.group * layout.pitch, layout.groups):
        return None
    return _Groups(x, n, layout, place, own_pool).results()


class _Groups:
    """The groups of one call; two at once are the worker's, so that it waits for nobody."""

    def __init__(
        self, x: torch.Tensor, n: int, layout: Layout, place: Place, pool: PinnedPool
    ) -> None:
        self._x = x
        self._n = n
        self._layout = layout
        self._place = place
        self._pool = pool
        self._results: list[torch.Tensor] = []
        self._control = Control()

    def results(self) -> list[torch.Tensor]:
        """Compute all of them."""
        group = self._layout.group
        flying: list[_native.Event] = []
        try:
            for first in range(0, self._n, group):
                if len(flying) == 2:
                    flying.pop(0).synchronize()  # site: host_products.room
                    self._control.check()
                flying.append(self._start(first, min(group, self._n - first)))
            for event in flying:
                event.synchronize()  # site: host_products.sync
            self._control.check()
        except BaseException as error:
            self._control.stop(error)  # what the worker has not begun is left out
            if not isinstance(error, KeyboardInterrupt):
                for event in flying:
                    with contextlib.suppress(Exception):
                        event.synchronize()  # site: host_products.drain
            self._results.clear()  # or the traceback would keep them
            self._control.forget()
            raise
        return self._results

    def _start(self, first: int, count: int) -> _native.Event:
        layout, stream = self._layout, self._place.compute_stream()
        block = self._pool._allocate(count * layout.pitch)
        made = [
            view_of(block, self._x.shape, self._x.dtype, None, item * layout.pitch)
            for item in range(count)
        ]
        self._results += made
        compute_on(self._place, lambda: self._multiply(made, first), self._control.stop)
        return stream.record()  # site: host_products.record

    def _multiply(self, made: list[torch.Tensor], first: int) -> None:
        index = first
        try:
            with torch.no_grad():
                for result in made:
                    if self._control.stopped:
                        return
                    multiply(self._x, result)
                    index += 1
        except BaseException as error:
            self._control.stop(annotate(error, index))
