"""Scatter, strided, finite and checksum once more, by CuPy's own functions and kernels.

They share nothing with the library's. Each works on CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_CHECKSUM_SOURCE = r"""
typedef unsigned long long u64;

__device__ u64 mixed(u64 z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

extern "C" __global__ void words(const unsigned char *data, u64 nbytes, u64 *sum)
{
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; 8 * i < nbytes; i += step) {
        u64 word = 0;
        for (int byte = 7; byte >= 0; --byte) {
            word = word << 8 | (8 * i + byte < nbytes ? data[8 * i + byte] : 0);
        }
        atomicAdd(sum, mixed(word ^ mixed(8 * i + 0x9e3779b97f4a7c15ULL)));
    }
}
"""

_MASK = (1 << 64) - 1


def _mixed(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def checksum(array: Any) -> int:
    """Return the checksum of a contiguous CuPy array's bytes, by a kernel of CuPy's."""
    import cupy

    kernel = cupy.RawKernel(_CHECKSUM_SOURCE, "words")
    total = cupy.zeros(1, np.uint64)
    if array.nbytes:
        kernel((32,), (128,), (array.view(np.uint8).reshape(-1), np.uint64(array.nbytes), total))
    return _mixed(int(total[0]) ^ _mixed(array.nbytes))


def checksum_on_host(data: bytes) -> int:
    """Return the same number by Python's integers."""
    total = 0
    for place in range(0, len(data), 8):
        word = int.from_bytes(data[place : place + 8], "little")
        total += _mixed(word ^ _mixed(place + 0x9E3779B97F4A7C15 & _MASK))
    return _mixed(total & _MASK ^ _mixed(len(data)))


def scatter(flat: Any, sizes: Sequence[int]) -> list[Any]:
    """Return a CuPy array of bytes as arrays of the given sizes, each with memory of its own."""
    ends = np.cumsum(sizes)
    return [flat[end - size : end].copy() for end, size in zip(ends, sizes, strict=True)]


def packed(array: Any) -> Any:
    """Return a CuPy array whose elements lie apart as a contiguous one."""
    import cupy

    return cupy.ascontiguousarray(array)


def nonfinite(array: Any) -> int:
    """Return how many elements of a CuPy array are infinite or NaN."""
    import cupy

    return int((~cupy.isfinite(array)).sum())
