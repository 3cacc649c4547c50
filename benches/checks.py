"""Whether results are right, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

POISON = -77.0
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrongResult(Exception):
    """A row gave other bits than it must."""


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill with a value that no result has."""
    for tensor in tensors:
        tensor.fill_(POISON if tensor.dtype.is_floating_point else 0xA5)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.itemsize])


def require_equal(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Compare where what is expected lies: a GPU is faster at it.

    Raises:
        WrongResult: another number of results, another shape or dtype, or a bit that differs.
    """
    if len(results) != len(expected):
        raise WrongResult(f"{len(results)} results instead of {len(expected)}")
    for index, (result, right) in enumerate(zip(results, expected, strict=True)):
        if result.shape != right.shape or result.dtype != right.dtype:
            raise WrongResult(f"item {index} has another shape or dtype")
        if not torch.equal(_bits(result.to(right.device)), _bits(right)):
            raise WrongResult(f"item {index} differs")


def require_usable(blocks: Sequence[torch.Tensor], pinned: bool) -> None:
    """Check that memory keeps what is written to it, and is page-locked if it must be."""
    for index, block in enumerate(blocks):
        if pinned and not block.is_pinned():
            raise WrongResult(f"block {index} is not page-locked")
        block.fill_(index + 1)
    for index, block in enumerate(blocks):
        if not bool((block == index + 1).all()):
            raise WrongResult(f"block {index} shares memory with another")
