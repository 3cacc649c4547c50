"""What a plan keeps from call to call: one input that calls are copied into, and its results."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from streamlap import foreign
from streamlap.arrays import Source, as_source, contiguous_stride, is_dense
from streamlap.devices import Place, as_stream, current_stream, require_no_capture
from streamlap.errors import InvalidArgument, InvalidType
from streamlap.pinned import PinnedPool

ALIGNMENT = 512
"""Bytes. torch gives no memory on a device that is aligned less, and what a product's kernel is
chosen by includes the alignment."""


def new_like(shape: Sequence[int], stride: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return new memory without history, also where the caller is in inference mode."""
    with torch.inference_mode(False):
        return torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's strides where they leave no gaps, else those of contiguous memory."""
    if is_dense(tensor):
        return tensor.stride()
    return contiguous_stride(tensor.shape)


def _is_strided(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


class StaticInput:
    """Memory that the input of each call is copied into.

    Attributes:
        argument: what ``fn`` is given: a tensor, or an array of NumPy or CuPy if such a one came.
        tensor: the same memory as a tensor.
        of_torch: whether ``argument`` is that tensor.
    """

    def __init__(self, like: Any, fn: Callable[[Any], Any] | None, place: Place) -> None:
        source = as_source(like)
        assert source is not None  # the caller has looked
        self._place = place
        self._like = torch.empty_strided(
            source.tensor.shape, source.tensor.stride(), dtype=source.tensor.dtype, device="meta"
        )
        self._device = source.tensor.device
        self._of_cupy = foreign.is_cupy(like)
        self._of_torch_itself = isinstance(like, torch.Tensor)
        self.of_torch = True
        if fn is not None and isinstance(like, np.ndarray):
            self.argument: Any = np.empty_like(like)
            self.tensor = torch.from_numpy(self.argument)
            self.of_torch = False
        elif fn is not None and self._of_cupy:
            with torch.cuda.device(place.index):
                self.argument = sys.modules["cupy"].empty_like(like)
            copied = as_source(self.argument)
            assert copied is not None
            self.tensor = copied.tensor
            self.of_torch = False
        else:
            tensor = source.tensor
            self.tensor = self.argument = new_like(tensor.shape, dense_stride(tensor), tensor)

    def check(self, x: Any) -> Source:
        """Return the data of ``x``.

        Raises:
            InvalidType: no tensor and no array.
            InvalidArgument: not of the shape, dtype, device and strides that the plan was made for.
        """
        like = self._like
        if type(x) is torch.Tensor and self._of_torch_itself and _is_strided(x):
            # What is usual, without the general way's cost; the copy takes care of the rest.
            same = x.shape == like.shape and x.dtype == like.dtype and x.device == self._device
            if same and x.stride() == like.stride():
                return Source(x, False, None)
        source = as_source(x)
        if source is None:
            raise InvalidType(f"x must be a tensor or an array, not {type(x).__name__}")
        if foreign.is_cupy(x) != self._of_cupy:
            raise InvalidType(
                f"the plan was made for another kind of array than {type(x).__name__}"
            )
        given = source.tensor
        pairs = (
            ("shape", tuple(given.shape), tuple(like.shape)),
            ("dtype", given.dtype, like.dtype),
            ("device", given.device, self._device),
            ("strides", given.stride(), like.stride()),
        )
        for what, has, wanted in pairs:
            if has != wanted:
                raise InvalidArgument(f"x has {what} {has}; the plan was made for {wanted}")
        return source

    def load(self, source: Source) -> None:
        """Copy the input in, on the current stream, after what its producer has been given."""
        current = current_stream(self._place)
        producer = None
        if source.stream is not None:
            producer = as_stream(source.stream, self._place)
            require_no_capture(producer, "a plan")
        if producer is not None and current is not None:
            current.wait(producer.record())  # site: static_memory.load_after_producer
        with torch.inference_mode():  # no history, and memory of either kind
            self.tensor.copy_(source.tensor, non_blocking=True)
        if producer is not None and current is not None and not self.of_torch:
            # fn runs there
            producer.wait(current.record())  # site: static_memory.fn_after_load


class StaticResults:
    """``n`` tensors of one shape in one block of page-locked memory.

    Attributes:
        block: all of it, as bytes; item ``i`` begins at ``i * step``.
        items: the results.
    """

    def __init__(self, n: int, like: torch.Tensor, stride: Sequence[int], pool: PinnedPool) -> None:
        nbytes = like.numel() * like.itemsize
        self.step = -(-nbytes // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):
            self.block = pool._new((n * self.step,), torch.uint8, None, n * self.step)
            self.items = carve(self.block, n, self.step, like, stride)


def carve(
    block: torch.Tensor, n: int, step: int, like: torch.Tensor, stride: Sequence[int]
) -> list[torch.Tensor]:
    """Return tensors of the shape and dtype of ``like``, one every ``step`` bytes of ``block``."""
    nbytes = like.numel() * like.itemsize
    if not nbytes:
        empty = torch.empty(like.shape, dtype=like.dtype, device=block.device)
        return [empty.clone() for _ in range(n)]
    edges = itertools.islice(itertools.count(0, step), n)
    flat = (block[begin : begin + nbytes].view(like.dtype) for begin in edges)
    return [item.as_strided(like.shape, stride, item.storage_offset()) for item in flat]
