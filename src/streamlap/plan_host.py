"""How each leaf gets to the host: checked first, then given memory, then enqueued."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from streamlap import _native, foreign
from streamlap.arrays import Source, as_source, contiguous_stride, is_dense, is_plain
from streamlap.batch import (
    Batch,
    Copied,
    Part,
    Planned,
    checked_outs,
    on_stream,
    packed,
    same_layout,
    submit_batch,
)
from streamlap.checks import LARGEST
from streamlap.devices import (
    Place,
    StreamLike,
    as_stream,
    current_stream,
    place_of,
    require_no_capture,
    streams_in_use,
)
from streamlap.direct import copy_out
from streamlap.errors import InvalidArgument, OutOfMemory, PoolExhausted
from streamlap.moving import (
    ELEMENTS,
    PLAIN,
    Candidate,
    Change,
    by_way,
    check_counted,
    choose,
    element_between,
    layout_between,
)
from streamlap.pinned import PinnedPool, pool_for, view_of
from streamlap.policy import policy


def plan_to_cpu(
    leaves: list[Any],
    outs: list[Any],
    dtype: torch.dtype | None,
    pin: bool | None,
    stream: StreamLike,
    pool: PinnedPool | None,
    chunk_bytes: int,
    host_place: Place | None = None,
    change: Change | None = None,
) -> Planned:
    """Enqueue copies to the host.

    ``host_place`` is the logical device of CPU sources. With a ``change`` leaves may be moved by
    kernels, which do what it says; None: none are.
    """
    sources = [as_source(leaf) for leaf in leaves]
    counts = change is not None and change.counts
    if change is not None:
        check_counted(sources, change)
    if len(sources) == 1 and sources[0] is not None and not counts:
        simple = _plan_simple(
            sources[0], outs[0], dtype, pin, stream, pool, chunk_bytes, host_place
        )
        if simple is not None:
            return simple
    checked = checked_outs(sources, outs, torch.device("cpu"), dtype)
    if counts:
        _check_countable(sources, checked, pin, dtype, stream)
        pin = True if pin is None else pin  # no kernel writes to ordinary memory
    groups: dict[tuple[Place, int | None], list[int]] = {}  # by the stream that orders them
    for index, source in enumerate(sources):
        if source is None:
            continue
        on_host = source.tensor.device.type == "cpu"
        place = (on_host and host_place) or place_of(source.tensor.device)
        own = source.stream if stream is None and place.is_cuda else None
        groups.setdefault((place, own), []).append(index)

    planned = Planned(list(leaves))
    on_device = any(place.is_cuda for place, _own in groups)
    streams: dict[tuple[Place, int | None], _native.Stream | None] = {}
    for place, own in groups:
        # In a tree of both, CPU leaves were written by the calling thread, not by that stream.
        ignored = on_device and not place.is_cuda and not isinstance(stream, _native.Stream)
        ordered = stream if own is None else own
        streams[place, own] = None if ignored else producer_of(ordered, place, "to_cpu()")
        if place.is_cuda and any(out is not None for out in checked):
            for index, handle in streams_in_use():
                require_no_capture(place.runtime.adopt(index, handle), "to_cpu(out=...)")

    for (place, own), indices in groups.items():
        producer = streams[place, own]
        of_cupy = any(getattr(sources[index], "stream", None) is not None for index in indices)
        batches: dict[str, Batch] = {}
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
        is_current = stream is None and own is None
        with contextlib.nullcontext() if is_current else on_stream(producer, place):
            candidates: list[Candidate] = []
            for index, copied, stage in work:
                source = sources[index]
                assert source is not None
                if not copied.tensor.numel():
                    continue
                add = functools.partial(
                    _add_to_cpu, batches, index, copied, stage, source, place, borrowed
                )
                candidate = None
                if change is not None and stage is None:
                    candidate = _candidate(source, copied, place, change, add, index)
                if candidate is None:
                    add()
                else:
                    candidates.append(candidate)
            chosen, rest = choose(candidates, place, True, not place.is_cuda)
            for candidate in rest:
                candidate.add()
        after = [] if producer is None else [producer]  # site: plan_host.batches_after_producer
        if place.is_cuda and any(checked[index] is not None for index in indices):
            # Whoever reads the destinations so far: copies to any device, on its current stream.
            after += [
                place.runtime.adopt(index, handle)
                for index, handle in streams_in_use()
                if producer is None or (index, handle) != (producer.device, producer.handle)
            ]
        for moving in by_way(chosen, change or PLAIN):
            moved = [leaf for group in moving.groups for leaf in group.leaves]
            kept = []
            for leaf in moved:
                source = sources[leaf.index]
                assert source is not None
                if leaf.src is source.tensor:
                    borrowed.append(source)  # site: plan_host.borrow_moved
                else:
                    # packing has yet to read it, on the producer's stream
                    kept.append(source.tensor)  # site: plan_host.keep_packed_moved
            planned.parts.append(
                moving.submit(
                    *(place, False, after, kept, pool),
                    of_cupy=of_cupy,
                    producer=producer,
                    chunk_bytes=chunk_bytes,
                )
            )
            planned.counts += moving.counts
        for path, batch in batches.items():
            planned.parts.append(
                submit_batch(batch, path, place, False, after, chunk_bytes, of_cupy=of_cupy)
            )
        planned.borrowed += borrowed
    return planned


def _plan_simple(
    source: Source,
    out: Any,
    dtype: torch.dtype | None,
    pin: bool | None,
    stream: StreamLike,
    pool: PinnedPool | None,
    chunk_bytes: int,
    host_place: Place | None,
) -> Planned | None:
    """Enqueue what nearly every call asks for, one tensor's bytes into new pinned memory.

    Answers None where more is asked for. It does what the general way does, in a third of the time.
    """
    tensor = source.tensor
    if out is not None or pin is False:
        return None
    if (dtype is not None and dtype != tensor.dtype) or not is_plain(tensor):
        return None
    count = tensor.numel()
    if not count or not is_dense(tensor):
        return None
    place = (not tensor.is_cuda and host_place) or place_of(tensor.device)
    own = source.stream if stream is None and place.is_cuda else None
    producer = _producer(stream if own is None else own, place)
    require_no_capture(producer, "to_cpu()")
    try:
        native, block = copy_out(
            place,
            pool or pool_for(place),
            tensor,
            count * tensor.itemsize,
            chunk_bytes,
            True,
            after=producer,  # site: plan_host.after_producer
            keep_source=tensor,  # site: plan_host.keep_source
        )
    except PoolExhausted:
        if pin:
            raise
        return None
    path = "direct" if place.is_cuda else "host"
    dst = view_of(block, tensor.shape, tensor.dtype, tensor.stride())
    part = Part(native, place, path, [0], place.is_cuda, place, source.stream is not None)
    return Planned([Copied(dst, source.as_numpy, None, part)], [part], [source])


def _producer(stream: StreamLike, place: Place) -> _native.Stream | None:
    producer = as_stream(stream, place)
    if producer is None or not place.is_cuda or producer.device == place.index:
        return producer
    # A stream of another device: what is packed here must be made on this device, after it.
    return current_after(producer, place, "to_cpu()")


def producer_of(stream: StreamLike, place: Place, call: str) -> _native.Stream | None:
    """Return the stream that copies of ``place`` come after, on which sources may be packed.

    None: the calling thread has written the sources. Raises CaptureError during a capture there.
    """
    producer = _producer(stream, place)
    require_no_capture(producer, call)
    if producer is not None and place.is_cuda and producer.handle == foreign.PER_THREAD:
        return current_after(producer, place, call)  # packing needs memory
    return producer


def current_after(producer: _native.Stream, place: Place, call: str) -> _native.Stream:
    """Return torch's current stream of ``place``, made to wait for ``producer``."""
    current = current_stream(place)
    assert current is not None
    require_no_capture(producer, call)
    require_no_capture(current, call)
    current.wait(producer.record())  # site: plan_host.current_after_producer
    return current


