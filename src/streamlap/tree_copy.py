"""TreeCopy: a tree of tensors that is copied to the host again and again, prepared once."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamlap import _native, observe, watch
from streamlap.arrays import (
    Source,
    Sources,
    Tree,
    addresses_in,
    as_destination,
    as_source,
    borrowed_of,
    contiguous_stride,
    flatten,
    is_dense,
    is_plain,
    row_like,
    storages_of,
)
from streamlap.batch import Copied, CopiedRow, Counts, Part, on_stream
from streamlap.checks import as_count, as_dtype, as_flag
from streamlap.devices import Place, StreamLike, place_of, require_no_capture, streams_in_use
from streamlap.errors import InvalidArgument, InvalidType, UnsupportedTensor
from streamlap.moving import Change, check_counted, counts_for, new_plan
from streamlap.pinned import PinnedPool, as_pool, pool_for, views_of
from streamlap.plan_host import producer_of
from streamlap.scratch import scratch_for
from streamlap.transfer import Transfer
from streamlap.uncompiled import uncompiled

_data_ptr = torch.Tensor.data_ptr


@dataclass(slots=True)
class _Leaf:
    """What each call's leaf has to be, and its result."""

    index: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    wanted: torch.dtype
    as_numpy: bool
    offset: int = 0


class _Block:
    """The leaves of one device: one range of page-locked memory, and the plan of their move."""

    def __init__(
        self, place: Place, device: torch.device, leaves: list[_Leaf], change: Change
    ) -> None:
        self.place = place
        self.device = device
        self.leaves = leaves
        described = []
        for leaf in leaves:
            element = change.element(leaf.dtype, leaf.wanted)
            if element is None:
                raise UnsupportedTensor(
                    f"leaf {leaf.index} is {leaf.dtype}: a TreeCopy casts float32, float16 and "
                    f"bfloat16 into each other, and nothing to {leaf.wanted}"
                )
            count = math.prod(leaf.shape)
            if element[0] == "bytes":
                count *= leaf.dtype.itemsize
            as_count(count, f"the size of leaf {leaf.index}")
            described.append((*element, count, None))
        self.plan = new_plan(described, True, change)
        for leaf, offset in zip(leaves, self.plan.offsets, strict=True):
            leaf.offset = offset
        # The same, a list each.
        self.indices = [leaf.index for leaf in leaves]
        self.offsets = [leaf.offset for leaf in leaves]
        self.shapes = [leaf.shape for leaf in leaves]
        self.strides = [leaf.stride for leaf in leaves]
        self.dtypes = [leaf.wanted for leaf in leaves]
        self.as_numpy = any(leaf.as_numpy for leaf in leaves)
        self.has_empty = not all(leaf.shape.numel() for leaf in leaves)
        # What those of a call are held against, and earlier results.
        self.source_dtypes = [leaf.dtype for leaf in leaves]
        index = place.index if place.is_cuda else -1
        self.row = row_like(self.shapes, self.strides, self.source_dtypes, index)
        self.result_row = row_like(self.shapes, self.strides, self.dtypes, -1)
        self.result_bytes = sum(leaf.shape.numel() * leaf.wanted.itemsize for leaf in leaves)
        self.nbytes = self.plan.range_bytes

    def own(self, leaves: list[Any]) -> list[Any]:
        """Return those of a tree's leaves that are this block's."""
        if len(self.indices) == len(leaves):
            return leaves
        return [leaves[index] for index in self.indices]

    def results(self, block: _native.Block) -> list[torch.Tensor]:
        """Return the views of a block, a leaf each."""
        row = self.result_row
        if row is not None and not (row.ambiguous or self.has_empty):
            return row.made_in(block, block.address, self.offsets)
        return views_of(block, self.shapes, self.strides, self.dtypes, self.offsets, self.has_empty)


