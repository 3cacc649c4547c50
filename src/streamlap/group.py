"""The handle of a pipeline that has not finished: a transfer whose items are transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from streamlap import _native, observe
from streamlap.arrays import Tree
from streamlap.batch import Part
from streamlap.checks import as_callable, as_seconds
from streamlap.devices import StreamLike
from streamlap.errors import InvalidArgument, TransferTimeout
from streamlap.serving import help_simulations
from streamlap.transfer import Transfer
from streamlap.watch import require_alive, run_callback


class _Taken(Exception):
    """Why a slot is empty: its only user has its result."""


_TAKEN = _Taken()

_LOCK = id(_TAKEN)
"""What a checker knows the slots' lock by."""


class Slot:
    """The place of one item: filled with its transfer, or with the error that stopped it."""

    # One condition for all: waits are few, slots are many.
    _changed = threading.Condition()

    def __init__(self) -> None:
        self._transfer: Transfer | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []

    def fill(self, transfer: Transfer | None, error: BaseException | None = None) -> None:
        """Deliver; the first time counts."""
        with self._changed:
            if self._transfer is not None or self._error is not None:
                return
            _native.released(_LOCK)
            self._transfer, self._error = transfer, error
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            _native.watch_post(callback)  # not here: this may be a worker in its work

    @property
    def filled(self) -> bool:
        return self._transfer is not None or self._error is not None

    @property
    def transfer(self) -> Transfer | None:
        return self._transfer

    @property
    def error(self) -> BaseException | None:
        return self._error

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until the item is issued, or will never be; False when the time is over."""
        _native.require_usable()
        if self.filled:
            _native.acquired(_LOCK)
            return True
        with observe.waiting("compute"):
            return self._settle(timeout)  # site: group.settle

    def _settle(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.filled:
            # In slices, so that Ctrl-C is seen.
            left = 0.05 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if help_simulations():
                continue
            with self._changed:
                if not self.filled:
                    self._changed.wait(min(left, 0.05))  # site: group.nap
            require_alive()  # without the lock: it may not come back
        _native.acquired(_LOCK)
        return True

    def get(self, timeout: float | None = None) -> Transfer:
        """Wait for the item to be issued and return its transfer; raise what stopped it."""
        if not self.settle(timeout):  # site: group.get_settles
            raise TransferTimeout(f"an item was not computed within {timeout} s")
        with self._changed:
            if self._error is not None:
                raise self._error
            assert self._transfer is not None
            return self._transfer

    def collect(self) -> Tree:
        """Return the item's result, once it is there, and keep the transfer no longer."""
        result = self.get().result()
        with self._changed:
            self._transfer, self._error = None, self._error or _TAKEN
        return result

    def when_filled(self, callback: Callable[[], object]) -> None:
        """Call back once filled, now if it is."""
        with self._changed:
            if not self.filled:
                self._callbacks.append(callback)
                return
        callback()

    def revoke(self, error: BaseException) -> None:
        """Let go of the transfer and of its result: whoever asks from now on gets the error."""
        with self._changed:
            self._transfer, self._error = None, error
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            _native.watch_post(callback)


class TransferGroup(Transfer):
    """A transfer of a list whose items are issued one after the other.

    Everything a :class:`Transfer` has; ``result()`` is the list of the items' results.
    """

    def __init__(self, slots: Sequence[Slot], read_source: Callable[[StreamLike], None]) -> None:
        super().__init__([], None, [], [], False)
        self._slots = list(slots)
        self._read_source = read_source

    def result(self, timeout: float | None = None) -> Tree:
        seconds = None if timeout is None else as_seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        results: list[Tree] = []
        try:
            for slot in self._slots:
                results.append(slot.get(_left(deadline)).result(_left(deadline)))
        except TransferTimeout:
            results.clear()
            raise TransferTimeout(f"{self!r} was not done within {seconds} s") from None
        except BaseException:
            results.clear()  # or the traceback would keep what was fetched so far
            raise
        return results

    def wait(self, stream: StreamLike = None) -> Tree | None:
        for slot in self._slots:
            slot.get().wait(stream)  # site: group.wait
        return None

    def wait_source(self, stream: StreamLike = None) -> None:
        for slot in self._slots:
            slot.get().wait_source(stream)  # site: group.wait_source
        self._read_source(stream)  # site: group.read_source

    def done(self) -> bool:
        _native.require_usable()
        for slot in self._slots:
            if not slot.filled:
                return False
            if slot.error is not None:
                return True  # what is in flight was waited for before the error was delivered
            if slot.transfer is not None and not slot.transfer.done():
                return False
        return True

    def add_done_callback(self, callback: Callable[[Transfer], object]) -> None:
        as_callable(callback, "callback")
        if self.done():
            run_callback(callback, self)
            return
        lock = threading.Lock()
        left = len(self._slots)

        def one_done(_transfer: Transfer | None = None) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                run_callback(callback, self)

        def filled(slot: Slot) -> None:
            if slot.transfer is None:
                one_done()
            else:
                slot.transfer.add_done_callback(one_done)

        for slot in self._slots:
            slot.when_filled(lambda slot=slot: filled(slot))  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, key: Any) -> Tree:
        if isinstance(key, slice):
            return [slot.get().result() for slot in self._slots[key]]
        return self._slots[key].get().result()

    def __iter__(self) -> Iterator[Tree]:
        return (slot.get().result() for slot in self._slots)

    def chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for index, slot in enumerate(self._slots):
            for _leaf, offset, view in slot.get().chunks():
                yield index, offset, view

    @property
    def nbytes(self) -> int:
        return sum(slot.transfer.nbytes for slot in self._slots if slot.transfer is not None)

    def elapsed(self) -> float:
        if not self.done():
            raise InvalidArgument("elapsed() of a pipeline that is not done; call result() first")
        parts = self._all_parts()
        seconds = 0.0
        for place in {part.place for part in parts}:
            own = [part.native for part in parts if part.place is place]
            seconds = max(seconds, own[-1].elapsed_from(own[0]))
        return seconds

    def _all_parts(self) -> list[Part]:
        return [part for slot in self._slots for part in slot.get()._all_parts()]

    def stats(self) -> dict[str, Any]:
        every = [slot.transfer.stats() for slot in self._slots if slot.transfer is not None]
        known = [stats["interval"] for stats in every if stats["interval"] is not None]
        interval = (
            (min(pair[0] for pair in known), max(pair[1] for pair in known)) if known else None
        )
        return {
            "nbytes": self.nbytes,
            "leaves": sum(stats["leaves"] for stats in every),
            "chunks": sum(stats["chunks"] for stats in every),
            "paths": sorted({path for stats in every for path in stats["paths"]}),
            "interval": interval,
        }

    def __repr__(self) -> str:
        issued = sum(slot.filled for slot in self._slots)
        return f"<streamlap.Transfer of {len(self._slots)} items, {issued} issued>"


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
