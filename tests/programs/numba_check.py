"""What the library gathers and casts, held against numba's own kernels, bit for bit.

A program of its own: numba's simulator must be asked for before numba is imported.

    python numba_check.py cpu | cuda:0
"""

import sys

import numpy as np
import torch

import streamlap
from streamlap.crosscheck import numba_kernels
from streamlap.crosscheck.numba_kernels import BFLOAT16, FLOAT16

KINDS = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


def check_gather(where: str) -> int:
    """Many pieces, at odd places and of odd sizes, in one transfer."""
    numbers = np.random.default_rng(1)
    heap = numbers.integers(0, 256, 4096, np.uint8)
    on_device = torch.from_numpy(heap).to(where)
    sizes = [0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 67, 130]
    begins = np.sort(numbers.integers(0, heap.size - max(sizes), len(sizes)))
    pieces = [on_device[b : b + size] for b, size in zip(begins, sizes, strict=True)]
    transfer = streamlap.TreeCopy(like=pieces)(pieces)
    assert transfer.stats()["paths"] == ["gather"], transfer.stats()
    results = transfer.result()
    ends = np.cumsum(sizes)
    table = np.stack([begins, ends - sizes, sizes], axis=1).astype(np.int64)
    expected = numba_kernels.gather(heap, table, int(ends[-1]))
    got = np.concatenate([result.numpy() for result in results])
    assert np.array_equal(got, expected)
    return len(pieces)


def telling_values() -> np.ndarray:
    """Float32 numbers around the values of both small floats, the halves between them, and NaNs."""
    upper = np.random.default_rng(2).integers(0, 1 << 16, 40, np.uint32) << 16
    edges = [0, 0x33000000, 0x33800000, 0x387FC000, 0x477FE000, 0x477FF000, 0x7F7F8000, 0x7F800000]
    bits = np.concatenate([upper, np.array(edges, np.uint32), np.uint32([0x7FC00000, 0xFF800001])])
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], np.uint32)
    return (bits[:, None] | lower).reshape(-1).view(np.float32)


def check_casts(where: str) -> int:
    values = telling_values()
    x = torch.from_numpy(values).to(where)
    halves = np.random.default_rng(3).integers(0, 1 << 16, 300).astype(np.uint16)
    for dtype, kind in KINDS.items():
        narrowed = streamlap.to_cpu(x, dtype=dtype).result().view(torch.int16).numpy()
        assert np.array_equal(narrowed.view(np.uint16), numba_kernels.narrow(values, kind)), dtype
        y = torch.from_numpy(halves.view(np.int16)).view(dtype).to(where)
        widened = streamlap.to_cpu(y, dtype=torch.float32).result().view(torch.int32).numpy()
        assert np.array_equal(widened.view(np.uint32), numba_kernels.widen(halves, kind)), dtype
    return 2 * (values.size + halves.size)


def main(where: str) -> None:
    pieces, casts = check_gather(where), check_casts(where)
    print(f"{pieces} pieces and {casts} casts are the same, bit for bit")


if __name__ == "__main__":
    main(sys.argv[1])