class TreeCopy:
    """A prepared copy of a tree to the host: what :func:`to_cpu` works out each time, once.

    ``copy = TreeCopy(like=tree); transfer = copy(tree)`` moves all leaves of a device by one kernel
    (one task of a worker, without a GPU) into one block of page-locked memory, with one event.

    Args:
        like: a tree whose shapes, dtypes, strides and devices those of each call will have. Its
            data is not read. Leaves that are no tensors pass through.
        dtype: of the results: float32, float16 or bfloat16, of leaves that are one of them. They
            are rounded to nearest, ties to even; a NaN stays one.
        scale: float32 leaves (and float16, bfloat16) are multiplied by it in float32 before they
            are rounded, as for gradients that were scaled. A call may give another one.
        nonfinite: count infinite and NaN elements in the same pass, for
            :meth:`Transfer.nonfinite`. Counted is what was read, before it is scaled.
        pool: where pinned memory comes from; the process's own pool if left out.

    Raises:
        UnsupportedTensor: a leaf that is no plain tensor, or of a dtype that cannot be cast, scaled
            or counted on the way.
        InvalidType, InvalidArgument: an argument that makes no sense; a tree without tensors.

    Thread-safe; calls may be in flight at once.
    """

    @uncompiled
    def __init__(
        self,
        like: Tree,
        *,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
        nonfinite: bool = False,
        pool: PinnedPool | None = None,
    ) -> None:
        watch.enter()
        wanted = as_dtype(dtype)
        self._scale = _as_scale(scale)
        self._pool = as_pool(pool)
        self._counts = as_flag(nonfinite, "nonfinite")
        leaves, self._spec = flatten(like)
        sources = [as_source(leaf) for leaf in leaves]
        change = Change(self._counts, self._scale)
        check_counted(sources, change)
        groups: dict[Place, list[_Leaf]] = {}
        devices: dict[Place, torch.device] = {}
        for index, source in enumerate(sources):
            if source is None:
                continue
            tensor = source.tensor
            place = place_of(tensor.device)
            stride = tensor.stride() if is_dense(tensor) else contiguous_stride(tensor.shape)
            groups.setdefault(place, []).append(
                _Leaf(
                    index,
                    tensor.shape,
                    stride,
                    tensor.dtype,
                    wanted or tensor.dtype,
                    source.as_numpy,
                )
            )
            devices[place] = tensor.device
        if not groups:
            raise InvalidArgument("a tree without tensors has nothing to copy")
        self._blocks = [_Block(place, devices[place], own, change) for place, own in groups.items()]
        self._count = len(leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of page-locked memory that one call's results take."""
        return sum(block.nbytes for block in self._blocks)

    @uncompiled
    def __call__(
        self,
        tree: Tree,
        out: Tree | None = None,
        stream: StreamLike = None,
        protect: bool = False,
        *,
        scale: float | None = None,
    ) -> Transfer:
        """Start copying ``tree``; return at once.

        Args:
            tree: of the shapes, dtypes and devices that the plan was made for. Leaves whose memory
                lies in another way are packed first.
            out: what an earlier call's transfer gave, to be filled again: no view is made anew.
            stream: where the sources were written; None: the caller's current stream.
            protect: make that stream wait until the sources have been read (a host source: block).
            scale: in place of the plan's own.

        Raises:
            InvalidArgument: a tree, a leaf or an ``out`` that does not fit, or a scale for a plan
                that was made without one. Nothing was enqueued.
            PoolExhausted, CaptureError: as :func:`to_cpu`.

        Stream order: as :func:`to_cpu`.
        """
        watch.enter()
        protect = as_flag(protect, "protect")
        scale = _as_scale(scale)
        if scale is not None and self._scale is None:
            raise InvalidArgument("the plan does not scale: make it with scale=1.0")
        leaves = self._leaves_of(tree, "the tree")
        outs = None if out is None else self._leaves_of(out, "out")
        # In a tree of both, CPU leaves were written by the calling thread, not by that stream.
        mixed = len({block.place.is_cuda for block in self._blocks}) > 1
        own = isinstance(stream, _native.Stream)
        checked = [
            _Call(block, leaves, outs, stream if block.place.is_cuda or not mixed or own else None)
            for block in self._blocks
        ]
        parts: list[Part] = []
        borrowed: list[Source | Sources] = []
        counts: list[Counts] = []
        results: Sequence[Any] = leaves
        for call in checked:
            pool = self._pool or pool_for(call.block.place)
            parts.append(call.start(pool, scale))
            borrowed += call.borrowed
            counts += call.counts
            results = call.deliver(results, parts[-1])
        transfer = Transfer(
            *(results, self._spec, parts, borrowed, False, counts if self._counts else None),
            nbytes=sum(block.result_bytes for block in self._blocks),
        )
        if protect:
            transfer.wait_source(stream)  # site: tree_copy.protect
        return transfer

    def _leaves_of(self, tree: Tree, what: str) -> list[Any]:
        leaves, spec = flatten(tree)
        if spec != self._spec:
            raise InvalidArgument(f"{what} is a tree of another shape than the plan's")
        return leaves

    def __repr__(self) -> str:
        tensors = sum(len(block.leaves) for block in self._blocks)
        return f"<streamlap.TreeCopy of {tensors} tensors, {self.nbytes} bytes>"


class _Call:
    """One call's leaves of one device: looked at first, then started."""

    def __init__(
        self, block: _Block, leaves: list[Any], outs: list[Any] | None, stream: StreamLike
    ) -> None:
        self.block = block
        place = block.place
        self.tensors: list[torch.Tensor] = []
        self.kept: list[torch.UntypedStorage] = []
        self.borrowed: list[Source | Sources] = []
        self.counts: list[Counts] = []
        self.given = None if outs is None else block.own(outs)
        self.outs: list[torch.Tensor] | None = None
        self.outs_memory: Any = None
        if self.given is not None:
            self.outs, self.outs_memory = _results_of(block, self.given)
        loose: list[int] = []
        own: set[int | None] = set()
        mine = block.own(leaves)
        self.addresses = (
            None if block.row is None else addresses_in(block.row, mine, block.source_dtypes)
        )
        if self.addresses is not None:
            self.tensors = list(mine)
            self.borrowed += borrowed_of(self.tensors)  # site: tree_copy.borrow_as_planned
            own, mine = {None}, []
        for position, (leaf, given) in enumerate(zip(block.leaves, mine, strict=not own)):
            source = _source_like(given, leaf, block.device)
            tensor = source.tensor
            own.add(source.stream)
            if _lies_as(tensor, leaf):
                self.borrowed.append(source)  # site: tree_copy.borrow
            else:
                loose.append(position)
            self.tensors.append(tensor)
        if stream is None and len(own) > 1:
            raise InvalidArgument(
                "the leaves of one device are ordered by different streams; pass stream="
            )
        if loose and isinstance(stream, _native.Stream) and not place.is_cuda:
            raise InvalidArgument(
                "a leaf that is not dense cannot be packed after a worker's stream"
            )
        self.of_cupy = any(one is not None for one in own)
        ordered = stream if stream is not None or not place.is_cuda else next(iter(own))
        producer = producer_of(ordered, place, "TreeCopy()")
        self.producer = producer
        self.after = [] if producer is None else [producer]  # site: tree_copy.after_producer
        if self.outs is not None and place.is_cuda:
            for index, handle in streams_in_use():
                reader = place.runtime.adopt(index, handle)
                require_no_capture(reader, "TreeCopy(out=...)")
                self.after.append(reader)
        self._pack(loose, producer)

    def _pack(self, loose: Sequence[int], producer: _native.Stream | None) -> None:
        if not loose:
            return
        with on_stream(producer, self.block.place):
            for position in loose:
                tensor, leaf = self.tensors[position], self.block.leaves[position]
                packed = torch.empty_strided(
                    leaf.shape, leaf.stride, dtype=leaf.dtype, device=tensor.device
                )
                self.kept.append(tensor.untyped_storage())  # site: tree_copy.keep_packed
                self.tensors[position] = packed.copy_(tensor)

    def start(self, pool: PinnedPool, scale: float | None) -> Part:
        block, place = self.block, self.block.place
        memory: Any
        if self.outs is None:
            memory = pool._allocate(max(block.nbytes, 1))
            base = memory.address
        else:
            memory = self.outs_memory
            pairs = zip(block.leaves, self.outs, strict=True)
            base = next((out.data_ptr() - leaf.offset for leaf, out in pairs if out.numel()), 0)
        self.memory = memory
        addresses = self.addresses
        if addresses is None:
            addresses = _native.Addresses(list(map(_data_ptr, self.tensors)))
        (counts,), self.counts = counts_for([block.plan], place, pool)
        scratch = None
        held = self.outs is None or isinstance(self.outs_memory, _native.HeldBlock)
        if held and (self.outs is None or block.nbytes == block.result_bytes):
            # Else something that is not this transfer's may lie between the leaves, or an end of
            # what is page-locked.
            scratch = scratch_for(place, block.plan, self.producer)
        submit = functools.partial(
            _native.submit_moves,
            place.engine,
            device=place.index,
            to_device=False,
            moves=[(block.plan, addresses, base, counts)],
            after=self.after,  # site: tree_copy.after
            scale=scale,
            keep_source=(storages_of(self.tensors), self.kept),  # site: tree_copy.keep_source
            keep_destination=(memory, self.counts, scratch),  # site: tree_copy.keep_destination
            scratch=None if scratch is None else scratch.given,
        )
        native = observe.submitted(submit, observe.Copy(place, False, "gather", block.nbytes))
        return Part(native, place, "gather", block.indices, place.is_cuda, place, self.of_cupy)

    def deliver(self, results: Sequence[Any], part: Part) -> Sequence[Any]:
        """Return the results with the destinations in place, while the bytes are on their way."""
        block = self.block
        views = self.outs if self.outs is not None else block.results(self.memory)
        is_row = len(views) == len(results) and not block.as_numpy
        if is_row and (self.given is None or self.given is views):
            return CopiedRow(views, part, self.given is not None)
        delivered = list(results)
        for position, (leaf, view) in enumerate(zip(block.leaves, views, strict=True)):
            given = None if self.given is None else self.given[position]
            waits = part if view.numel() else None
            delivered[leaf.index] = Copied(view, leaf.as_numpy, given, waits, position)
        return delivered


def _as_scale(scale: object) -> float | None:
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):  # NumPy's, too
        raise InvalidType(f"scale must be a number, not {scale!r}")
    try:
        number = float(scale)
    except OverflowError:
        number = math.inf
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise InvalidArgument(f"scale must be a finite float32, not {scale}")
    return number


