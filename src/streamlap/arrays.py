"""What can be copied, and how it lies in memory: trees, tensors, and arrays of other libraries."""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree

from streamlap import _native, foreign
from streamlap.errors import InvalidArgument, InvalidType, UnsupportedTensor
from streamlap.uncompiled import uncompiled

Tree = Any
"""A tensor or array, or lists, tuples, dicts, ... of them, as torch's pytree has it."""

TreeSpec = _pytree.TreeSpec

_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter))


def flatten(tree: Tree) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a tree, and its shape; of a list of tensors at once."""
    kind: Any = type(tree)
    if (kind is list or kind is tuple) and _LEAVES.issuperset(map(type, tree)):
        return list(tree), _row_of(kind, len(tree))
    leaves, spec = _pytree.tree_flatten(tree)
    return leaves, spec


@uncompiled
def unflatten(leaves: list[Any], spec: TreeSpec) -> Tree:
    """Return the tree of that shape with these leaves."""
    kind: Any = spec.type
    if (kind is list or kind is tuple) and spec is _row_of(kind, len(leaves)):
        return kind(leaves)
    return _pytree.tree_unflatten(leaves, spec)


@functools.lru_cache(maxsize=64)
def _row_of(kind: Any, count: int) -> TreeSpec:
    return _pytree.tree_structure(kind([0] * count))


@dataclass(slots=True)
class Source:
    """A leaf that holds data.

    Attributes:
        tensor: the data as a plain tensor, on its device, without history.
        as_numpy: the result is given back as a NumPy array (NumPy and CuPy sources).
        version: the version counter of the caller's tensor at the call; None if it has none.
        stream: the raw handle of the stream that is current in CuPy, for a CuPy array: there the
            caller writes to it. None: torch's current stream.
    """

    tensor: torch.Tensor
    as_numpy: bool
    version: int | None
    stream: int | None = None

    def written(self) -> torch.Tensor | None:
        """Return the tensor if it was written since."""
        same = self.version is None or version_of(self.tensor) == self.version
        return None if same else self.tensor


class Sources:
    """Many tensors that hold data, looked at all at once: a call each would cost more than they do.

    Attributes:
        tensors: plain, on their device, without history.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """Raise RuntimeError where one has no version counter."""
        self.tensors = tensors
        self._versions = _versions_of(tensors)

    def written(self) -> torch.Tensor | None:
        """Return one that was written since, if any."""
        now = _versions_of(self.tensors)
        if now == self._versions:
            return None
        pairs = zip(now, self._versions, strict=True)
        return self.tensors[next(i for i, (new, old) in enumerate(pairs) if new != old)]


_table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
if type(_table).__name__ == "PyCapsule":  # older versions of torch have none: the general way, then
    _native.use_tensors_of(
        _table, torch.Tensor, torch.nn.Parameter, torch.is_inference_mode_enabled
    )

_DTYPE = operator.attrgetter("dtype")
_VERSION = operator.attrgetter("_version")


@uncompiled
def _versions_of(tensors: list[torch.Tensor]) -> list[int]:
    found = _native.versions_of(tensors)
    return list(map(_VERSION, tensors)) if found is None else found


