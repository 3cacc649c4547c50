"""``pipelined_map``'s loop: a window of items in flight behind a generator."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from streamlap import _native, observe
from streamlap.arrays import Tree, flatten
from streamlap.devices import (
    Place,
    compute_on,
    cuda_in_use,
    current_stream,
    place_of,
    require_no_capture,
)
from streamlap.group import Slot
from streamlap.lanes import Control, Stopped, annotate, start_copy
from streamlap.modes import CallerModes, on_worker
from streamlap.pinned import PinnedPool
from streamlap.transfer import Transfer
from streamlap.uncompiled import uncompiled


def map_items(
    fn: Callable[[Any], Any],
    items: Iterator[Any],
    depth: int,
    pin: bool | None,
    dtype: torch.dtype | None,
    pool: PinnedPool | None,
) -> Generator[Tree, None, None]:
    """Yield results in order with at most ``depth`` items in flight."""
    window: deque[Slot] = deque()
    control = Control()
    index = 0
    more = True
    wait_for_rest = True
    slot: Slot | None
    try:
        while True:
            while more and len(window) < depth:
                slot = Slot()
                try:
                    item = next(items)
                except StopIteration:
                    more = False
                    break
                except Exception as error:
                    slot.fill(None, _raised(error, index))
                    more = False
                else:
                    more = _issue(slot, fn, item, index, control, pin, dtype, pool)
                    del item
                window.append(slot)
                index += 1
            if not window:
                return
            slot = None  # a generator that sleeps must keep nothing alive
            yield window.popleft().get().result()
    except KeyboardInterrupt:
        wait_for_rest = False
        raise
    finally:
        control.stop()
        if wait_for_rest and not _native.ending() and not _native.forked():
            for slot in window:
                slot.settle()  # site: mapping.wait_for_worker
                if slot.transfer is not None:
                    slot.transfer._settle()  # site: mapping.settle
        window.clear()


def _raised(error: BaseException, index: int) -> BaseException:
    """Return what an item raised, as it can leave a generator."""
    if isinstance(error, StopIteration):
        wrapped = RuntimeError("fn raised StopIteration, which would end the loop around it")
        wrapped.__cause__ = error
        error = wrapped
    return annotate(error, index)


def _worker_place(item: Any) -> Place | None:
    """Return the logical device whose worker computes an item; None: the consumer's thread."""
    if on_worker():
        return None
    for leaf in flatten(item)[0]:
        if isinstance(leaf, torch.Tensor):
            place = place_of(leaf.device)
            return None if place.is_cuda else place
        if hasattr(leaf, "__dlpack_device__") and not hasattr(leaf, "ctypes"):
            return None
    return None if cuda_in_use() else place_of(torch.device("cpu"))


def _observed(index: int) -> contextlib.AbstractContextManager[Any]:
    if not observe.watched():
        return contextlib.nullcontext()
    on_gpu = cuda_in_use() and not on_worker()
    return observe.compute(place_of(torch.device("cuda" if on_gpu else "cpu")), index)


@uncompiled
def _issue(
    slot: Slot,
    fn: Callable[[Any], Any],
    item: Any,
    index: int,
    control: Control,
    pin: bool | None,
    dtype: torch.dtype | None,
    pool: PinnedPool | None,
) -> bool:
    """Issue one item; False when no more should follow."""
    worker = _worker_place(item)
    if worker is None:
        if cuda_in_use():
            place = place_of(torch.device("cuda"))
            require_no_capture(current_stream(place), "pipelined_map()")
        try:
            with torch.no_grad(), _observed(index):
                value = fn(item)
            slot.fill(start_copy(value, None, pin, dtype, pool, None))
        except Exception as error:
            slot.fill(None, _raised(error, index))
            return False
        return True

    modes = CallerModes()

    def compute_and_copy() -> Transfer:
        with observe.compute(worker, index, worker.compute_stream()):
            value = fn(item)
        return start_copy(value, None, pin, dtype, pool, worker)

    def compute() -> None:
        if _native.ending():
            return
        try:
            control.check()
            slot.fill(modes.run(compute_and_copy))
        except Stopped as error:
            # Its traceback would keep this frame, which has the slot: a circle.
            slot.fill(None, error.with_traceback(None))
        except BaseException as error:
            control.stop(Stopped("an earlier item failed"))
            slot.fill(None, _raised(error, index))

    compute_on(worker, compute, lambda error: slot.fill(None, annotate(error, index)))
    return True
