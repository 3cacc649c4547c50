"""Copies being collected for one native call, and that call. The paths a copy can take:

========  ==========================================================================================
direct    the copy engine reads or writes page-locked memory
staged    ordinary memory, through a ring of page-locked slots and threads that copy
unpack    a last step after the copy: another layout or dtype than the copied bytes have
gather    one kernel (a worker without a device) brings many leaves into one range: ``moving``
scatter   the same out of one range
strided   the same of one leaf whose elements lie apart
host      no device: memcpy (or torch's own copy, for strides and dtypes) on a worker thread
========  ==========================================================================================
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from streamlap import _native, observe
from streamlap.arrays import Source, as_destination, check_matches, overlap_between, overlapping
from streamlap.devices import Place, current_stream
from streamlap.errors import InvalidArgument


@dataclass
class Counts:
    """Where the non-finite elements of a transfer are counted: numbers whose sum it is."""

    block: _native.Block
    numbers: int
    place: Place

    def value(self) -> int:
        """Return the count; the transfer must be done."""
        if self.place.checked:
            self.place.runtime.host_reads(self.block.address, 8 * self.numbers)
        return sum(memoryview(self.block)[: 8 * self.numbers].cast("Q"))


WHOLE = 1 << 62
"""A chunk size that cuts nothing."""

Body = Callable[[], object]


@dataclass(eq=False)
class Part:
    """Leaves that one native transfer copies.

    Attributes:
        leaves: their positions in the flattened tree, in the native transfer's order.
        source_on_device: a device stream may write the sources, else the calling thread does.
        of_cupy: the sources are CuPy's, so its current stream may write them, too.
    """

    native: _native.Transfer
    place: Place
    path: str
    leaves: Sequence[int]
    source_on_device: bool
    source_place: Place
    of_cupy: bool = False


@dataclass(eq=False)
class Copied:
    """A leaf's destination, and where to ask whether it is there.

    Attributes:
        given: the caller's own destination.
        ordinary: it is new memory that is not page-locked.
    """

    tensor: torch.Tensor
    as_numpy: bool
    given: Any = None
    part: Part | None = None  # None: empty, nothing to wait for
    position: int = 0
    ordinary: bool = False

    def value(self) -> Any:
        """Return what the caller gets: what he gave, a NumPy array, or the tensor."""
        if self.given is not None:
            return self.given
        return self.tensor.numpy() if self.as_numpy else self.tensor


class CopiedRow(Sequence[Copied]):
    """Tensors that one part brings, all the leaves of a tree: a :class:`Copied` where one is asked.

    Made anew for each of many leaves, those would cost more than the copy.

    Attributes:
        tensors: the destinations.
        given: they are the caller's own.
    """

    def __init__(self, tensors: list[torch.Tensor], part: Part, given: bool) -> None:
        self.tensors = tensors
        self.given = given
        self._part = part

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, key: int) -> Copied: ...
    @overload
    def __getitem__(self, key: slice) -> list[Copied]: ...
    def __getitem__(self, key: int | slice) -> Copied | list[Copied]:
        if isinstance(key, slice):
            return [self._at(index) for index in range(len(self))[key]]
        return self._at(range(len(self))[key])

    def _at(self, index: int) -> Copied:
        tensor = self.tensors[index]
        part = self._part if tensor.numel() else None
        return Copied(tensor, False, tensor if self.given else None, part, index)


@dataclass
class Planned:
    """What a call of ``to_cpu`` or ``to_device`` has enqueued."""

    leaves: list[Any]
    parts: list[Part] = field(default_factory=list)
    borrowed: list[Source] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)


@dataclass
class Batch:
    """The copies of one native call, being collected.

    Attributes:
        fresh: positions of items whose destination's pages are not present yet.
    """

    items: list[tuple[int, int, int, int, Body | None]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    copied: list[Copied] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)
    destinations: list[Any] = field(default_factory=list)
    last_steps: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, index: int, copied: Copied, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy the bytes of ``src`` to ``dst`` for the leaf at ``index``."""
        self._add(index, copied, dst, src, None)

    def add_body(self, index: int, copied: Copied, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Let torch copy the values of ``src`` to ``dst``, on a worker."""

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
        self.sources.append(src)  # site: batch.keep_source
        self.destinations.append(dst)  # site: batch.keep_destination

    def run_last_steps(self) -> None:
        """Copy from where the bytes landed to where they belong."""
        with torch.inference_mode():
            for dst, src in self.last_steps:
                dst.copy_(src)


def same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one shape lie in memory the same way."""
    return all(
        size == 1 or a == b
        for size, a, b in zip(first.shape, first.stride(), second.stride(), strict=True)
    )


@functools.lru_cache(maxsize=256)
def external_stream(handle: int, index: int) -> torch.cuda.Stream:
    """Return a stream that torch did not make, as one of torch's."""
    if handle in (0, 1):  # torch takes 0 for "none given" and hands out one of its pool
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", index))  # type: ignore[no-untyped-call]


def on_stream(
    stream: _native.Stream | None, place: Place
) -> contextlib.AbstractContextManager[Any]:
    """Make ``stream`` torch's current one; nothing to do where it is already."""
    if stream is None or not place.is_cuda:
        return contextlib.nullcontext()
    current = current_stream(place)
    assert current is not None
    if (stream.handle, stream.device) == (current.handle, current.device):
        return contextlib.nullcontext()
    return torch.cuda.stream(external_stream(stream.handle, stream.device))


def packed(source: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the source's values in the layout of ``like``, made on the current stream."""
    result = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=source.device)
    return result.copy_(source)


def checked_outs(
    sources: list[Source | None], outs: list[Any], device: torch.device, dtype: torch.dtype | None
) -> list[torch.Tensor | None]:
    """Return the given destinations, each checked against its source and all others."""
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
        read = [source.tensor for source in sources if source is not None]
        pair = overlap_between([tensor for _, tensor in given], read)
        if pair is not None:
            raise InvalidArgument(f"out[{given[pair[0]][0]}] overlaps a source in memory")
    return checked


def submit_batch(
    batch: Batch,
    path: str,
    place: Place,
    to_device: bool,
    after: list[_native.Stream],
    chunk_bytes: int,
    source_place: Place | None = None,
    of_cupy: bool = False,
) -> Part:
    """Make the native call, and the last steps that torch enqueues after it."""
    engine = place.engine
    if path == "staged":
        place.shape_ring()
    last_on_host = path == "unpack" and not to_device
    last_on_device = path == "unpack" and to_device
    submit = functools.partial(
        engine.submit,
        device=place.index,
        to_device=to_device,
        items=batch.items,
        after=after,  # site: batch.after
        chunk_bytes=chunk_bytes,
        staged=path == "staged",  # site: batch.staged
        fresh=batch.fresh,
        finish=batch.run_last_steps if last_on_host else None,  # site: batch.finish
        open_ended=last_on_device,
        keep_source=batch.sources,  # site: batch.keep_sources
        keep_destination=batch.destinations,  # site: batch.keep_destinations
    )
    nbytes = sum(item[2] for item in batch.items)
    native = observe.submitted(submit, observe.Copy(place, to_device, path, nbytes))
    if last_on_device:
        copy_stream = engine.copy_stream(place.index, True)
        try:
            with torch.cuda.stream(external_stream(copy_stream.handle, place.index)):
                batch.run_last_steps()
        finally:
            engine.complete(native, copy_stream)  # site: batch.complete
    on_device = place.is_cuda and (not to_device or source_place is not None)
    part = Part(native, place, path, batch.leaves, on_device, source_place or place, of_cupy)
    for copied in batch.copied:
        copied.part = part
    return part
