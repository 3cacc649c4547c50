"""Random bit patterns, poison, and comparison bit for bit."""

import itertools
import warnings

import numpy as np
import torch
from torch.utils import _pytree

POISON = 0xA5
_seeds = itertools.count(1)


def start_at(seed: int) -> None:
    """Begin with other data; a million tensors are between two neighbouring seeds."""
    global _seeds
    _seeds = itertools.count(1 + seed * 1_000_000)


QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def every_dtype() -> list[torch.dtype]:
    """All dtypes that torch can put into a plain tensor."""
    found = {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED
    usable = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in sorted(found, key=str):
            try:
                torch.empty(1, dtype=dtype)
            except (RuntimeError, TypeError):
                continue
            usable.append(dtype)
    return usable


def random_bits(shape, dtype=torch.float32, where="cpu") -> torch.Tensor:
    """A new tensor of random bit patterns (NaN payloads, -0, infinities), never the same twice."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    generator = torch.Generator().manual_seed(next(_seeds))
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    if dtype in (torch.float32, torch.float64) and count:
        view = raw.view(dtype)
        specials = [-0.0, float("nan"), float("inf"), 5e-324, 0.0]
        for position, value in enumerate(specials[: max(0, view.numel() - 1)]):
            view[position] = value
    return raw.view(dtype).reshape(shape).to(where)


def random_numbers(shape, dtype=torch.float32, where="cpu") -> torch.Tensor:
    """A new tensor of finite numbers that every floating dtype can hold, never the same twice."""
    generator = torch.Generator().manual_seed(next(_seeds))
    return torch.randn(shape, generator=generator).clamp(-100, 100).to(dtype).to(where)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill every element's bytes with a pattern that no test's data has."""
    pattern = torch.full((tensor.itemsize,), POISON, dtype=torch.uint8).view(tensor.dtype)
    with torch.inference_mode():
        tensor.copy_(pattern.to(tensor.device).expand(tensor.shape))
    return tensor


def as_bytes(value) -> torch.Tensor:
    """The elements' bytes in logical order, on the host."""
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    flat = tensor.contiguous().reshape(-1)
    # A single element may keep any stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def is_poison(value) -> bool:
    return bool((as_bytes(value) == POISON).all())


def same_bits(first, second) -> bool:
    """Same shape, same dtype, same bits; 0-d and empty included."""
    if tuple(first.shape) != tuple(second.shape):
        return False
    a = torch.from_numpy(first) if isinstance(first, np.ndarray) else first
    b = torch.from_numpy(second) if isinstance(second, np.ndarray) else second
    return a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


def same_tree(first, second) -> bool:
    a, spec_a = _pytree.tree_flatten(first)
    b, spec_b = _pytree.tree_flatten(second)
    return spec_a == spec_b and all(
        same_bits(x, y) if isinstance(x, (torch.Tensor, np.ndarray)) else x == y
        for x, y in zip(a, b, strict=True)
    )


DTYPE_SAMPLE = [torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128]
