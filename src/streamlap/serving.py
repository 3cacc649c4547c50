"""What serves a block: its runtimes, devices and pools. Outside every block the process's own do.

Another kind of serving derives from :class:`Serving` and says which runtimes it has; what it does
not serve itself, whatever served before does.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

from streamlap import _native
from streamlap.errors import DeviceError, InvalidArgument, StreamlapError
from streamlap.policy import Policy, policy

if TYPE_CHECKING:
    from streamlap.pinned import PinnedPool

_making = threading.Lock()


class Place:
    """A device of a runtime: where streams are made. A serving has one object for each.

    Attributes:
        runtime: the runtime that serves it.
        index: its number there.
        is_cuda: whether it is a GPU.
        engine: its runtime's copy engine, which lives as long as a place or a transfer needs it.
        checked: whether its runtime wants to be told of accesses that it cannot see.
        pool: where page-locked memory for its results comes from.
    """

    __slots__ = (
        *("_compute", "_idle", "_staged_by"),
        *("checked", "engine", "index", "is_cuda", "pool", "runtime"),
    )

    def __init__(self, runtime: _native.Runtime, index: int, pool: PinnedPool) -> None:
        self.runtime = runtime
        self.index = index
        self.is_cuda = runtime.uses_device_memory
        self.engine = _native.engine(runtime)
        self.checked = runtime.checked
        self.pool = pool
        self._compute: _native.Stream | None = None
        self._idle: _native.Stream | None = None
        self._staged_by: Policy | None = None

    def took_memory(self) -> None:
        """Tell a checker that memory was allocated just now.

        Another thread may have freed it, because it saw the end of a copy: what that one knew then,
        its allocator's lock has handed on to this one.
        """
        if self.checked:
            _native.acquired(_native.interpreter_lock)

    def shape_ring(self) -> None:
        """Give staged copies from now on the ring that the policy in force asks for."""
        numbers = policy()
        if numbers is not self._staged_by:
            self.engine.configure_staging(
                numbers.stage_slots,
                numbers.stage_slot_bytes,
                numbers.stage_threads,
                numbers.populate_threads,
            )
            self._staged_by = numbers

    def compute_stream(self) -> _native.Stream:
        """Return the worker that computes for a logical CPU device."""
        if self._compute is None:
            with _making:
                self._compute = self._compute or self.runtime.stream(self.index, "compute")
        return self._compute

    def idle_stream(self) -> _native.Stream:
        """Return a stream that nobody else uses: whatever holds the others, it is idle."""
        if self._idle is None:
            with _making:
                self._idle = self._idle or self.runtime.stream(self.index, "copy")
        return self._idle

    def __str__(self) -> str:
        return f"{'cuda' if self.is_cuda else 'cpu'}:{self.index}"


class Serving:
    """Runtimes, devices and pools that serve a block of the program. Thread-safe.

    Attributes:
        outer: what served before, and still serves what this does not; None: the process itself.
        short: the short way of ``to_cpu``, for the GPUs that have taken it.
        short_handle: what ``_native.start_short`` knows it by.
        simulated: whether CPU tensors are served on a virtual clock.
    """

    simulated = False

    def __init__(self, outer: Serving | None) -> None:
        self.outer = outer
        self.short = _native.ShortWay()
        self.short_handle = self.short.handle()
        self._lock = threading.Lock()
        self._own: dict[bool, tuple[_native.Runtime, PinnedPool] | None] = {}
        self._places: dict[tuple[bool, int], Place] = {}

    def _make_runtime(self, cuda: bool) -> _native.Runtime | None:
        """Return a runtime for GPUs or for CPU tensors, asked for once; None: the outer's serves.

        ``self.outer.runtime(cuda)`` is there to be wrapped.
        """
        raise NotImplementedError

    def _served(self, cuda: bool) -> tuple[_native.Runtime, PinnedPool] | None:
        if cuda not in self._own:
            from streamlap.pinned import PinnedPool  # pools need to know what serves

            runtime = self._make_runtime(cuda)
            with self._lock:
                own = None if runtime is None else (runtime, PinnedPool._of(runtime))
                self._own.setdefault(cuda, own)
        return self._own[cuda]

    def runtime(self, cuda: bool = False) -> _native.Runtime:
        """Return what serves GPUs or CPU tensors; DeviceError where no GPU can be used."""
        own = self._served(cuda)
        if own is not None:
            return own[0]
        assert self.outer is not None
        return self.outer.runtime(cuda)

    def place(self, index: int, cuda: bool = False) -> Place:
        """Return a device.

        Raises:
            InvalidArgument: there are not so many GPUs.
            DeviceError: no GPU can be used.
        """
        found = self._places.get((cuda, index))
        if found is not None:
            return found
        own = self._served(cuda)
        if own is None:
            assert self.outer is not None
            return self.outer.place(index, cuda)
        if cuda and index >= own[0].device_count:
            raise InvalidArgument(f"no device cuda:{index}: there are {own[0].device_count} GPUs")
        with self._lock:
            if (cuda, index) not in self._places:
                self._places[cuda, index] = Place(own[0], index, own[1])
            return self._places[cuda, index]

    @property
    def pool(self) -> PinnedPool:
        """Where page-locked memory comes from: a GPU's, if there is one."""
        gpu = not self.simulated and torch.cuda.is_available() and not cuda_reason()
        return self.place(0, gpu).pool

    def now(self) -> float:
        """Return the seconds on the clock that events are placed on."""
        return time.perf_counter()

    @property
    def accesses(self) -> int:
        """How many accesses were checked so far, by runtimes of its own."""
        return sum(own[0].accesses() for own in list(self._own.values()) if own is not None)

    def close(self) -> None:
        """End the block: give back the memory that nobody holds. What is held lives on.

        In a forked child, and when the process ends inside the block, everything is left alone.
        """
        if _native.forked() or _native.ending():
            return
        for own in list(self._own.values()):
            if own is not None:
                own[1].trim()


