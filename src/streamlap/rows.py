"""Trees of many small tensors: looked at in one call, moved by one kernel.

The general way looks at each leaf by itself, which takes ten times as long as the leaf's bytes need
on the wire. Whatever is not as expected here goes there, to be done or to be refused.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from streamlap import _native, observe
from streamlap.arrays import (
    Source,
    Sources,
    TreeSpec,
    borrowed_of,
    row_like,
    storages_of,
)
from streamlap.batch import Batch, CopiedRow, Part, submit_batch
from streamlap.devices import (
    Place,
    as_stream,
    place_of,
    require_no_capture,
    streams_in_use,
)
from streamlap.errors import InvalidArgument, OutOfMemory, PoolExhausted
from streamlap.moving import ELEMENTS
from streamlap.pinned import PinnedPool, pool_for, views_of
from streamlap.plan_host import producer_of
from streamlap.policy import policy
from streamlap.scratch import scratch_for
from streamlap.transfer import Transfer

_USUAL = frozenset((torch.Tensor, torch.nn.Parameter))

_SHAPE = operator.attrgetter("shape")
_DTYPE = operator.attrgetter("dtype")

PACKED_SHARE = 4
"""Ordinary leaves are packed into page-locked memory at once up to this part of a pool's limit."""


def tree_to_cpu(
    leaves: list[Any], spec: TreeSpec, outs: list[Any] | None, dtype: torch.dtype | None
) -> Transfer | None:
    """Return the transfer of a tree to the host, with ``outs`` to results of an earlier one."""
    sources, row = _small(leaves)
    if row is None:
        return None
    place = place_of(sources[0].device)
    if not _can_cast(sources, dtype):
        return None
    producer = producer_of(None, place, "to_cpu()")
    after = [] if producer is None else [producer]
    memory: Any = None
    wanted = None
    if outs is not None:
        wanted = _fitting(outs, sources, row, dtype, -1)
        if wanted is None:
            return None
        if place.is_cuda:
            for index, handle in streams_in_use():  # whoever reads the destinations so far
                reader = place.runtime.adopt(index, handle)
                require_no_capture(reader, "to_cpu(out=...)")
                after.append(reader)
        memory = _range_of(outs, wanted, place, place.is_cuda)
        if memory is None:
            return _each(sources, spec, row, outs, wanted, place, after)
    elif dtype is not None:
        shapes, strides = list(map(_SHAPE, sources)), list(map(torch.Tensor.stride, sources))
        wanted = row_like(shapes, strides, [dtype] * len(sources), -1)
        if wanted is None:  # else it would be taken for a copy without a cast
            return None
    plan = _plan_between(row, wanted, True)
    if plan is None:
        return None
    if outs is None:
        memory = pool_for(place)._allocate(plan.range_bytes)
        base = memory.address
    else:
        assert wanted is not None
        base = wanted.around()[0]
    scratch = None
    if outs is None or (wanted is not None and wanted.nbytes == plan.range_bytes):
        # Else something that is not this transfer's may lie between the leaves.
        scratch = scratch_for(place, plan, producer)
    submit = functools.partial(
        _native.submit_moves,
        place.engine,
        device=place.index,
        to_device=False,
        moves=[(plan, row.addresses, base, 0)],
        after=after,  # site: rows.after
        keep_source=storages_of(sources),  # site: rows.keep_source
        keep_destination=(memory, scratch),  # site: rows.keep_destination
        scratch=None if scratch is None else scratch.given,
    )
    try:
        native = observe.submitted(submit, observe.Copy(place, False, "gather", row.nbytes))
    except InvalidArgument:  # destinations that overlap something
        return None
    part = Part(native, place, "gather", range(len(leaves)), place.is_cuda, place)
    borrowed = borrowed_of(sources)  # site: rows.borrow
    results = outs
    like = row if wanted is None else wanted
    if results is None and not (like.ambiguous or like.has_empty):
        results = like.made_in(memory, base, plan.offsets)  # while the bytes are on their way
    elif results is None:
        dtypes = [dtype] * len(sources) if dtype is not None else list(map(_DTYPE, sources))
        strides = list(map(torch.Tensor.stride, sources))
        shapes = list(map(_SHAPE, sources))
        results = views_of(memory, shapes, strides, dtypes, plan.offsets, row.has_empty)
    copied = CopiedRow(results, part, outs is not None)
    return Transfer(copied, spec, [part], borrowed, False, nbytes=(wanted or row).nbytes)


def tree_to_device(
    leaves: list[Any],
    spec: TreeSpec,
    device: torch.device,
    outs: list[Any] | None,
    dtype: torch.dtype | None,
) -> Transfer | None:
    """Return the transfer of a tree of host tensors to a GPU.

    Leaves in ordinary memory are packed into page-locked memory by the calling thread: through the
    ring of slots each would cost as much as a megabyte.
    """
    place = place_of(device)
    if not place.is_cuda:
        return None
    sources, row = _small(leaves)
    if row is None or row.device >= 0:
        return None
    consumer = as_stream(None, place)
    require_no_capture(consumer, "to_device()")
    memory = _range_of(sources, row, place, True)
    is_packed = memory is None
    if is_packed and any(map(torch.Tensor.is_pinned, sources)):
        return None  # that one the copy engine reads where it is, when its turn comes
    if not _can_cast(sources, dtype):
        return None
    if outs is not None and _fitting(outs, sources, row, dtype, place.index) is None:
        return None
    near = row
    if is_packed:
        packed = _packed(row, pool_for(place))
        if packed is None:
            return None
        memory, near = packed
    results = outs
    if results is None:
        target = torch.device("cuda", place.index)
        results = [
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype or leaf.dtype, device=target)
            for leaf in sources
        ]
        place.took_memory()
    far = _native.TensorRow.of(results)
    plan = None if far is None else _plan_between(far, near, False)
    if far is None or plan is None:
        return None
    submit = functools.partial(
        _native.submit_moves,
        place.engine,
        device=place.index,
        to_device=True,
        moves=[(plan, far.addresses, near.around()[0], 0)],
        after=[] if consumer is None else [consumer],  # site: rows.after_consumer
        keep_source=memory,  # site: rows.keep_device_source
        keep_destination=storages_of(results),  # site: rows.keep_device_destination
    )
    try:
        native = observe.submitted(submit, observe.Copy(place, True, "scatter", far.nbytes))
    except InvalidArgument:
        return None
    part = Part(native, place, "scatter", range(len(leaves)), False, place)
    borrowed: list[Source | Sources] = []
    if not is_packed:
        borrowed = borrowed_of(sources)  # site: rows.borrow_pinned
    copied = CopiedRow(results, part, outs is not None)
    return Transfer(copied, spec, [part], borrowed, True, nbytes=far.nbytes)


