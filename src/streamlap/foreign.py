"""Arrays of other libraries as tensors on the same memory, and whose stream orders them.

CuPy is known by name. Its arrays are ordered by the stream that is CuPy's current one on the
array's own device, and torch's streams have no part in it. Any other exporter of DLPack is asked to
order torch's current stream, as the protocol says.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.dlpack

from streamlap import _native
from streamlap.errors import CaptureError, UnsupportedTensor

PER_THREAD = 2
"""CUDA's handle of the per-thread default stream: one number for another stream in each thread.

torch's allocator tells streams apart by their handles. Memory that it gave out under this one could
go from one thread to the next with nothing to order them, so none is allocated there.
"""

_CUDA = 2  # DLPack's numbers for kinds of memory
_MANAGED = 13


@dataclass(slots=True)
class Exported:
    """What an array of another library gives.

    Attributes:
        tensor: its data, on its memory (or on a copy's).
        is_cupy: whether it is one of CuPy's.
        stream: the raw handle of the stream that orders it; None: torch's current one does.
    """

    tensor: torch.Tensor
    is_cupy: bool
    stream: int | None


def is_exporter(leaf: object) -> bool:
    """Return whether ``leaf`` offers its data through DLPack."""
    return hasattr(leaf, "__dlpack__") and hasattr(leaf, "__dlpack_device__")


def is_cupy(leaf: object) -> bool:
    """Return whether ``leaf`` is an array of CuPy, or of a class derived from CuPy's."""
    return isinstance(leaf, getattr(sys.modules.get("cupy"), "ndarray", ()))


def cupy_handle(index: int) -> int:
    """Return the raw handle of the stream that is CuPy's current one on device ``index``.

    It belongs to the calling thread. CuPy says 0 for the default stream and ``PER_THREAD`` for the
    per-thread one, which are CUDA's own names for them.
    """
    return int(sys.modules["cupy"].cuda.get_current_stream(index).ptr)


def cupy_handle_or_none(index: int) -> int | None:
    """Return :func:`cupy_handle`; None where CuPy is not imported (or half), or has no driver."""
    cuda = getattr(sys.modules.get("cupy"), "cuda", None)
    if getattr(cuda, "get_current_stream", None) is None:
        return None
    try:
        return cupy_handle(index)
    except RuntimeError:
        return None  # CuPy's errors are; it has enqueued nothing then


def export(leaf: Any) -> Exported:
    """Return an exporter's data without waiting for a device.

    Raises:
        UnsupportedTensor: torch cannot have it.
        CaptureError: during CUDA graph capture.
    """
    if _torch_captures():
        raise CaptureError("an array of another library inside CUDA graph capture")
    try:
        return _export_cupy(leaf) if is_cupy(leaf) else _export_other(leaf)
    except (CaptureError, UnsupportedTensor):
        raise
    except Exception as error:
        raise UnsupportedTensor(f"{type(leaf).__name__} gives torch no data: {error}") from error


def _torch_captures() -> bool:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(initialized and torch.cuda.is_current_stream_capturing())


def _export_cupy(array: Any) -> Exported:
    kind, index = array.__dlpack_device__()
    handle: int | None = None
    if kind in (_CUDA, _MANAGED):
        torch.cuda.init()  # type: ignore[no-untyped-call]
        handle = cupy_handle(index)
    # DLPack counts strides in elements; CuPy has them in bytes.
    if _has_negative_strides(array) or any(step % array.itemsize for step in array.strides):
        if handle is not None and _native.cuda_runtime().adopt(index, handle).capturing():
            raise CaptureError("a CuPy array with such strides inside CUDA graph capture")
        with _device(kind, index):
            array = array.copy()
        kind, index = array.__dlpack_device__()
    if kind == _MANAGED:
        # torch refuses DLPack's name for such memory, but not the memory itself.
        tensor = torch.as_tensor(array, device=torch.device("cuda", index))
    else:
        # -1: no order. CuPy would order its current stream on the *current* device, which need not
        # be the array's, and make torch's stream wait where nothing of torch's takes part.
        tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))
    return Exported(tensor, True, handle)


def _export_other(leaf: Any) -> Exported:
    if _has_negative_strides(leaf):
        raise UnsupportedTensor(
            f"a {type(leaf).__name__} with negative strides is nothing that torch can describe: "
            "pass a copy of it"
        )
    with _device(*leaf.__dlpack_device__()):
        return Exported(torch.utils.dlpack.from_dlpack(leaf), False, None)


def _has_negative_strides(array: Any) -> bool:
    """Return whether an array says that it has some. They end the process in torch (2.13)."""
    strides = getattr(array, "strides", None)
    if not isinstance(strides, (list, tuple)):
        return False
    return any(isinstance(stride, int) and stride < 0 for stride in strides)


def _device(kind: int, index: int) -> contextlib.AbstractContextManager[Any]:
    """Make an array's device the current one: exporters ask for *its* current stream."""
    if kind != _CUDA and kind != _MANAGED:
        return contextlib.nullcontext()
    return torch.cuda.device(index)
