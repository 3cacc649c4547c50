"""Which runtime serves which tensor, and whose stream is meant.

CUDA tensors are served by the CUDA runtime; CPU tensors by worker threads, on logical devices
``cpu:0``, ``cpu:1``, ... that exist as soon as they are named.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamlap import _native, foreign
from streamlap.checked import Checked
from streamlap.checks import as_count
from streamlap.errors import CaptureError, DeviceError, InvalidArgument, InvalidType
from streamlap.serving import Place as Place
from streamlap.serving import cuda_reason as cuda_reason
from streamlap.serving import cuda_runtime as cuda_runtime
from streamlap.serving import current, serve, serve_by_threads
from streamlap.simulation import MAX_LOGICAL, Simulation
from streamlap.sizes import memory_total
from streamlap.uncompiled import uncompiled

StreamLike = Any
"""A stream of torch, CuPy or numba, anything with ``__cuda_stream__``, a raw handle as an int, or
one of streamlap's own (``_native.Stream``)."""

_RUNTIMES = ("host", "sim")


def host_place(index: int) -> Place:
    """Return a logical CPU device; raise InvalidArgument where there cannot be one."""
    if not 0 <= index < MAX_LOGICAL:
        raise InvalidArgument(f"no logical CPU device {index}: there are {MAX_LOGICAL} at most")
    return current.get().place(index)


def cuda_place(index: int) -> Place:
    """Return a GPU; raise DeviceError or InvalidArgument where there is none."""
    return current.get().place(index, cuda=True)


@dataclass(frozen=True)
class Device:
    """One device, as :func:`devices` reports it.

    Attributes:
        name: ``cuda:0`` or ``cpu:0``.
        runtime: ``cuda`` or ``host``.
        description: what the hardware calls itself.
        memory: bytes of its memory.
    """

    name: str
    runtime: str
    description: str
    memory: int


# How many logical CPU devices a list of tensors is spread over; None: one each.
_logical: contextvars.ContextVar[int | None] = contextvars.ContextVar("logical", default=None)


def _logical_index(name: str) -> int:
    device = parse_device(name)
    if device.type != "cpu":
        raise InvalidArgument(f"{name!r} is no logical CPU device: write 'cpu:0', 'cpu:1', ...")
    return device.index or 0


def use_runtime(
    name: str,
    devices: int | Sequence[str] | None = None,
    *,
    schedule: str | None = None,
    costs: dict[str, float] | None = None,
) -> contextlib.AbstractContextManager[Any]:
    """Say what serves CPU tensors inside the ``with`` block.

    Args:
        name: ``"host"``: worker threads, the default. ``"sim"``: a simulation on a virtual clock,
            for tests and predictions; the block's value is a ``streamlap.simulation.Simulation``.
        devices: how many logical CPU devices a list of CPU tensors is spread over, or their names
            (``["cpu:0", "cpu:1"]``). Without it the i-th tensor of a list uses device i.
        schedule: of a simulation, who moves next: ``eager`` (if left out), ``lazy``,
            ``random(SEED)``, ``starve(STREAM)``, ``pct(SEED,CHANGES)`` or what
            ``Simulation.replay()`` gave.
        costs: of a simulation, in seconds: ``per_copy``, ``task``; in bytes a second:
            ``to_host``, ``to_device``, ``on_device``, ``memcpy``. What is left out costs nothing.

    Raises:
        InvalidArgument: an unknown runtime, schedule or cost, or no devices, or names that are not
            ``cpu:0``, ... in order.

    The choice belongs to the calling thread (to its context, as ``contextvars`` means it).
    """
    if name not in _RUNTIMES:
        known = ", ".join(repr(known) for known in _RUNTIMES)
        raise InvalidArgument(f"unknown runtime {name!r} for CPU tensors; there is {known}")
    count: int | None
    if devices is None:
        count = None
    elif isinstance(devices, (list, tuple)):
        indices = [_logical_index(device) for device in devices]
        if indices != list(range(len(indices))):
            raise InvalidArgument(f"devices must be cpu:0, cpu:1, ... in order, not {devices!r}")
        count = len(indices)
    else:
        count = as_count(devices, "devices")
    if count is not None and not 1 <= count <= MAX_LOGICAL:
        raise InvalidArgument(f"devices must be 1 to {MAX_LOGICAL}, not {count}")
    if name != "sim":
        if schedule is not None or costs is not None:
            raise InvalidArgument(f"schedule and costs are a simulation's, not {name!r}'s")
        return _serve(count, serve_by_threads())
    if schedule is not None and not isinstance(schedule, str):
        raise InvalidType(f"schedule must be a str, not {type(schedule).__name__}")
    return _serve(count, serve(Simulation(schedule or "eager", costs)))


