"""How each leaf of a transfer is copied, and the calls that enqueue it.

Everything is checked first, then memory is taken, then work is enqueued. The paths:

========  ==========================================================================================
direct    the copy engine reads or writes page-locked memory
driver    ordinary memory, by the driver's own staging, from a thread that may block
unpack    a last step after the copy: another layout or dtype than the copied bytes have
host      no device: memcpy (or torch's own copy, for strides and dtypes) on a worker thread
========  ==========================================================================================
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from streamlap import _native
from streamlap.arrays import (
    Source,
    as_destination,
    as_source,
    check_matches,
    is_dense,
    is_plain,
    overlapping,
)
from streamlap.devices import (
    Place,
    StreamLike,
    as_stream,
    current_stream,
    place_of,
    require_no_capture,
)
from streamlap.errors import InvalidArgument
from streamlap.pinned import PinnedPool, pool_for

DEFAULT_CHUNK = 16 << 20
WHOLE = 1 << 62
"""A chunk size that cuts nothing."""

Body = Callable[[], object]


@dataclass(eq=False)
class Part:
    """Leaves that one native transfer copies.

    Attributes:
        leaves: their positions in the flattened tree, in the native transfer's order.
        source_on_device: a device stream may write the sources, else the calling thread does.
    """

    native: _native.Transfer
    place: Place
    path: str
    leaves: list[int]
    source_on_device: bool
    source_place: Place


@dataclass(eq=False)
class Copied:
    """A leaf's destination, and where to ask whether it is there."""

    tensor: torch.Tensor
    as_numpy: bool
    given: Any = None
    part: Part | None = None  # None: empty, nothing to wait for
    position: int = 0

    def value(self) -> Any:
        """Return what the caller gets: what he gave, a NumPy array, or the tensor."""
        if self.given is not None:
            return self.given
        return self.tensor.numpy() if self.as_numpy else self.tensor


@dataclass
class Planned:
    """What a call of ``to_cpu`` or ``to_device`` has enqueued."""

    leaves: list[Any]
    parts: list[Part] = field(default_factory=list)
    borrowed: list[Source] = field(default_factory=list)


@dataclass
class _Batch:
    """The copies of one native call, being collected."""

    items: list[tuple[int, int, int, int, Body | None]] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    copied: list[Copied] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    destinations: list[torch.Tensor] = field(default_factory=list)
    last_steps: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, index: int, copied: Copied, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._add(index, copied, dst, src, None)

    def add_body(self, index: int, copied: Copied, dst: torch.Tensor, src: torch.Tensor) -> None:
        def body() -> None:
            # Also where one of them was made in inference mode, which a worker thread is not in.
            with torch.inference_mode():
                dst.copy_(src)

        self._add(index, copied, dst, src, body)

    def _add(
        self, index: int, copied: Copied, dst: torch.Tensor, src: torch.Tensor, body: Body | None
    ) -> None:
        nbytes = dst.numel() * dst.itemsize
        self.items.append((dst.data_ptr(), src.data_ptr(), nbytes, dst.itemsize, body))
        copied.position = len(self.leaves)
        self.leaves.append(index)
        self.copied.append(copied)
        self.sources.append(src)
        self.destinations.append(dst)

    def run_last_steps(self) -> None:
        with torch.inference_mode():
            for dst, src in self.last_steps:
                dst.copy_(src)


def _same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    return all(
        size == 1 or a == b
        for size, a, b in zip(first.shape, first.stride(), second.stride(), strict=True)
    )


@functools.lru_cache(maxsize=256)
def _external(handle: int, index: int) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))  # type: ignore[no-untyped-call]


def _on(stream: _native.Stream | None, place: Place) -> contextlib.AbstractContextManager[Any]:
    """Make ``stream`` torch's current one; nothing to do where it is already."""
    if stream is None or not place.is_cuda:
        return contextlib.nullcontext()
    current = current_stream(place)
    assert current is not None
    if (stream.handle, stream.device) == (current.handle, current.device):
        return contextlib.nullcontext()
    return torch.cuda.stream(_external(stream.handle, stream.device))


def _packed(source: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the source's values in the layout of ``like``, made on the current stream."""
    packed = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=source.device)
    return packed.copy_(source)