def _small(leaves: list[Any]) -> tuple[list[torch.Tensor], _native.TensorRow | None]:
    """Return the leaves without history, and what they are: None where the general way is right."""
    sources: list[torch.Tensor] = leaves
    kinds = set(map(type, leaves))
    if not _USUAL.issuperset(kinds):
        return [], None
    row = _native.TensorRow.of(leaves)
    if row is None:  # some have history, perhaps
        try:
            sources = [leaf.detach() for leaf in leaves]
        except RuntimeError:  # of what torch itself cannot say much about
            return [], None
        row = _native.TensorRow.of(sources)
    if row is None or not row.dense or not row.nbytes:
        return [], None
    now = policy()
    small = row.largest <= now.small_leaf_bytes and now.moves_together(len(leaves), row.nbytes)
    return (sources, row) if small else ([], None)


def _can_cast(sources: list[torch.Tensor], dtype: torch.dtype | None) -> bool:
    """Return whether a move makes this dtype of them all."""
    if dtype is None:
        return True
    dtypes = {dtype, *map(_DTYPE, sources)}
    return len(dtypes) == 1 or dtypes <= ELEMENTS.keys()


def _fitting(
    outs: list[Any],
    sources: list[torch.Tensor],
    row: _native.TensorRow,
    dtype: torch.dtype | None,
    device: int,
) -> _native.TensorRow | None:
    """Return what destinations are, if they are of the sources' layouts and lie on that device."""
    if not {torch.Tensor}.issuperset(map(type, outs)):
        return None
    found = _native.TensorRow.of(outs)
    if found is None or found.device != device or not row.lies_as(found):
        return None
    if dtype is not None:
        fits = {dtype} == set(map(_DTYPE, outs))
    elif row.ambiguous:
        fits = list(map(_DTYPE, outs)) == list(map(_DTYPE, sources))
    else:
        fits = row.has_dtypes_of(found)
    return found if fits else None


def _range_of(
    tensors: list[torch.Tensor], row: _native.TensorRow, place: Place, pinned: bool
) -> Any:
    """Return what keeps the one range that a kernel may take them for; None: there is none.

    They are parts of one pool's block, or of one storage.
    """
    begin, nbytes = row.around()
    block = _native.block_around(begin, place.runtime)
    if block is not None:
        return block if begin + nbytes <= block.end else None
    storage = tensors[0].untyped_storage()
    first = storage.data_ptr()
    if not first <= begin or begin + nbytes > first + storage.nbytes():
        return None
    return storages_of(tensors) if not pinned or tensors[0].is_pinned() else None


def _packed(
    row: _native.TensorRow, pool: PinnedPool
) -> tuple[_native.Block, _native.TensorRow] | None:
    """Return page-locked memory with the tensors' bytes, and them there; None: no room for that."""
    packing = _plan_between(row, None, True)
    if packing is None or packing.range_bytes > pool.limit // PACKED_SHARE:
        return None
    try:
        memory = pool._allocate(packing.range_bytes)
    except (PoolExhausted, OutOfMemory):
        return None
    _native.gather_now(packing, row.addresses, memory.address)
    return memory, row.placed(memory.address, packing)


def _each(
    sources: list[torch.Tensor],
    spec: TreeSpec,
    row: _native.TensorRow,
    outs: list[Any],
    wanted: _native.TensorRow,
    place: Place,
    after: list[_native.Stream],
) -> Transfer | None:
    """Return the transfer to destinations that lie apart, a copy each."""
    if not wanted.has_dtypes_of(row) or row.has_empty or not wanted.is_apart(row):
        return None
    path = "host"
    if place.is_cuda:
        pinned = sum(map(torch.Tensor.is_pinned, outs))
        if 0 < pinned < len(outs):
            return None
        path = "direct" if pinned else "staged"
    batch = Batch(
        wanted.copies_of(row), sources=storages_of(sources), destinations=storages_of(outs)
    )
    batch.leaves.extend(range(len(outs)))
    part = submit_batch(batch, path, place, False, after, policy().chunk_bytes)
    borrowed = borrowed_of(sources)  # site: rows.borrow_each
    copied = CopiedRow(outs, part, True)
    return Transfer(copied, spec, [part], borrowed, False, nbytes=wanted.nbytes)


def _plan_between(
    far: _native.TensorRow, near: _native.TensorRow | None, gathers: bool
) -> _native.TreePlan | None:
    now = policy()
    blocks, changing = now.blocks_of_move(gathers, False, False), now.cast_blocks
    if not gathers:
        changing = blocks
    try:
        return _native.TreePlan.of_rows(far, near, gathers, blocks, changing, now.move_threads)
    except InvalidArgument:  # destinations that overlap
        return None