@contextlib.contextmanager
def _serve(count: int | None, block: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
    token = _logical.set(count)
    try:
        with block as serving:
            yield serving
    finally:
        _logical.reset(token)


def checking() -> contextlib.AbstractContextManager[Checked]:
    """Check the order of all accesses in a block, on worker threads and on GPUs.

    The block's value counts them: ``accesses``. Two accesses to the same bytes, one of them a
    write, that nothing orders raise :class:`OrderError`, whether they happened to come in the right
    order or not. Seen are copies, results read, pool memory handed out again, and the default
    products on a GPU; other work of your own on a device is not. Threads that you start know
    nothing of what you did before: let one thread use a transfer. ``STREAMLAP_CHECK=1`` checks the
    whole process.

    The block has runtimes, streams and pools of its own, which go when nothing made in it is left.
    It belongs to the calling thread.
    """
    return serve(Checked())


def place_of(device: torch.device, position: int = 0) -> Place:
    """Return where work for a tensor on ``device`` runs.

    Args:
        device: the tensor's.
        position: of the tensor in a list, which spreads CPU tensors over logical devices.

    Raises:
        InvalidArgument: a kind of device that streamlap does not know.
        DeviceError: a CUDA device that cannot be used.
    """
    if device.type == "cuda":
        cuda_runtime()  # first: torch's own error would not say why there is none
        index: int | None = device.index  # torch's types deny the None of a plain "cuda"
        return cuda_place(torch.cuda.current_device() if index is None else index)
    if device.type == "cpu":
        return host_place(device.index or position % (_logical.get() or MAX_LOGICAL))
    raise InvalidArgument(f"streamlap knows the devices 'cpu' and 'cuda', not {str(device)!r}")


def parse_device(device: str | int | torch.device) -> torch.device:
    """Return ``device`` as torch has it, with errors that say what is allowed."""
    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str):
        device = f"cuda:{as_count(device, 'device')}"
    number = re.fullmatch(r"[a-z]+:([0-9]+)", device)
    try:
        # torch keeps the number in eight bits, and takes what does not fit for another one.
        if number is not None and int(number[1]) >= 128:
            raise RuntimeError("no such number")
        return torch.device(device)
    except RuntimeError as error:
        raise InvalidArgument(f"{device!r} is no device: write 'cuda:0' or 'cpu'") from error


def cuda_in_use() -> bool:
    """Return whether torch has initialised CUDA in this process."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


_raw_current = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_handle(index: int) -> int:
    """Return the raw handle of torch's current stream on CUDA device ``index``."""
    if _raw_current is not None:
        return int(_raw_current(index))
    return int(torch.cuda.current_stream(index).cuda_stream)


def current_stream(place: Place) -> _native.Stream | None:
    """Return the caller's current stream; None where the calling thread itself does the work."""
    if not place.is_cuda:
        return None
    return place.runtime.adopt(place.index, current_handle(place.index))


def as_stream(stream: StreamLike, place: Place) -> _native.Stream | None:
    """Return ``stream`` (None: the current one) as a stream of ``place``'s runtime.

    Raises:
        InvalidType: nothing that is known as a stream.
        InvalidArgument: a stream of another runtime, or a negative handle.
    """
    if stream is None:
        return current_stream(place)
    if isinstance(stream, _native.Stream):
        if stream.runtime is not place.runtime:
            raise InvalidArgument(
                f"a stream of runtime '{stream.runtime.name}' cannot order work on {place}"
            )
        return stream
    index, handle = _native_handle(stream, place.index)
    if not place.is_cuda:
        raise InvalidArgument(f"a CUDA stream cannot order work on {place}")
    if handle < 0:
        raise InvalidArgument(f"a stream's handle is not negative: {handle}")
    return place.runtime.adopt(index, handle)


def check_stream(stream: StreamLike) -> None:
    """Raise as :func:`as_stream` would for something that is no stream at all."""
    if _native_handle(stream, 0)[1] < 0:
        raise InvalidArgument("a stream's handle is not negative")