def _checked_outs(
    sources: list[Source | None], outs: list[Any], device: torch.device, dtype: torch.dtype | None
) -> list[torch.Tensor | None]:
    if all(out is None for out in outs):
        return [None] * len(outs)
    checked: list[torch.Tensor | None] = []
    for index, (source, out) in enumerate(zip(sources, outs, strict=True)):
        if source is None or out is None:
            checked.append(None)
            continue
        what = "out" if len(outs) == 1 else f"out[{index}]"
        tensor = as_destination(out, what)
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
            raise InvalidArgument(f"{what} is on {tensor.device}, not on {device}")
        check_matches(tensor, source.tensor.shape, dtype or source.tensor.dtype, what)
        checked.append(tensor)
    given = [(index, tensor) for index, tensor in enumerate(checked) if tensor is not None]
    if given:
        pair = overlapping([tensor for _, tensor in given])
        if pair is not None:
            first, second = (given[position][0] for position in pair)
            raise InvalidArgument(f"out[{first}] and out[{second}] overlap in memory")
        for index, tensor in given:
            for source in sources:
                if source is not None and overlapping([tensor, source.tensor]) is not None:
                    raise InvalidArgument(f"out[{index}] overlaps a source in memory")
    return checked


def plan_to_cpu(
    leaves: list[Any],
    outs: list[Any],
    dtype: torch.dtype | None,
    pin: bool | None,
    stream: StreamLike,
    pool: PinnedPool | None,
    chunk_bytes: int,
    host_place: Place | None = None,
) -> Planned:
    """Enqueue copies to the host. ``host_place`` is the logical device of CPU sources."""
    sources = [as_source(leaf) for leaf in leaves]
    if len(sources) == 1 and sources[0] is not None:
        simple = plan_simple(sources[0], outs[0], dtype, pin, stream, pool, chunk_bytes)
        if simple is not None:
            return simple
    checked = _checked_outs(sources, outs, torch.device("cpu"), dtype)
    groups: dict[Place, list[int]] = {}
    for index, source in enumerate(sources):
        if source is None:
            continue
        on_host = source.tensor.device.type == "cpu"
        place = (on_host and host_place) or place_of(source.tensor.device)
        groups.setdefault(place, []).append(index)

    planned = Planned(list(leaves))
    on_device = any(place.is_cuda for place in groups)
    streams: dict[Place, _native.Stream | None] = {}
    for place in groups:
        # In a tree of both, CPU leaves were written by the calling thread, not by that stream.
        ignored = on_device and not place.is_cuda and not isinstance(stream, _native.Stream)
        streams[place] = None if ignored else _producer(stream, place)
        require_no_capture(streams[place], "to_cpu()")

    for place, indices in groups.items():
        producer = streams[place]
        batches: dict[str, _Batch] = {}
        borrowed: list[Source] = []
        work: list[tuple[int, Copied, torch.Tensor | None]] = []
        new = [sources[index] for index in indices if checked[index] is None]
        small = _SmallBlock(place, pool, pin, new, dtype)
        for index in indices:
            source, out = sources[index], checked[index]
            assert source is not None
            copied, stage = _destination(source, out, outs[index], dtype, pin, pool, place, small)
            planned.leaves[index] = copied
            work.append((index, copied, stage))
        with contextlib.nullcontext() if stream is None else _on(producer, place):
            for index, copied, stage in work:
                source = sources[index]
                assert source is not None
                if copied.tensor.numel():
                    _add_to_cpu(batches, index, copied, stage, source, pin, place, borrowed)
        after = [] if producer is None else [producer]
        if place.is_cuda and any(checked[index] is not None for index in indices):
            current = current_stream(place)
            if current is not None and producer is not None and current.handle != producer.handle:
                after.append(current)
        for path, batch in batches.items():
            planned.parts.append(_submit(batch, path, place, False, after, chunk_bytes))
        planned.borrowed += borrowed
    return planned


def plan_simple(
    source: Source,
    out: Any,
    dtype: torch.dtype | None,
    pin: bool | None,
    stream: StreamLike,
    pool: PinnedPool | None,
    chunk_bytes: int,
) -> Planned | None:
    """Enqueue what nearly every call asks for, one tensor's bytes into new pinned memory.

    Answers None where more is asked for. It does what the general way does, in a third of the time.
    """
    tensor = source.tensor
    if out is not None or pin is False or not tensor.is_cuda:
        return None
    if (dtype is not None and dtype != tensor.dtype) or not is_plain(tensor):
        return None
    count = tensor.numel()
    contiguous = tensor.is_contiguous()
    if not count or not (contiguous or is_dense(tensor)):
        return None
    place = place_of(tensor.device)
    producer = _producer(stream, place)
    require_no_capture(producer, "to_cpu()")
    stride = None if contiguous else tensor.stride()
    dst = (pool or pool_for(place)).new(tensor.shape, tensor.dtype, stride, count)
    copied = Copied(dst, source.as_numpy)
    item = (dst.data_ptr(), tensor.data_ptr(), count * dst.itemsize, dst.itemsize, None)
    native = place.engine.submit(
        device=place.index,
        to_device=False,
        items=[item],
        after=[producer] if producer is not None else [],
        chunk_bytes=chunk_bytes,
        keep_source=tensor,
        keep_destination=dst,
    )
    copied.part = Part(native, place, "direct", [0], True, place)
    return Planned([copied], [copied.part], [source])


