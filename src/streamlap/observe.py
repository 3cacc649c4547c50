"""What the library tells those who watch it: a timeline that is being recorded, a profiler.

Nobody watching, a hook looks at two variables and does nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from streamlap import _native
from streamlap.devices import Place, current_stream

Context = contextlib.AbstractContextManager[Any]
_NOTHING: Context = contextlib.nullcontext()


class Recorder(Protocol):
    """Who records a timeline. The methods are called from any thread."""

    def compute(self, place: Place, stream: _native.Stream | None, name: str) -> Context:
        """Return a context that times what its block does on ``stream``; None: in the thread."""

    def copied(self, native: _native.Transfer, copy: Copy) -> None:
        """Note a copy that was submitted with ``traced=True``."""

    def stream_waits(self, stream: _native.Stream, place: Place, native: _native.Transfer) -> None:
        """Note that the stream's next work starts after a copy."""

    def waiting(self, lane: str) -> Context:
        """Return a context that times its block, in which the calling thread waits for a lane."""

    def now(self) -> float:
        """Return the time on the timeline's clock."""

    def grew(self, nbytes: int, begin: float) -> None:
        """Note that a pool has asked the system for memory since ``begin``."""


class Copy:
    """What a copy is, for those who watch: where, which way, how, and how much."""

    __slots__ = ("nbytes", "path", "place", "to_device")

    def __init__(self, place: Place, to_device: bool, path: str, nbytes: int) -> None:
        self.place = place
        self.to_device = to_device
        self.path = path
        self.nbytes = nbytes

    @property
    def lane(self) -> str:
        """The stream it is on, in words."""
        return lane_of(self.place, self.to_device, self.path)


recorder: Recorder | None = None
"""The timeline that is being recorded; only ``traces.timeline`` sets it."""


def _profiler_listens() -> bool:
    """Return whether a tool that shows NVTX ranges started this process."""
    asked = os.environ.get("STREAMLAP_NVTX")
    if asked is not None:
        return asked not in ("", "0")
    return bool(os.environ.get("NVTX_INJECTION64_PATH") or os.environ.get("CUDA_INJECTION64_PATH"))


ranges = _profiler_listens() and torch.cuda.is_available()
"""Whether NVTX ranges are made. A profiler is there from the start, so this is asked once."""


def watched() -> bool:
    """Return whether anybody watches; a short way that tells nobody anything is closed then."""
    return recorder is not None or ranges


def lane_of(place: Place, to_device: bool, path: str) -> str:
    """Return the name of the stream that copies take."""
    way = "to device" if to_device else "to host"
    return f"{place} {way} (staged)" if path == "staged" else f"{place} {way}"


@contextlib.contextmanager
def _nvtx(name: str, inner: Context = _NOTHING) -> Iterator[None]:
    torch.cuda.nvtx.range_push(f"streamlap: {name}")  # type: ignore[no-untyped-call]
    try:
        with inner:
            yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def compute(place: Place, index: int, worker: _native.Stream | None = None) -> Context:
    """Return a context for the call of ``fn`` that computes item ``index``.

    It is on the current stream of a GPU, on ``worker``, or in the calling thread.
    """
    return _computing(place, f"fn {index}", worker)


def graph(place: Place) -> Context:
    """Return a context for the launch of a graph, copies and all, on the current stream."""
    return _computing(place, "graph", None)


def _computing(place: Place, name: str, worker: _native.Stream | None) -> Context:
    now = recorder
    if now is None and not ranges:
        return _NOTHING
    inner = _NOTHING
    if now is not None:
        inner = now.compute(place, current_stream(place) if worker is None else worker, name)
    return _nvtx(name, inner) if ranges else inner


def submitted(
    submit: Callable[..., _native.Transfer], copy: Copy, timed: bool = True
) -> _native.Transfer:
    """Call ``submit(timed=..., traced=...)``, which enqueues a copy, and note it."""
    now = recorder
    if now is None and not ranges:
        return submit(timed=timed, traced=False)
    with _nvtx(f"{copy.lane}, {copy.nbytes} bytes") if ranges else _NOTHING:
        native = submit(timed=timed, traced=now is not None)
    if now is not None:
        now.copied(native, copy)
    return native


def stream_waits(stream: _native.Stream, place: Place, native: _native.Transfer) -> None:
    """Note that ``stream`` was made to wait for a copy."""
    now = recorder
    if now is not None:
        now.stream_waits(stream, place, native)


def waiting(lane: str | Callable[[], str]) -> Context:
    """Return a context for a wait of the calling thread; the lane's name is made if needed."""
    now = recorder
    if now is None and not ranges:
        return _NOTHING
    lane = lane if isinstance(lane, str) else lane()
    inner = _NOTHING if now is None else now.waiting(lane)
    return _nvtx(f"wait for {lane}", inner) if ranges else inner