def _native_handle(stream: StreamLike, index: int) -> tuple[int, int]:
    if isinstance(stream, int) and not isinstance(stream, bool):
        return index, stream
    if isinstance(stream, torch.Stream):
        if stream.device.type != "cuda":
            raise InvalidArgument(f"a stream of device type {stream.device.type!r} is not served")
        own = stream.device.index
        return (index if own is None else own), int(stream.cuda_stream)  # type: ignore[attr-defined]
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _version, handle = protocol() if callable(protocol) else protocol
        return _device_of(stream, index), operator.index(handle)
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if handle is not None:
            value = getattr(handle, "value", handle)  # numba wraps it in a ctypes pointer
            return _device_of(stream, index), operator.index(value or 0)
    raise InvalidType(
        f"{type(stream).__name__} is no stream: pass one of torch, CuPy or numba, an int handle, "
        "or an object with __cuda_stream__"
    )


def _device_of(stream: StreamLike, default: int) -> int:
    own = getattr(stream, "device_id", default)  # CuPy's name for it; -1: the current device
    return own if isinstance(own, int) and own >= 0 else default


class _Delivery:
    """A callable for a worker, whose waiter is told if it is dropped without having run."""

    # Of the class: an interrupt may end __init__ before its first line, and __del__ comes yet.
    _lost: Callable[[Exception], object] | None = None

    def __init__(self, run: Callable[[], object], lost: Callable[[Exception], object]) -> None:
        self._run = run
        self._lost = lost

    def __call__(self) -> None:
        self._lost = None
        self._run()

    def __del__(self) -> None:
        if self._lost is not None and not _native.ending():
            self._lost(DeviceError("the worker failed before it came to this item"))


def compute_on(
    place: Place, run: Callable[[], object], lost: Callable[[Exception], object]
) -> None:
    """Let the worker of a logical CPU device call ``run``; if it never will, ``lost(error)``.

    What left an earlier callable is not this one's error, and is taken off the worker.
    """
    stream = place.compute_stream()
    stream.reset_error()
    stream.launch(_Delivery(run, lost))


def require_no_capture(stream: _native.Stream | None, operation: str) -> None:
    """Raise CaptureError while a CUDA graph is captured on ``stream``; the capture stays good."""
    if stream is not None and stream.capturing():
        raise CaptureError(
            f"{operation} inside CUDA graph capture: copies to the host cannot be part of a "
            "captured graph. Call it before or after the capture"
        )


def streams_in_use() -> list[tuple[int, int]]:
    """Return the current streams on each device in use: who may still use a dying block.

    torch's, and CuPy's where it is another one: CuPy reads NumPy results on its own.
    """
    if not cuda_in_use():
        return []
    found = []
    for index in cuda_runtime().active_devices():
        found.append((index, current_handle(index)))
        other = foreign.cupy_handle_or_none(index)
        if other is not None and other != found[-1][1]:
            found.append((index, other))
    return found


_native.set_current_streams_hook(streams_in_use)


def devices() -> list[Device]:
    """Return the devices of this machine: its GPUs, then the CPU's logical devices in use.

    Raises:
        DeviceError: there is a GPU, but it cannot be used. Thread-safe.
    """
    found = []
    if not cuda_reason():
        for index in range(cuda_runtime().device_count):
            properties = torch.cuda.get_device_properties(index)
            found.append(
                Device(f"cuda:{index}", "cuda", properties.name, int(properties.total_memory))
            )
    cores = len(os.sched_getaffinity(0))
    for index in range(_logical.get() or 1):
        found.append(Device(f"cpu:{index}", "host", f"CPU, {cores} cores", memory_total()))
    return found


@uncompiled
def synchronize(device: str | int | torch.device | None = None) -> None:
    """Block until all work on a device is done.

    Args:
        device: one device; None: every device used so far. No context is created on any other.

    Raises:
        InvalidArgument: no such device.
        DeviceError: the work failed.

    Thread-safe. The interpreter's lock is released while it waits.
    """
    _native.require_usable()
    if device is not None:
        place = place_of(parse_device(device))
        place.runtime.synchronize(place.index)  # site: devices.synchronize_one
        return
    for index in dict(streams_in_use()):
        torch.cuda.synchronize(index)  # site: devices.synchronize_torch
    host = current.get().runtime()
    for index in range(MAX_LOGICAL):
        host.synchronize(index)  # site: devices.synchronize_host