def _producer(stream: StreamLike, place: Place) -> _native.Stream | None:
    producer = as_stream(stream, place)
    if producer is None or not place.is_cuda or producer.device == place.index:
        return producer
    # A stream of another device: what is packed here must be made on this device, after it.
    current = current_stream(place)
    assert current is not None
    current.wait(producer.record())
    return current


class _SmallBlock:
    """One pinned block for the small leaves of a tree, carved into views."""

    LIMIT = 256 << 10
    ALIGN = 256

    def __init__(
        self,
        place: Place,
        pool: PinnedPool | None,
        pin: bool | None,
        sources: list[Source | None],
        dtype: torch.dtype | None,
    ) -> None:
        self._block: torch.Tensor | None = None
        self._used = 0
        if pin is False or len(sources) < 2:
            return
        sizes = [
            self._room(source.tensor.numel() * (dtype or source.tensor.dtype).itemsize)
            for source in sources
            if source is not None
        ]
        sizes = [size for size in sizes if 0 < size <= self.LIMIT]
        if len(sizes) > 1:
            self._block = (pool or pool_for(place)).empty(sum(sizes), torch.uint8)

    def _room(self, nbytes: int) -> int:
        return (nbytes + self.ALIGN - 1) // self.ALIGN * self.ALIGN

    def take(
        self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...]
    ) -> torch.Tensor | None:
        """Return a view of the block; None where the leaf is not small."""
        count = shape.numel()
        room = self._room(count * dtype.itemsize)
        if self._block is None or not 0 < room <= self.LIMIT:
            return None
        if self._used + room > self._block.numel():
            return None
        piece = self._block[self._used : self._used + count * dtype.itemsize].view(dtype)
        self._used += room
        return piece.as_strided(shape, stride, piece.storage_offset())


def _destination(
    source: Source,
    out: torch.Tensor | None,
    given: Any,
    dtype: torch.dtype | None,
    pin: bool | None,
    pool: PinnedPool | None,
    place: Place,
    small: _SmallBlock,
) -> tuple[Copied, torch.Tensor | None]:
    """Return where a leaf goes, and the pinned stage in between where one is needed."""
    tensor = source.tensor
    wanted = dtype or tensor.dtype
    pool = pool or pool_for(place)
    if out is not None:
        stage = None
        if place.is_cuda and out.numel() and not is_dense(out):
            stage = pool.empty(tensor.shape, wanted)
        return Copied(out, source.as_numpy, given), stage
    like = tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")
    stride = like.stride()
    if pin is False:
        return Copied(
            torch.empty_strided(tensor.shape, stride, dtype=wanted), source.as_numpy
        ), None
    carved = small.take(tensor.shape, wanted, stride)
    if carved is None:
        carved = pool.empty(tensor.shape, wanted, stride=stride)
    return Copied(carved, source.as_numpy), None


def _add_to_cpu(
    batches: dict[str, _Batch],
    index: int,
    copied: Copied,
    stage: torch.Tensor | None,
    source: Source,
    pin: bool | None,
    place: Place,
    borrowed: list[Source],
) -> None:
    tensor, dst = source.tensor, copied.tensor
    bytes_are_values = (
        tensor.dtype == dst.dtype
        and is_plain(tensor)
        and is_dense(tensor)
        and _same_layout(tensor, dst)
    )
    if not place.is_cuda:
        batch = batches.setdefault("host", _Batch())
        borrowed.append(source)
        if bytes_are_values:
            batch.add(index, copied, dst, tensor)
        else:
            batch.add_body(index, copied, dst, tensor)
        return
    target = dst if stage is None else stage
    if bytes_are_values and stage is None:
        borrowed.append(source)
    else:
        tensor = _packed(tensor, target, target.dtype)
    if stage is not None:
        batch = batches.setdefault("unpack", _Batch())
        batch.last_steps.append((dst, stage))
    elif (copied.given is None and pin is not False) or dst.is_pinned():
        batch = batches.setdefault("direct", _Batch())
    else:
        batch = batches.setdefault("driver", _Batch())
    batch.add(index, copied, target, tensor)
    if tensor is not source.tensor:
        batch.sources.append(source.tensor)  # packing has yet to read it, on the producer's stream
    if stage is not None:
        batch.destinations.append(dst)


