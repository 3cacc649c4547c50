"""One gradient on its way to the host, and the waiting for it."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

import streamlap

Pick = Callable[[Any], torch.Tensor]
"""Takes one gradient out of a transfer's result."""


class Shipment:
    """A transfer that brings one gradient or several, which ask for its result once.

    Attributes:
        order: how many were sent before it.
        transfer: what brings them.
    """

    _numbers = itertools.count()

    def __init__(self, transfer: streamlap.Transfer) -> None:
        self.order = next(self._numbers)
        self.transfer = transfer
        self._come: tuple[Any] | None = None
        self._done = False

    def done(self) -> bool:
        """Return whether :meth:`result` would not wait."""
        self._done = self._done or self._come is not None or self.transfer.done()
        return self._done

    def result(self, timeout: float | None) -> Any:
        """Return the transfer's result; blocks and raises as that does."""
        if self._come is None:
            self._come = (self.transfer.result(timeout),)  # site: arrival.result
        return self._come[0]


class Arrival:
    """One gradient on its way.

    A step has hundreds, and each is made while the engine waits: hence no future for each.

    Attributes:
        name: the parameter's.
        turn: in which backward pass of the step it was sent, from 0.
    """

    def __init__(self, name: str, turn: int, changed: threading.Condition) -> None:
        """``changed``: notified by whoever says how it travels, or that it will not."""
        self.name = name
        self.turn = turn
        self._changed = changed
        self._sent: tuple[Shipment, Pick] | None = None
        self._error: BaseException | None = None

    def sent(self, shipment: Shipment, pick: Pick) -> None:
        """Say how it travels."""
        self._sent = (shipment, pick)

    def lost(self, error: BaseException) -> None:
        """Say that it will not travel, if it does not yet."""
        if self._sent is None:
            self._error = error

    def travels(self) -> bool:
        """Return whether it is on its way, or lost; a small one waits for others first."""
        return self._sent is not None or self._error is not None

    def order(self) -> float:
        """Return when it was sent, among the others; infinite: not yet."""
        return math.inf if self._sent is None else self._sent[0].order

    def done(self) -> bool:
        """Return whether :meth:`tensor` would not wait."""
        return self._error is not None if self._sent is None else self._sent[0].done()

    def landing(self, deadline: float | None) -> Callable[[], torch.Tensor]:
        """Block until it is sent; return what blocks until it is on the host, and gives it."""
        if not self.travels():
            with self._changed:
                if not self._changed.wait_for(self.travels, left_until(deadline)):
                    raise _too_late()
        if self._sent is None:
            assert self._error is not None
            raise self._error
        shipment, pick = self._sent
        return lambda: pick(shipment.result(left_until(deadline)))

    def tensor(self, deadline: float | None = None) -> torch.Tensor:
        """Block until it is on the host; ``deadline`` is one of ``time.monotonic()``."""
        return self.landing(deadline)()


def _too_late() -> streamlap.TransferTimeout:
    return streamlap.TransferTimeout("the gradients were not on the host in time")


def left_until(deadline: float | None) -> float | None:
    """Return the seconds that are left, no more than a lock can wait for."""
    if deadline is None:
        return None
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)


def within(future: Future[Any], deadline: float | None) -> Any:
    """Return a future's result; raise TransferTimeout after the deadline."""
    try:
        return future.result(left_until(deadline))
    except TimeoutError:
        if future.done():
            return future.result()  # it is there after all, or the error is the work's own
        raise _too_late() from None


def deadline_after(timeout: float | None) -> float | None:
    """Return when a timeout in seconds is over, on ``time.monotonic()``."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise streamlap.InvalidType(f"timeout must be seconds, not {timeout!r}")
    if not timeout >= 0:
        raise streamlap.InvalidArgument(f"timeout must not be negative, not {timeout}")
    return time.monotonic() + timeout
