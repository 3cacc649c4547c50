"""One gradient on its way to the host, and the waiting for it."""

from __future__ import annotations

import contextlib
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

    def done(self) -> bool:
        """Return whether :meth:`result` would not wait."""
        return self._come is not None or self.transfer.done()

    def result(self, timeout: float | None) -> Any:
        """Return the transfer's result; blocks and raises as that does."""
        if self._come is None:
            self._come = (self.transfer.result(timeout),)  # site: arrival.result
        return self._come[0]


class Arrival:
    """One gradient on its way.

    Attributes:
        name: the parameter's.
        turn: in which backward pass of the step it was sent, from 0.
    """

    def __init__(self, name: str, turn: int) -> None:
        self.name = name
        self.turn = turn
        self._sent: Future[tuple[Shipment, Pick]] = Future()

    def sent(self, shipment: Shipment, pick: Pick) -> None:
        """Say how it travels."""
        self._sent.set_result((shipment, pick))

    def lost(self, error: BaseException) -> None:
        """Say that it will not travel, if it does not yet."""
        with contextlib.suppress(Exception):
            self._sent.set_exception(error)

    def travels(self) -> bool:
        """Return whether it is on its way, or lost; a small one waits for others first."""
        return self._sent.done()

    def order(self) -> float:
        """Return when it was sent, among the others; infinite: not yet."""
        if not self._sent.done() or self._sent.exception() is not None:
            return math.inf
        return self._sent.result()[0].order

    def done(self) -> bool:
        """Return whether :meth:`tensor` would not wait."""
        return self._sent.done() and (
            self._sent.exception() is not None or self._sent.result()[0].done()
        )

    def landing(self, deadline: float | None) -> Callable[[], torch.Tensor]:
        """Block until it is sent; return what blocks until it is on the host, and gives it."""
        pick: Pick
        shipment: Shipment
        shipment, pick = within(self._sent, deadline)
        return lambda: pick(shipment.result(left_until(deadline)))

    def tensor(self, deadline: float | None = None) -> torch.Tensor:
        """Block until it is on the host; ``deadline`` is one of ``time.monotonic()``."""
        return self.landing(deadline)()


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
        raise streamlap.TransferTimeout("the gradients were not on the host in time") from None


def deadline_after(timeout: float | None) -> float | None:
    """Return when a timeout in seconds is over, on ``time.monotonic()``."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise streamlap.InvalidType(f"timeout must be seconds, not {timeout!r}")
    if not timeout >= 0:
        raise streamlap.InvalidArgument(f"timeout must not be negative, not {timeout}")
    return time.monotonic() + timeout
