"""The values of small floats, and what casts make of them, by NumPy."""

import numpy as np
import torch

from helpers.data import as_bytes

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGER = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def every_half(dtype) -> torch.Tensor:
    """All 65536 values of a dtype of two bytes."""
    return torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(dtype)


def telling_floats() -> torch.Tensor:
    """Float32 bit patterns around every place where rounding to a smaller dtype changes."""
    upper = torch.arange(0x10000, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF])
    bits = (upper[:, None] | lower).reshape(-1)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def values_of(dtype) -> torch.Tensor:
    return telling_floats() if dtype is torch.float32 else every_half(dtype)


def bits_of(tensor) -> np.ndarray:
    unsigned = {4: np.uint32, 2: np.uint16}[tensor.itemsize]
    return as_bytes(tensor).numpy().view(unsigned)


def widened(tensor) -> np.ndarray:
    """The bits as float32: numbers by NumPy, NaNs as they are."""
    bits = bits_of(tensor)
    if tensor.dtype is torch.float32:
        return bits
    wide = bits.astype(np.uint32)
    if tensor.dtype is torch.bfloat16:
        return wide << 16
    with np.errstate(invalid="ignore"):  # what NumPy makes of a NaN is the processor's choice
        numbers = bits.view(np.float16).astype(np.float32).view(np.uint32)
    nans = (wide & 0x8000) << 16 | 0x7F800000 | (wide & 0x3FF) << 13
    return np.where((wide & 0x7FFF) > 0x7C00, nans, numbers)


def narrowed(bits: np.ndarray, dtype) -> np.ndarray:
    """Float32 bits as bits of ``dtype``, to nearest even; a NaN keeps sign and upper payload."""
    if dtype is torch.float32:
        return bits
    exponent, payload, shift = (0x7C00, 0x3FF, 13) if dtype is torch.float16 else (0x7F80, 0x7F, 16)
    if dtype is torch.float16:
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = bits.view(np.float32).astype(np.float16).view(np.uint16)
    else:
        rounded = bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)
        numbers = (rounded >> 16).astype(np.uint16)
    kept = bits >> shift & payload
    nans = (bits >> 16 & 0x8000) | exponent | np.where(kept == 0, 1, kept)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, nans, numbers).astype(np.uint16)


def expected_bits(source, dtype) -> np.ndarray:
    return bits_of(source) if source.dtype is dtype else narrowed(widened(source), dtype)


def nonfinite_in(*tensors) -> int:
    return sum(int((~torch.isfinite(t.float())).sum()) for t in tensors)
