"""Gather and cast once more, in numba and by other arithmetic than the library's.

The library rounds with integer operations. Here a number is rounded by looking for its neighbours
among the values of the smaller type and taking the nearer one, in float64, which holds all of them
exactly. On a machine without a GPU numba's simulator runs these (``NUMBA_ENABLE_CUDASIM=1``, set
before numba is imported); it is slow, so sizes there are small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

if not hasattr(np, "row_stack"):  # gone from NumPy 2.5; numba-cuda asks for it at its first kernel
    np.row_stack = np.vstack

Array = np.ndarray[Any, Any]

BLOCKS, THREADS = 4, 8


@dataclass(frozen=True)
class SmallFloat:
    """A float of 16 bits: ``fraction`` bits behind the point, and the power of 2 of the last one
    of its smallest numbers."""

    fraction: int
    least: int

    @property
    def infinity(self) -> int:
        """The bits of infinity."""
        return 0x7FFF >> self.fraction << self.fraction


FLOAT16 = SmallFloat(10, -24)
BFLOAT16 = SmallFloat(7, -133)


@cuda.jit  # type: ignore[untyped-decorator]
def _gather(heap: Any, table: Any, out: Any) -> None:
    for row in range(cuda.blockIdx.x, table.shape[0], cuda.gridDim.x):
        for byte in range(cuda.threadIdx.x, table[row, 2], cuda.blockDim.x):
            out[table[row, 1] + byte] = heap[table[row, 0] + byte]


def gather(heap: Array, table: Array, nbytes: int) -> Array:
    """Return ``nbytes`` bytes, made of pieces of ``heap``.

    Args:
        heap: bytes.
        table: int64, ``(n, 3)``: where a piece begins in the heap, where in the result, its bytes.
        nbytes: the size of the result; what no piece covers is 0.
    """
    out = cuda.to_device(np.zeros(nbytes, np.uint8))
    _gather[BLOCKS, THREADS](cuda.to_device(heap), cuda.to_device(table), out)
    return np.asarray(out.copy_to_host())


@cuda.jit(device=True)  # type: ignore[untyped-decorator]
def _value(bits: int, fraction: int, least: int) -> float:
    """What the bits of a magnitude stand for, were there no infinity."""
    exponent = bits >> fraction
    steps = bits & ((1 << fraction) - 1)
    if exponent == 0:
        return math.ldexp(float(steps), least)
    return math.ldexp(float(steps + (1 << fraction)), least + exponent - 1)


@cuda.jit(device=True)  # type: ignore[untyped-decorator]
def _nearest(magnitude: float, fraction: int, least: int, infinity: int) -> int:
    """The bits of the nearest value; of two the one whose last bit is 0."""
    if magnitude >= _value(infinity, fraction, least):
        return infinity
    low, high = 0, infinity
    while high - low > 1:
        middle = (low + high) // 2
        if _value(middle, fraction, least) <= magnitude:
            low = middle
        else:
            high = middle
    below = magnitude - _value(low, fraction, least)
    above = _value(high, fraction, least) - magnitude
    if below < above or (below == above and low % 2 == 0):
        return low
    return high


@cuda.jit  # type: ignore[untyped-decorator]
def _narrow(values: Any, bits: Any, fraction: int, least: int, infinity: int, out: Any) -> None:
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        sign = (int(bits[i]) >> 16) & 0x8000
        if math.isnan(values[i]):
            payload = (int(bits[i]) >> (23 - fraction)) & ((1 << fraction) - 1)
            out[i] = sign | infinity | max(payload, 1)
        else:
            out[i] = sign | _nearest(abs(float(values[i])), fraction, least, infinity)


def narrow(values: Array, kind: SmallFloat) -> Array:
    """Return float32 values as bits of a smaller float: nearest, ties to even, NaNs kept."""
    out = cuda.to_device(np.zeros(values.size, np.uint16))
    _narrow[BLOCKS, THREADS](
        cuda.to_device(values),
        cuda.to_device(values.view(np.uint32)),
        *(kind.fraction, kind.least, kind.infinity),
        out,
    )
    return np.asarray(out.copy_to_host())


@cuda.jit  # type: ignore[untyped-decorator]
def _widen(bits: Any, fraction: int, least: int, infinity: int, values: Any, nans: Any) -> None:
    for i in range(cuda.grid(1), bits.size, cuda.gridsize(1)):
        magnitude = int(bits[i]) & 0x7FFF
        negative = int(bits[i]) >> 15
        if magnitude > infinity:
            payload = magnitude & ((1 << fraction) - 1)
            nans[i] = negative << 31 | 0x7F800000 | payload << (23 - fraction)
        elif magnitude == infinity:
            values[i] = -math.inf if negative else math.inf
        else:
            number = _value(magnitude, fraction, least)
            values[i] = -number if negative else number


def widen(bits: Array, kind: SmallFloat) -> Array:
    """Return values of a smaller float, given as bits, as bits of float32: exact, NaNs kept."""
    values = cuda.to_device(np.zeros(bits.size, np.float32))
    nans = cuda.to_device(np.zeros(bits.size, np.uint32))
    _widen[BLOCKS, THREADS](
        cuda.to_device(bits), kind.fraction, kind.least, kind.infinity, values, nans
    )
    found: Array = np.asarray(nans.copy_to_host())
    return np.where(found != 0, found, np.asarray(values.copy_to_host()).view(np.uint32))
