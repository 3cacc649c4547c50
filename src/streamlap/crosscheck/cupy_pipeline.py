"""The pipeline and the copy by CuPy alone: its streams, events, pinned memory and products.

It shares nothing with streamlap, so that the two can be held against each other.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

HOLD_SECONDS = 5
_HOLD_SOURCE = r"""
extern "C" __global__ void hold(volatile int *open, volatile int *expired, unsigned long long most)
{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    while (*open == 0) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - start > most) {
            *expired = 1;
            return;
        }
    }
}
"""


def why_not() -> str:
    """Return why CuPy cannot be used here; empty where it can."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return not_installed() or f"CuPy cannot be imported: {' '.join(str(error).split())}"
    return "" if cupy.cuda.is_available() else "CuPy sees no GPU"


def not_installed() -> str:
    """Return what to do where CuPy is not installed; empty where it is. Imports nothing."""
    if importlib.util.find_spec("cupy") is not None:
        return ""
    return 'CuPy is not installed: pip install "streamlap[cupy]"'


def pinned(shape: Sequence[int], dtype: Any) -> Array:
    """Return an uninitialised array in page-locked memory of CuPy's pool, which it owns."""
    import cupy

    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, dtype)
    memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def _start_copy(source: Any, target: Array, stream: Any) -> None:
    if source.nbytes:
        source.data.copy_to_host_async(ctypes.c_void_p(target.ctypes.data), source.nbytes, stream)


def to_host(array: Any) -> Array:
    """Return a CuPy array's values as a contiguous NumPy array in pinned memory.

    Stream order: after the work of CuPy's current stream on the array's device, by an event; the
    copy runs on a stream of its own, and the calling thread waits for that one.
    """
    import cupy

    with array.device:
        current = cupy.cuda.get_current_stream()
        dense = cupy.ascontiguousarray(array)
        target = pinned(array.shape, array.dtype)
        side = cupy.cuda.Stream(non_blocking=True)
        side.wait_event(current.record(cupy.cuda.Event(disable_timing=True)))
        try:
            _start_copy(dense, target, side)
        finally:
            side.synchronize()
    return target


def pipelined_run(x: Any, n: int = 50, depth: int = 4) -> list[Array]:
    """Multiply ``x`` with itself ``n`` times, and bring each product to the host meanwhile.

    Args:
        x: a CuPy array of shape (k, k), of a floating dtype.
        n: how many products.
        depth: how many of them the device holds at once.

    Returns:
        ``n`` NumPy arrays of shape (k, k) in pinned memory, ready to read.

    Stream order: products on CuPy's current stream of the device of ``x``, copies on a stream of
    their own. A buffer is written again only after its copy. Thread-safe.
    """
    import cupy

    with x.device:
        compute = cupy.cuda.get_current_stream()
        side = cupy.cuda.Stream(non_blocking=True)
        ring = [cupy.empty(x.shape, x.dtype) for _ in range(min(depth, n))]
        copied: list[Any] = [None] * len(ring)
        results = [pinned(x.shape, x.dtype) for _ in range(n)]
        try:
            for index, result in enumerate(results):
                slot = index % depth
                if copied[slot] is not None:
                    compute.wait_event(copied[slot])
                cupy.matmul(x, x, out=ring[slot])
                side.wait_event(compute.record(cupy.cuda.Event(disable_timing=True)))
                _start_copy(ring[slot], result, side)
                copied[slot] = side.record(cupy.cuda.Event(disable_timing=True))
        finally:
            side.synchronize()  # also after an error: a copy may still be writing into `results`
    return results


class Hold:
    """A kernel that holds a stream until it is opened, for at most ``HOLD_SECONDS``.

    Made on the current device, and run once there, because a kernel that is loaded later could wait
    for the one that holds. Everything that is enqueued behind it must have run before, too.
    """

    def __init__(self) -> None:
        import cupy

        self._flags = pinned((2,), np.int32)  # opened, expired: read by the kernel where they are
        self._kernel = cupy.RawKernel(_HOLD_SOURCE, "hold")
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._flags[:] = (1, 0)
        self._launch(self._stream)
        self._stream.synchronize()

    def _launch(self, stream: Any) -> None:
        address = self._flags.ctypes.data
        limit = np.uint64(HOLD_SECONDS * 1_000_000_000)
        with stream:
            self._kernel((1,), (1,), (np.uint64(address), np.uint64(address + 4), limit))

    def close(self, stream: Any) -> None:
        """Hold ``stream`` from here on."""
        self._flags[:] = (0, 0)
        self._launch(stream)

    def open(self) -> None:
        """Let it go."""
        self._flags[0] = 1

    @property
    def expired(self) -> bool:
        """Whether it went on by itself: what was seen behind it proves nothing."""
        return bool(self._flags[1])