class _SmallBlock:
    """One pinned block for the small leaves of a tree, carved into views."""

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
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._used = 0
        self._limit = policy().small_leaf_bytes
        if pin is False or len(sources) < 2:
            return
        sizes = [
            self._room(source.tensor.numel() * (dtype or source.tensor.dtype).itemsize)
            for source in sources
            if source is not None
        ]
        sizes = [size for size in sizes if 0 < size <= self._limit]
        if len(sizes) > 1:
            # Past the limit each leaf asks for itself.
            with contextlib.nullcontext() if pin else contextlib.suppress(PoolExhausted):
                self._block = (pool or pool_for(place)).empty(sum(sizes), torch.uint8)

    def _room(self, nbytes: int) -> int:
        return (nbytes + self.ALIGN - 1) // self.ALIGN * self.ALIGN

    def take(
        self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...]
    ) -> torch.Tensor | None:
        """Return a view of the block; None where the leaf is not small."""
        count = shape.numel()
        room = self._room(count * dtype.itemsize)
        if self._block is None or not 0 < room <= self._limit:
            return None
        if self._used + room > self._block.numel():
            return None
        flat = self._typed.get(dtype)
        if flat is None:
            flat = self._typed[dtype] = self._block.view(dtype)
        first = flat.storage_offset() + self._used // dtype.itemsize
        self._used += room
        return flat.as_strided(shape, stride, first)


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
            stage = pool._new(tensor.shape, wanted, None, tensor.numel())
        return Copied(out, source.as_numpy, given), stage
    stride = tensor.stride() if is_dense(tensor) else contiguous_stride(tensor.shape)
    count = tensor.numel()
    if pin is not False:
        pinned = small.take(tensor.shape, wanted, stride)
        if pinned is None:
            pinned = pool._new_or_none(tensor.shape, wanted, stride, count, pin)
        if pinned is not None:
            return Copied(pinned, source.as_numpy), None
    ordinary = _new_ordinary(tensor.shape, wanted, stride, count, place)
    return Copied(ordinary, source.as_numpy, ordinary=True), None


