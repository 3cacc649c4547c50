"""Streams of the tests' own on either runtime, held by gates; and waits with a limit."""

import contextlib
import functools
import gc
import os
import time

import numpy as np
import torch

import streamlap
from streamlap import _native
from streamlap.devices import place_of
from streamlap.serving import current, help_simulations

PATIENCE = float(os.environ.get("STREAMLAP_PATIENCE", "20"))
"""Seconds that something right may take at most; only a failing test waits so long."""

MOMENT = 0.02
"""Seconds that something wrong is given to happen while a gate is closed."""


def eventually(condition, seconds: float = PATIENCE) -> bool:
    """Wait until ``condition()`` holds; False when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        if not help_simulations():
            time.sleep(0.001)
    return True


def let_go(condition) -> bool:
    """The same for what the last reference to something decides.

    Garbage is collected again and again: a thread may be about to let go of one end of a circle.
    """
    deadline = time.monotonic() + PATIENCE
    while not eventually(condition, 0.05):
        if time.monotonic() > deadline:
            return False
        gc.collect()
    return True


def stays_false(condition) -> bool:
    """Whether ``condition()`` is still false after a moment."""
    return not eventually(condition, MOMENT)


def is_held(transfer: streamlap.Transfer) -> bool:
    """Whether a transfer does not happen, although it is given a moment to."""
    try:
        transfer.result(timeout=MOMENT)
    except streamlap.TransferTimeout:
        return not transfer.done()
    return False


def runtime_of(where: str) -> _native.Runtime:
    return place_of(torch.device(where)).runtime


def engine_of(where: str) -> _native.Engine:
    return _native.engine(runtime_of(where))


def finish_all(where: str) -> None:
    """Wait for everything on the devices; before a gate is armed."""
    if where != "cpu":
        torch.cuda.synchronize(where)
    streamlap.synchronize(where)


class Side:
    """A stream that writes sources or reads results.

    ``stream`` is what the library is given: a torch stream, or one of streamlap's own on the CPU.
    """

    def __init__(self, where: str, stream: torch.cuda.Stream | None = None) -> None:
        self.where = where
        if where == "cpu":
            self._torch = None
            self.native = runtime_of(where).stream(0, "compute")
            self.stream = self.native
        else:
            device = torch.device(where)
            self._torch = torch.cuda.Stream(device) if stream is None else stream
            self.native = runtime_of(where).adopt(device.index, self._torch.cuda_stream)
            self.stream = self._torch

    def current(self):
        """Make it torch's current stream; nothing on the CPU."""
        return torch.cuda.stream(self._torch) if self._torch else contextlib.nullcontext()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue ``dst[...] = src``, without raising dst's version on a worker thread."""
        if self._torch is None:
            target, values = dst.detach().numpy(), src.detach().numpy()
            self.native.launch(lambda: np.copyto(target, values))
        else:
            with torch.cuda.stream(self._torch):
                dst.copy_(src, non_blocking=True)

    def hold(self) -> _native.Gate:
        """Hold the stream. Everything used behind the gate must have been used once before."""
        return self.native.gate()

    def passed(self):
        """Enqueue a mark; return a function that says whether the stream got there."""
        return self.native.record().done

    def sync(self) -> None:
        self.native.synchronize()


def side(where: str, role: str) -> Side:
    """The stream of that role; torch's are the same for all tests, idle between them."""
    return _side(where, role, current.get())


@functools.cache
def _torch_stream(where: str, role: str) -> torch.cuda.Stream | None:
    return None if where == "cpu" else torch.cuda.Stream(where)


@functools.cache
def _side(where: str, role: str, _serving) -> Side:
    made = Side(where, _torch_stream(where, role))
    made.hold().open()  # loads the kernel
    made.sync()
    return made


def forget_sides() -> None:
    """Let go of the streams that what served a test had made."""
    _side.cache_clear()


class CopySide:
    """The library's own copy stream, to be held."""

    def __init__(self, where: str, to_device: bool = False, index: int = 0) -> None:
        direction = to_device and where != "cpu"
        self.native = engine_of(where).copy_stream(index, direction)
        self.native.gate().open()
        self.native.synchronize()

    def hold(self) -> _native.Gate:
        return self.native.gate()

    def passed(self):
        return self.native.record().done