class _Process(Serving):
    """The runtimes of the process, which live as long as it does."""

    def __init__(self) -> None:
        super().__init__(None)

    def _make_runtime(self, cuda: bool) -> _native.Runtime:
        return cuda_runtime() if cuda else host_runtime()


process = _Process()
current: contextvars.ContextVar[Serving] = contextvars.ContextVar("serving", default=process)
"""What serves in this context."""

S = TypeVar("S", bound=Serving)


@contextlib.contextmanager
def serve(serving: S) -> Iterator[S]:
    """Let a serving made for it serve the block."""
    before = current.set(serving)
    try:
        yield serving
    finally:
        current.reset(before)
        serving.close()


@contextlib.contextmanager
def serve_by_threads() -> Iterator[None]:
    """Let the nearest one that is no simulation serve the block."""
    serving = current.get()
    while serving.simulated:
        assert serving.outer is not None
        serving = serving.outer
    before = current.set(serving)
    try:
        yield
    finally:
        current.reset(before)


def help_simulations() -> bool:
    """Let a simulation move, for a thread that waits for an item; False where none can."""
    return _native.help_simulations()


@functools.cache
def host_runtime() -> _native.Runtime:
    """Return the process's runtime on worker threads."""
    return _native.host_runtime()


def cuda_runtime() -> _native.Runtime:
    """Return the process's CUDA runtime; raise DeviceError with the reason where there is none."""
    try:
        return _cuda_runtime()
    except StreamlapError as error:
        if not torch.cuda.is_available():
            raise DeviceError(f"no GPU can be used: {error}") from None
        raise DeviceError(f"torch can use a GPU here, but streamlap cannot: {error}") from None


@functools.cache
def _cuda_runtime() -> _native.Runtime:
    return _native.cuda_runtime()


def cuda_reason() -> str:
    """Return why no GPU can be used; empty where one can."""
    if torch.version.hip is not None:
        return "this torch is built for ROCm; streamlap serves NVIDIA GPUs"
    return _native.cuda_reason()