def _submit(
    batch: _Batch,
    path: str,
    place: Place,
    to_device: bool,
    after: list[_native.Stream],
    chunk_bytes: int,
    source_place: Place | None = None,
) -> Part:
    engine = place.engine
    last_on_host = path == "unpack" and not to_device
    last_on_device = path == "unpack" and to_device
    native = engine.submit(
        device=place.index,
        to_device=to_device,
        items=batch.items,
        after=after,
        chunk_bytes=chunk_bytes,
        from_host_stream=path == "driver",
        finish=batch.run_last_steps if last_on_host else None,
        open_ended=last_on_device,
        keep_source=batch.sources,
        keep_destination=batch.destinations,
    )
    if last_on_device:
        copy_stream = engine.copy_stream(place.index, True)
        try:
            with torch.cuda.stream(_external(copy_stream.handle, place.index)):
                batch.run_last_steps()
        finally:
            engine.complete(native, copy_stream)
    on_device = place.is_cuda and (not to_device or source_place is not None)
    part = Part(native, place, path, batch.leaves, on_device, source_place or place)
    for copied in batch.copied:
        copied.part = part
    return part


def plan_to_device(
    leaves: list[Any],
    outs: list[Any],
    device: torch.device,
    dtype: torch.dtype | None,
    stream: StreamLike,
    chunk_bytes: int,
) -> Planned:
    """Enqueue copies to ``device``."""
    place = place_of(device)
    if not place.is_cuda:
        planned = plan_to_cpu(leaves, outs, dtype, None, stream, None, chunk_bytes, place)
        for leaf in planned.leaves:
            if isinstance(leaf, Copied):
                leaf.as_numpy = False  # a device has tensors
        return planned
    target = torch.device("cuda", place.index)
    sources = [as_source(leaf) for leaf in leaves]
    checked = _checked_outs(sources, outs, target, dtype)
    consumer = as_stream(stream, place)
    require_no_capture(consumer, "to_device()")
    planned = Planned(list(leaves))
    batches: dict[tuple[str, Place | None], _Batch] = {}
    for index, source in enumerate(sources):
        if source is None:
            continue
        from_device = source.tensor.device.type != "cpu"
        source_place = place_of(source.tensor.device) if from_device else None
        if source_place is not None:
            require_no_capture(current_stream(source_place), "to_device()")
        tensor, is_borrowed = _readable(
            source.tensor, dtype if from_device else None, checked[index]
        )
        with contextlib.nullcontext() if stream is None else _on(consumer, place):
            landing, final = _landing(tensor, checked[index], dtype or tensor.dtype, target)
        copied = Copied(final, False, outs[index])
        planned.leaves[index] = copied
        if not final.numel():
            continue
        path = "direct" if landing is final else "unpack"
        if not from_device and not tensor.is_pinned():
            if path == "direct":
                path = "driver"
            else:
                staged = pool_for(place).empty(tensor.shape, tensor.dtype, stride=tensor.stride())
                tensor, is_borrowed = staged.copy_(tensor), False
        batch = batches.setdefault((path, source_place), _Batch())
        batch.add(index, copied, landing, tensor)
        if tensor is not source.tensor:
            batch.sources.append(source.tensor)
        if landing is not final:
            batch.last_steps.append((final, landing))
            batch.destinations.append(final)
        if is_borrowed:
            planned.borrowed.append(source)
    for (path, source_place), batch in batches.items():
        after = [] if consumer is None else [consumer]
        producer = current_stream(source_place) if source_place is not None else None
        if producer is not None:
            after.append(producer)
        planned.parts.append(_submit(batch, path, place, True, after, chunk_bytes, source_place))
    return planned


def _readable(
    tensor: torch.Tensor, dtype: torch.dtype | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, bool]:
    """Return the source as one range of bytes, and whether that is still the caller's memory."""
    wanted = dtype or tensor.dtype
    like = out if out is not None and tensor.device.type != "cpu" and is_dense(out) else tensor
    fits = like is tensor or _same_layout(tensor, like)
    if tensor.dtype == wanted and is_plain(tensor) and is_dense(tensor) and fits:
        return tensor, True
    if not is_dense(like):
        like = torch.empty(tensor.shape, device="meta")
    return _packed(tensor, like, wanted), False


def _landing(
    tensor: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the bytes are copied to, and the destination: the same where nothing is left."""

    def new(wanted: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device=device)

    if tensor.dtype == dtype and (out is None or _same_layout(tensor, out)):
        final = new(dtype) if out is None else out
        return final, final
    return new(tensor.dtype), new(dtype) if out is None else out