def storages_of(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return what holds the memory: a tensor of the caller's may be given other memory any time."""
    found = _native.storages_of(list(tensors))
    return list(map(torch.Tensor.untyped_storage, tensors)) if found is None else found


def row_like(
    shapes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: int,
) -> _native.TensorRow | None:
    """Return what tensors of these kinds would say of themselves; None where that is not known.

    Args:
        device: a GPU's index; -1: the CPU.
    """
    examples = list(map(_example, dtypes))
    return _native.TensorRow.described(list(shapes), list(strides), examples, device)


@functools.cache
def _example(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


def addresses_in(
    row: _native.TensorRow, tensors: list[Any], dtypes: list[torch.dtype]
) -> _native.Addresses | None:
    """Return where tensors of exactly these kinds are; None: they differ, or it is not known."""
    addresses = row.addresses_of(tensors)
    if addresses is None or (row.ambiguous and list(map(_DTYPE, tensors)) != dtypes):
        return None
    return addresses


def borrowed_of(tensors: list[torch.Tensor]) -> list[Source | Sources]:
    """Return what is to be asked whether one of these was written."""
    try:
        return [Sources(tensors)]
    except RuntimeError:
        return [Source(tensor, False, version_of(tensor)) for tensor in tensors]


def as_source(leaf: object) -> Source | None:
    """Return a leaf's data; None for a leaf that is no tensor and no array.

    Raises:
        UnsupportedTensor: sparse, quantized, meta, nested, or a subclass other than DTensor.
        CaptureError: an array of another library during CUDA graph capture.
    """
    if isinstance(leaf, torch.Tensor):
        return source_of(leaf)
    if isinstance(leaf, np.ndarray):
        return Source(_from_numpy(leaf), True, None)
    if isinstance(leaf, np.generic):
        return None
    if foreign.is_exporter(leaf):
        exported = foreign.export(leaf)
        return Source(exported.tensor, exported.is_cupy, None, exported.stream)
    return None


def source_of(tensor: torch.Tensor) -> Source:
    """Return a tensor's data; raises as :func:`as_source`."""
    plain = plain_tensor(tensor)
    return Source(plain, False, version_of(plain))


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if type(array) is not np.ndarray and not isinstance(array, np.memmap):
        raise UnsupportedTensor(f"a {type(array).__name__} is more than its data: pass .data of it")
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise UnsupportedTensor(f"a NumPy array of {array.dtype} cannot be copied as bytes")
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch knows neither; a copy is plain
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise UnsupportedTensor(f"torch has no dtype for NumPy's {array.dtype}") from error


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without history and without subclass, or refuse it by name."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(tensor, distributed.DTensor):
            return plain_tensor(tensor.to_local())
        raise UnsupportedTensor(f"a {kind.__module__}.{kind.__qualname__} is no plain tensor")
    if tensor.is_nested:
        raise UnsupportedTensor("a nested tensor cannot be copied as one range of bytes")
    if tensor.is_quantized:
        raise UnsupportedTensor("a quantized tensor carries more than its bytes: copy int_repr()")
    if tensor.layout is not torch.strided:
        raise UnsupportedTensor(f"a sparse tensor ({tensor.layout}) is not dense: copy its parts")
    if tensor.device.type == "meta":
        raise UnsupportedTensor("a meta tensor has no data")
    if is_functorch_wrapped_tensor(tensor):  # it has no address
        raise UnsupportedTensor(
            "a tensor inside torch.func (vmap, grad, ...) has no data of its own"
        )
    plain = tensor.detach()
    if not plain.data_ptr() and plain.numel():
        raise UnsupportedTensor(
            "the tensor has no memory: its storage was freed (resized to 0), or it is a zero "
            "that torch has only in mind"
        )
    return plain


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the version counter, which in-place operations raise; None for inference tensors."""
    return None if tensor.is_inference() else tensor._version


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in _by_stride(tensor):
        if stride != expected:
            return False
        expected *= size
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of contiguous memory, however large that would be."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _by_stride(tensor: torch.Tensor) -> list[tuple[int, int]]:
    pairs = [
        (size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ]
    return sorted(pairs, key=lambda pair: (pair[1], pair[0]))


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory, as in an expanded tensor."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return False
    reach = 0
    for size, stride in _by_stride(tensor):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes are the values: no lazy conjugation or negation."""
    return not (tensor.is_conj() or tensor.is_neg())


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and one past the last address of the elements."""
    if tensor.numel() == 0:
        return (0, 0)
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return begin, begin + (last + 1) * tensor.itemsize


def _shared(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two CPU tensors share an element (exactly, or the question is too hard)."""
    if first.is_contiguous() and second.is_contiguous():
        return True

    def view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        begin, end = span(tensor)
        raw = (ctypes.c_char * (end - begin)).from_address(begin)
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
        flat = np.frombuffer(memoryview(raw), dtype=f"V{tensor.itemsize}", count=1)
        return np.lib.stride_tricks.as_strided(flat, tuple(tensor.shape), strides)

    try:
        return bool(np.shares_memory(view(first), view(second), max_work=10_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the positions of two tensors that share memory, or None."""
    return overlap_between(tensors, None)


def overlap_between(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] | None
) -> tuple[int, int] | None:
    """Return the positions of a tensor and one of ``others`` that share memory, or None.

    Without ``others``: of two of ``tensors``. One sweep over the sorted ranges of addresses.
    """
    groups = (tensors, others or ())
    devices: dict[torch.device, int] = {}
    spans = sorted(
        (devices.setdefault(tensor.device, len(devices)), *span(tensor), kind, index)
        for kind, group in enumerate(groups)
        for index, tensor in enumerate(group)
        if tensor.numel()
    )
    for position, (device, _begin, end, kind, index) in enumerate(spans):
        for other_device, other_begin, _end, other_kind, other in spans[position + 1 :]:
            if other_device != device or other_begin >= end:
                break
            if others is not None and kind == other_kind:
                continue
            first, second = groups[kind][index], groups[other_kind][other]
            if first.device.type != "cpu" or _shared(first, second):
                return (index, other) if kind <= other_kind else (other, index)
    return None


def as_destination(out: object, what: str) -> torch.Tensor:
    """Return ``out`` as a tensor to be written.

    Raises:
        InvalidType: neither tensor nor NumPy array.
        InvalidArgument: read-only, expanded or overlapping with itself.
        UnsupportedTensor: sparse, meta, ...
    """
    if isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise InvalidArgument(f"{what} is a read-only array")
        if any(stride < 0 for stride in out.strides):
            raise InvalidArgument(f"{what} has negative strides, which torch cannot describe")
        if not out.dtype.isnative:
            raise UnsupportedTensor(f"{what} has bytes in foreign order ({out.dtype})")
        try:
            tensor = torch.from_numpy(out)
        except TypeError as error:
            raise UnsupportedTensor(f"torch has no dtype for NumPy's {out.dtype}") from error
    elif isinstance(out, torch.Tensor):
        if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
            raise InvalidArgument(f"{what} requires grad; pass out.detach() or use no_grad()")
        tensor = plain_tensor(out)
        if not is_plain(tensor):
            raise InvalidArgument(f"{what} is a conjugate or negative view; pass plain memory")
    else:
        raise InvalidType(f"{what} must be a tensor or a NumPy array, not {type(out).__name__}")
    if may_overlap_itself(tensor):
        raise InvalidArgument(
            f"{what} is expanded or overlaps itself (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): several elements would be written to one place"
        )
    return tensor


def check_matches(out: torch.Tensor, shape: torch.Size, dtype: torch.dtype, what: str) -> None:
    """Refuse a destination of the wrong shape or dtype."""
    if out.shape != shape:
        raise InvalidArgument(f"{what} has shape {tuple(out.shape)}, not {tuple(shape)}")
    if out.dtype != dtype:
        raise InvalidArgument(f"{what} has dtype {out.dtype}, not {dtype}")