def _source_like(given: Any, leaf: _Leaf, device: torch.device) -> Source:
    """Return the data of a call's leaf; refuse what the plan was not made for."""
    source = as_source(given)
    if source is None:
        raise InvalidArgument(
            f"leaf {leaf.index} is a {type(given).__name__}, and was a tensor in the plan"
        )
    tensor = source.tensor
    if tensor.shape == leaf.shape and tensor.dtype == leaf.dtype and tensor.device == device:
        return source
    raise InvalidArgument(
        f"leaf {leaf.index} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; "
        f"the plan was made for {leaf.dtype} of shape {tuple(leaf.shape)} on {device}"
    )


def _lies_as(tensor: torch.Tensor, leaf: _Leaf) -> bool:
    if not tensor.numel():
        return True
    if not is_plain(tensor):
        return False
    return tensor.stride() == leaf.stride or all(
        size == 1 or a == b
        for size, a, b in zip(leaf.shape, tensor.stride(), leaf.stride, strict=True)
    )


def _results_of(block: _Block, outs: list[Any]) -> tuple[list[torch.Tensor], Any]:
    """Return the earlier results of the plan that ``outs`` must be, and what keeps their memory."""
    if block.result_row is not None and not block.has_empty:
        addresses = addresses_in(block.result_row, outs, block.dtypes)
        base = None if addresses is None else addresses.base(block.plan)
        if base is not None:
            return outs, _memory_of(block, outs, base)
    found: list[torch.Tensor] = []
    base = None
    for leaf, out in zip(block.leaves, outs, strict=True):
        out = as_destination(out, f"out[{leaf.index}]")
        fits = out.shape == leaf.shape and out.dtype == leaf.wanted and out.device.type == "cpu"
        if not (fits and _lies_as(out, leaf)):
            raise InvalidArgument(
                f"out[{leaf.index}] is no earlier result of this plan: it has another shape"
            )
        found.append(out)
        if out.numel():
            base = out.data_ptr() - leaf.offset if base is None else base
            if out.data_ptr() - leaf.offset != base:
                raise InvalidArgument(
                    f"out[{leaf.index}] is no earlier result of this plan: it lies elsewhere"
                )
    return found, None if base is None else _memory_of(block, found, base)


def _memory_of(block: _Block, outs: list[torch.Tensor], base: int) -> Any:
    """Return what keeps the memory of results that lie as planned from ``base`` on."""
    held = _native.block_around(base, block.place.runtime)
    if held is not None and base + block.nbytes <= held.end:
        return held
    if block.place.is_cuda and not all(out.is_pinned() for out in outs if out.numel()):
        raise InvalidArgument("out is no earlier result of this plan: it is no page-locked memory")
    return storages_of(outs)