MAPPED = 4 << 20
"""New ordinary memory of so many bytes is a mapping of its own, on huge pages."""


def _new_ordinary(
    shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...], count: int, place: Place
) -> torch.Tensor:
    """Return a tensor in ordinary memory; a mapping's pages become present as it is written."""
    nbytes = count * dtype.itemsize
    if nbytes > LARGEST:
        raise OutOfMemory(f"{nbytes} bytes are more than any system has")
    if nbytes < MAPPED or not place.is_cuda:
        try:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        except RuntimeError as error:
            raise OutOfMemory(f"the system refused {nbytes} bytes: {error}") from error
    else:
        flat = torch.frombuffer(_native.Pages(nbytes), dtype=dtype, count=count)
        made = flat.as_strided(shape, stride)
    if place.checked:
        place.runtime.fresh(made.data_ptr(), nbytes)  # site: plan_host.fresh
    return made


def _check_countable(
    sources: list[Source | None],
    outs: list[torch.Tensor | None],
    pin: bool | None,
    dtype: torch.dtype | None,
    stream: StreamLike,
) -> None:
    """Refuse what a count cannot be made on the way to."""
    on_worker = isinstance(stream, _native.Stream)
    for index, (source, out) in enumerate(zip(sources, outs, strict=True)):
        if source is None or source.tensor.dtype not in ELEMENTS:
            continue
        tensor = source.tensor
        flat = out is None or out.is_contiguous()
        why = None
        if dtype is not None and dtype not in ELEMENTS:
            why = f"a count on the way to {dtype}"
        elif tensor.is_cuda and (pin is False if out is None else not out.is_pinned()):
            why = "ordinary memory, which no kernel can write"
        elif out is not None and not is_dense(out):
            why = "an out with gaps"
        elif on_worker and not tensor.is_cuda and not (flat and tensor.is_contiguous()):
            why = "a layout to be packed after a worker's stream"
        if why is not None:
            raise InvalidArgument(f"nonfinite=True is not possible with {why} (leaf {index})")


def _candidate(
    source: Source,
    copied: Copied,
    place: Place,
    change: Change,
    add: Callable[[], None],
    index: int,
) -> Candidate | None:
    """Return the leaf as one that may be moved with others; None where it cannot."""
    tensor, dst = source.tensor, copied.tensor
    ordinary = copied.ordinary or (copied.given is not None and not dst.is_pinned())
    if place.is_cuda and ordinary:
        return None
    element = element_between(tensor, dst, dst.dtype, change)
    if element is not None:
        return Candidate(index, copied, dst, tensor, element, add)
    counts = change.counts and tensor.dtype in ELEMENTS
    if counts or place.is_cuda:  # without a device torch's own copy is as good
        element = change.element(tensor.dtype, dst.dtype)
        layout = layout_between(tensor, dst)
        if element is not None and layout is not None:
            return Candidate(index, copied, dst, tensor, element, add, layout)
    if not counts:
        return None
    # Only a move counts, so what it reads is packed first.
    tensor = packed(tensor, dst, tensor.dtype)
    element = change.element(tensor.dtype, dst.dtype)
    assert element is not None
    return Candidate(index, copied, dst, tensor, element, add)


def _add_to_cpu(
    batches: dict[str, Batch],
    index: int,
    copied: Copied,
    stage: torch.Tensor | None,
    source: Source,
    place: Place,
    borrowed: list[Source],
) -> None:
    tensor, dst = source.tensor, copied.tensor
    bytes_are_values = (
        tensor.dtype == dst.dtype
        and is_plain(tensor)
        and is_dense(tensor)
        and same_layout(tensor, dst)
    )
    if not place.is_cuda:
        batch = batches.setdefault("host", Batch())
        borrowed.append(source)  # site: plan_host.borrow_host
        if bytes_are_values:
            batch.add(index, copied, dst, tensor)
        else:
            batch.add_body(index, copied, dst, tensor)
        return
    target = dst if stage is None else stage
    if bytes_are_values and stage is None:
        borrowed.append(source)  # site: plan_host.borrow_device
    else:
        tensor = packed(tensor, target, target.dtype)
    if stage is not None:
        batch = batches.setdefault("unpack", Batch())
        batch.last_steps.append((dst, stage))
    elif copied.ordinary or (copied.given is not None and not dst.is_pinned()):
        batch = batches.setdefault("staged", Batch())
        if copied.ordinary and dst.nbytes >= MAPPED:
            batch.fresh.append(len(batch.items))
    else:
        batch = batches.setdefault("direct", Batch())
    batch.add(index, copied, target, tensor)
    if tensor is not source.tensor:
        # packing has yet to read it, on the producer's stream
        batch.sources.append(source.tensor)  # site: plan_host.keep_packed_source
    if stage is not None:
        batch.destinations.append(dst)  # site: plan_host.keep_final_destination
