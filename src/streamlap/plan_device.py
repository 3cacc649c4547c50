"""How each leaf gets to a device: checked first, then given memory, then enqueued."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from streamlap import foreign
from streamlap.arrays import Source, as_source, is_dense, is_plain
from streamlap.batch import (
    Batch,
    Copied,
    Planned,
    checked_outs,
    on_stream,
    packed,
    same_layout,
    submit_batch,
)
from streamlap.devices import (
    Place,
    StreamLike,
    as_stream,
    place_of,
    require_no_capture,
)
from streamlap.moving import PLAIN, Candidate, by_way, choose, element_between, memory_of
from streamlap.pinned import pool_for
from streamlap.plan_host import current_after, plan_to_cpu


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
        planned = plan_to_cpu(leaves, outs, dtype, None, stream, None, chunk_bytes, place, PLAIN)
        for leaf in planned.leaves:
            if isinstance(leaf, Copied):
                leaf.as_numpy = False  # a device has tensors
        return planned
    target = torch.device("cuda", place.index)
    sources = [as_source(leaf) for leaf in leaves]
    checked = checked_outs(sources, outs, target, dtype)
    consumer = as_stream(stream, place)
    require_no_capture(consumer, "to_device()")
    planned = Planned(list(leaves))
    with contextlib.nullcontext() if stream is None else on_stream(consumer, place):
        candidates = _candidates(sources, checked, outs, dtype, target, place)
    chosen, rest = choose(candidates, place, False, True)
    given = dict(enumerate(checked))
    given |= {leaf.index: leaf.dst for leaf in rest}  # they have their memory already
    moved = {leaf.index for group in chosen for leaf in group.leaves}
    batches: dict[tuple[str, Place | None, int | None], Batch] = {}
    for index, source in enumerate(sources):
        if source is None or index in moved:
            continue
        from_device = source.tensor.device.type != "cpu"
        source_place = place_of(source.tensor.device) if from_device else None
        producer = None
        if source_place is not None:
            producer = as_stream(source.stream, source_place)
            require_no_capture(producer, "to_device()")
            if source.stream == foreign.PER_THREAD and producer is not None:
                # What is packed needs memory: on torch's current stream, see foreign.PER_THREAD.
                producer = current_after(producer, source_place, "to_device()")
        own_stream = source_place is not None and source.stream is not None
        with on_stream(producer, source_place or place) if own_stream else contextlib.nullcontext():
            tensor, is_borrowed = _readable(
                source.tensor, dtype if from_device else None, checked[index]
            )
        with contextlib.nullcontext() if stream is None else on_stream(consumer, place):
            landing, final = _landing(tensor, given[index], dtype or tensor.dtype, target)
        copied = Copied(final, False, outs[index])
        planned.leaves[index] = copied
        if not final.numel():
            continue
        path = "direct" if landing is final else "unpack"
        if not from_device and not tensor.is_pinned():
            if path == "direct":
                path = "staged"
            else:
                staged = pool_for(place)._new(
                    tensor.shape, tensor.dtype, tensor.stride(), tensor.numel()
                )
                tensor, is_borrowed = staged.copy_(tensor), False
        own = source.stream if source_place is not None else None
        batch = batches.setdefault((path, source_place, own), Batch())
        batch.add(index, copied, landing, tensor)
        if tensor is not source.tensor:
            batch.sources.append(source.tensor)  # site: plan_device.keep_packed_source
        if landing is not final:
            batch.last_steps.append((final, landing))
            batch.destinations.append(final)  # site: plan_device.keep_final_destination
        if is_borrowed:
            planned.borrowed.append(source)  # site: plan_device.borrow
    if any(out is None for out in checked):
        place.took_memory()
    for moving in by_way(chosen, PLAIN):
        for leaf in (leaf for group in moving.groups for leaf in group.leaves):
            source = sources[leaf.index]
            assert source is not None
            planned.leaves[leaf.index] = leaf.copied
            planned.borrowed.append(source)  # site: plan_device.borrow_moved
        after = [] if consumer is None else [consumer]  # site: plan_device.moved_after_consumer
        planned.parts.append(moving.submit(place, True, after, []))
    for (path, source_place, own), batch in batches.items():
        after = [] if consumer is None else [consumer]  # site: plan_device.after_consumer
        producer = None
        if source_place is not None:
            producer = as_stream(None if own == foreign.PER_THREAD else own, source_place)
        if producer is not None:
            after.append(producer)  # site: plan_device.after_producer
        planned.parts.append(
            submit_batch(
                batch, path, place, True, after, chunk_bytes, source_place, own is not None
            )
        )
    return planned


def _candidates(
    sources: list[Source | None],
    outs: list[torch.Tensor | None],
    given: list[Any],
    dtype: torch.dtype | None,
    device: torch.device,
    place: Place,
) -> list[Candidate]:
    """Return the leaves that a kernel may read from page-locked memory, with their destinations."""
    found = []
    pinned: dict[int, bool] = {}  # by where memory begins: to ask takes a call of the driver
    for index, source in enumerate(sources):
        if source is None or source.tensor.is_cuda or not source.tensor.numel():
            continue
        tensor, out = source.tensor, outs[index]
        memory = memory_of(tensor, place)
        if memory not in pinned:
            pinned[memory] = tensor.is_pinned()
        wanted = dtype or tensor.dtype
        element = element_between(tensor, out, wanted, PLAIN) if pinned[memory] else None
        if element is None:
            continue
        final = out
        if final is None:
            stride = tensor.stride()
            final = torch.empty_strided(tensor.shape, stride, dtype=wanted, device=device)
        copied = Copied(final, False, given[index])
        found.append(Candidate(index, copied, final, tensor, element, _goes_its_own_way))
    return found


def _goes_its_own_way() -> None:
    """Do nothing: the loop over the leaves takes up what is not moved together."""


def _readable(
    tensor: torch.Tensor, dtype: torch.dtype | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, bool]:
    """Return the source as one range of bytes, and whether that is still the caller's memory."""
    wanted = dtype or tensor.dtype
    like = out if out is not None and tensor.device.type != "cpu" and is_dense(out) else tensor
    fits = like is tensor or same_layout(tensor, like)
    if tensor.dtype == wanted and is_plain(tensor) and is_dense(tensor) and fits:
        return tensor, True
    if not is_dense(like):
        like = torch.empty(tensor.shape, device="meta")
    return packed(tensor, like, wanted), False


def _landing(
    tensor: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the bytes are copied to, and the destination: the same where nothing is left."""

    def new(wanted: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device=device)

    if tensor.dtype == dtype and (out is None or same_layout(tensor, out)):
        final = new(dtype) if out is None else out
        return final, final
    return new(tensor.dtype), new(dtype) if out is None else out
