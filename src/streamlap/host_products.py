"""Default products of CPU tensors: computed where their results are wanted.

On a logical CPU device a product and the memory that it would be copied to are the same memory, so
nothing is copied. Items share tasks of the worker, each task with twice as many as the one before:
a caller that is woken for every item takes a core from the products, 12 % of 50 of 672x672 on two.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from streamlap import _native, observe, watch
from streamlap.devices import Place, compute_on, place_of
from streamlap.errors import PoolExhausted
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

Results = list[torch.Tensor]


def host_products(
    x: Any, n: Any, depth: int | None, pin: bool | None, pool: PinnedPool | None
) -> Results | list[Results] | None:
    """Return the results of a call with nothing unusual in it; None sends it the general way.

    Whatever the general way would refuse goes there, to be refused.
    """
    many = isinstance(x, (list, tuple))
    inputs = list(x) if many else [x]
    if not inputs or not all(_is_usual(one) for one in inputs):
        return None
    if type(n) is not int or n < 1 or depth is not None or pool is not None:
        return None
    if (pin is not None and pin is not True) or torch.is_autocast_enabled("cpu"):
        return None
    if on_worker() or observe.watched():
        return None
    watch.enter()
    control = Control()
    lanes = []
    needed: dict[PinnedPool, int] = {}
    for position, one in enumerate(inputs):
        place = place_of(one.device, position)
        lane = _Lane(one, n, place, pool_for(place), control)
        lanes.append(lane)
        needed[lane.pool] = needed.get(lane.pool, 0) + lane.nbytes
    if not all(owner._has_room(nbytes, 1) for owner, nbytes in needed.items()):
        return None
    try:
        results = _computed(lanes, control)
    except PoolExhausted:  # the room was taken, or single results would fit and groups do not
        return None
    return results if many else results[0]


def _is_usual(x: Any) -> bool:
    if type(x) is not torch.Tensor or x.device.type != "cpu" or x.requires_grad:
        return False
    if x.layout is not torch.strided or x.dtype not in MULTIPLIED or x.is_nested:
        return False
    return x.ndim == 2 and x.shape[0] == x.shape[1] and x.nbytes > 0


def _computed(lanes: list[_Lane], control: Control) -> list[Results]:
    try:
        going = list(lanes)
        while going:  # in turns, so that all workers have something to do
            going = [lane for lane in going if lane.advance()]
            control.check()
        for lane in lanes:
            lane.finish()
        control.check()
    except BaseException as error:
        control.stop(error)  # what the workers have not begun is left out
        for lane in lanes:
            if not isinstance(error, KeyboardInterrupt):
                lane.drain()
            lane.results.clear()  # or the traceback would keep them
        control.forget()
        raise
    return [lane.results for lane in lanes]


class _Lane:
    """The items of one input, task by task; two tasks are the worker's, so that it waits for
    nobody."""

    def __init__(
        self, x: torch.Tensor, n: int, place: Place, pool: PinnedPool, control: Control
    ) -> None:
        now = policy()
        self._layout = Layout(x.nbytes, n, now.depth, now.tiny_item_bytes)
        self._x = x
        self._n = n
        self._place = place
        self._control = control
        # What is made in inference mode can be written in that mode only, by the worker too.
        self._inference = torch.is_inference_mode_enabled()
        self._flying: list[_native.Event] = []
        self._started = 0
        self._next = self._layout.group  # items of the next task
        self.pool = pool
        self.nbytes = n * self._layout.pitch
        self.results: Results = []

    def advance(self) -> bool:
        """Start the next task, once there is room for it; False when all are started."""
        if self._started == self._n:
            return False
        if len(self._flying) == 2:
            self._flying.pop(0).synchronize()  # site: host_products.room
        count = min(self._next, self._n - self._started)
        self._next *= 2
        self._start(self._started, count)
        self._started += count
        return True

    def finish(self) -> None:
        """Wait for all of them."""
        for event in self._flying:
            event.synchronize()  # site: host_products.sync

    def drain(self) -> None:
        """After an error: wait until the worker has done with the input."""
        for event in self._flying:
            with contextlib.suppress(Exception):
                event.synchronize()  # site: host_products.drain

    def _start(self, first: int, count: int) -> None:
        x, pitch = self._x, self._layout.pitch
        made: Results = []
        for begin in range(0, count, self._layout.group):  # each group has memory of its own
            items = min(self._layout.group, count - begin)
            block = self.pool._allocate(items * pitch)
            made += [view_of(block, x.shape, x.dtype, None, item * pitch) for item in range(items)]
        self.results += made
        compute_on(self._place, lambda: self._multiply(made, first), self._control.stop)
        self._flying.append(self._place.compute_stream().record())  # site: host_products.record

    def _multiply(self, made: Results, first: int) -> None:
        index = first
        try:
            with torch.inference_mode(self._inference), torch.no_grad():
                for result in made:
                    if self._control.stopped:
                        return
                    multiply(self._x, result)
                    index += 1
        except BaseException as error:
            self._control.stop(annotate(error, index))
