"""Many leaves at once: which of them one kernel moves (one task of a worker, without a GPU).

A *gather* brings leaves into one range of memory, a *scatter* takes them out of one. float32,
float16 and bfloat16 can be cast on the way, and their non-finite elements counted, in the same
pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from streamlap import _native, observe
from streamlap.arrays import Source, is_dense, is_plain, span
from streamlap.batch import Copied, Counts, Part, same_layout
from streamlap.devices import Place
from streamlap.errors import UnsupportedTensor
from streamlap.pinned import PinnedPool, pool_for
from streamlap.policy import policy
from streamlap.scratch import scratch_for

ELEMENTS = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""The dtypes that a move can change."""


@dataclass(frozen=True)
class Change:
    """What a call asks for beside the bytes.

    Attributes:
        counts: count the non-finite elements.
        scale: multiply by this, in float32, before the result is rounded; None: do not.
    """

    counts: bool = False
    scale: float | None = None

    def check(self, dtype: torch.dtype, what: str) -> None:
        """Refuse a dtype that has non-finite values which a move cannot count, or scale."""
        if dtype in ELEMENTS:
            return
        if self.scale is not None:
            raise UnsupportedTensor(
                f"{what} is {dtype}: only float32, float16 and bfloat16 can be scaled on the way"
            )
        if self.counts and (dtype.is_floating_point or dtype.is_complex):
            raise UnsupportedTensor(
                f"{what} is {dtype}: non-finite values of float32, float16 and bfloat16 only can "
                "be counted on the way"
            )

    def element(self, source: torch.dtype, wanted: torch.dtype) -> tuple[str, str] | None:
        """Return what a move calls the elements of both sides; None where there is none."""
        changes = source != wanted or self.counts or self.scale is not None
        if changes and source in ELEMENTS and wanted in ELEMENTS:
            return ELEMENTS[source], ELEMENTS[wanted]
        return ("bytes", "bytes") if source == wanted else None


PLAIN = Change()


Layout = tuple[int, list[int], list[int]]
"""What does not lie in one range: the bytes of an element, the sizes, the strides in bytes."""

MOST_DIMS = 8


@dataclass(eq=False)
class Candidate:
    """A leaf that may be moved with others.

    Attributes:
        add: gives it to the way that it takes where it is not.
        layout: how the source lies, of a gather; None: both sides are dense, in the same layout.
    """

    index: int
    copied: Copied
    dst: torch.Tensor
    src: torch.Tensor
    element: tuple[str, str]
    add: Callable[[], None]
    layout: Layout | None = None

    @property
    def changes(self) -> bool:
        """Whether elements are changed or counted."""
        return self.element[0] != "bytes"

    @property
    def must(self) -> bool:
        """Whether only a move can do what is asked for."""
        return self.changes or self.layout is not None

    def described(self) -> tuple[str, str, int, Layout | None]:
        """Return the leaf as a native plan takes it."""
        count = self.src.numel() if self.changes else self.src.numel() * self.src.itemsize
        return (*self.element, count, self.layout)


def element_between(
    tensor: torch.Tensor, dst: torch.Tensor | None, wanted: torch.dtype, change: Change
) -> tuple[str, str] | None:
    """Return the elements of a move from ``tensor`` to ``dst``; None where it cannot be one.

    ``dst`` is of dtype ``wanted``; None: new memory in the layout of ``tensor``.
    """
    if not (is_plain(tensor) and is_dense(tensor)):
        return None
    if dst is not None and not same_layout(tensor, dst):
        return None
    return change.element(tensor.dtype, wanted)


def layout_between(tensor: torch.Tensor, dst: torch.Tensor) -> Layout | None:
    """Return how ``tensor`` lies, in the order of the dense ``dst``; None: no move can read it."""
    size = tensor.itemsize
    if not (is_plain(tensor) and is_dense(dst)) or size not in (1, 2, 4, 8, 16):
        return None
    aligned = tensor.data_ptr() % size == 0 and dst.data_ptr() % dst.itemsize == 0
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1]
    if not aligned or len(dims) > MOST_DIMS:
        return None
    dims.sort(key=dst.stride, reverse=True)
    return size, [tensor.shape[dim] for dim in dims], [tensor.stride(dim) * size for dim in dims]


@dataclass
class Group:
    """Leaves of one move; the one range is part of one storage, or of one pool's block."""

    gathers: bool
    leaves: list[Candidate]

    def range(self) -> tuple[int, int]:
        """Return the first and one past the last address of the one range."""
        spans = [span(leaf.dst if self.gathers else leaf.src) for leaf in self.leaves]
        return min(begin for begin, _end in spans), max(end for _begin, end in spans)

    def is_apart(self) -> bool:
        """Return whether no leaf's other side lies within the range."""
        first, last = self.range()
        others = (span(leaf.src if self.gathers else leaf.dst) for leaf in self.leaves)
        return all(end <= first or begin >= last for begin, end in others)


def memory_of(tensor: torch.Tensor, place: Place) -> int:
    """Return where the memory begins that a tensor is a part of: a pool's block, or its storage."""
    begin = tensor.untyped_storage().data_ptr()
    block = None if tensor.is_cuda else _native.block_around(begin, place.runtime)
    return begin if block is None else block.begin


def choose(
    candidates: Sequence[Candidate], place: Place, gathers: bool, scatters: bool
) -> tuple[list[Group], list[Candidate]]:
    """Sort out what is moved together: the groups, and those that go their own way.

    Args:
        candidates: leaves with at least one element each.
        place: whose pools blocks are looked for in.
        gathers: destinations of one storage, or one block, may be one range.
        scatters: sources of one may.
    """
    chosen: list[Group] = []
    rest = list(candidates)
    for way in [True] * gathers + [False] * scatters:
        by_storage: dict[int, list[Candidate]] = {}
        for leaf in rest:
            side = leaf.dst if way else leaf.src
            by_storage.setdefault(memory_of(side, place), []).append(leaf)
        rest = []
        for leaves in by_storage.values():
            group = Group(way, leaves)
            nbytes = sum(leaf.dst.nbytes for leaf in leaves)
            changed = [leaf for leaf in leaves if leaf.must]
            if not changed and not policy().moves_together(len(leaves), nbytes):
                rest += leaves
            elif group.is_apart():
                chosen.append(group)
            else:  # one by one they are: no destination overlaps a source
                chosen += [Group(way, [leaf]) for leaf in changed]
                rest += [leaf for leaf in leaves if not leaf.must]
    return chosen, rest


def counts_for(
    plans: Sequence[_native.TreePlan], place: Place, pool: PinnedPool | None
) -> tuple[list[int], list[Counts]]:
    """Return where each plan counts (0: it does not), and what holds it."""
    numbers = sum(plan.counts for plan in plans)
    if not numbers:
        return [0] * len(plans), []
    block = (pool or pool_for(place))._allocate(8 * numbers)
    addresses = []
    at = block.address
    for plan in plans:
        addresses.append(at if plan.counts else 0)
        at += 8 * plan.counts
    return addresses, [Counts(block, numbers, place)]


def new_plan(
    leaves: Sequence[tuple[str, str, int, Layout | None]],
    gathers: bool,
    change: Change,
    offsets: list[int] | None = None,
    range_bytes: int = 0,
) -> _native.TreePlan:
    """Return a plan with the policy's grid; raises InvalidArgument."""
    now = policy()
    changes = any(leaf[0] != "bytes" for leaf in leaves)
    strided = any(leaf[3] is not None for leaf in leaves)
    return _native.TreePlan(
        list(leaves),
        gathers=gathers,
        offsets=offsets or [],
        range_bytes=range_bytes,
        scale=change.scale,
        counts=change.counts,
        blocks=now.blocks_of_move(gathers, changes, strided),
        threads=now.move_threads,
    )


@dataclass
class Moving:
    """Groups whose moves are one native call."""

    groups: list[Group]
    change: Change
    counts: list[Counts] = field(default_factory=list)

    def submit(
        self,
        place: Place,
        to_device: bool,
        after: list[_native.Stream],
        kept: list[torch.Tensor],
        pool: PinnedPool | None = None,
        source_place: Place | None = None,
        of_cupy: bool = False,
        producer: _native.Stream | None = None,
        chunk_bytes: int | None = None,
    ) -> Part:
        """Start the moves.

        Args:
            kept: tensors that have to live as long as the sources.
            producer: of ``after``, the stream that has made the sources.
            chunk_bytes: no single copy is longer than this, where a move goes by way of them.
        """
        moves = []
        plans = []
        for group in self.groups:
            first, last = group.range()
            sides = [
                (leaf.dst, leaf.src) if group.gathers else (leaf.src, leaf.dst)
                for leaf in group.leaves
            ]
            leaves = [leaf.described() for leaf in group.leaves]
            offsets = [near.data_ptr() - first for near, _far in sides]
            plans.append(new_plan(leaves, group.gathers, self.change, offsets, last - first))
            moves.append((first, _native.Addresses([far.data_ptr() for _near, far in sides])))
        addresses, self.counts = counts_for(plans, place, pool)
        every = [leaf for group in self.groups for leaf in group.leaves]
        # Between several leaves may be bytes that are not this transfer's.
        scratch = None
        if len(every) == 1 and self.groups[0].gathers and not to_device:
            scratch = scratch_for(place, plans[0], producer, chunk_bytes)
        keep = [leaf.dst for leaf in every], self.counts, scratch
        submit = functools.partial(
            _native.submit_moves,
            place.engine,
            device=place.index,
            to_device=to_device,
            moves=[
                (plan, far, base, counts)
                for plan, (base, far), counts in zip(plans, moves, addresses, strict=True)
            ],
            after=after,  # site: moving.after
            keep_source=[*(leaf.src for leaf in every), *kept],  # site: moving.keep_source
            keep_destination=keep,  # site: moving.keep_destination
            scratch=None if scratch is None else scratch.given,
        )
        path = "gather" if self.groups[0].gathers else "scatter"
        if all(leaf.layout is not None for leaf in every):
            path = "strided"
        nbytes = sum(leaf.dst.nbytes for leaf in every)
        native = observe.submitted(submit, observe.Copy(place, to_device, path, nbytes))
        on_device = place.is_cuda and (not to_device or source_place is not None)
        indices = [leaf.index for leaf in every]
        part = Part(native, place, path, indices, on_device, source_place or place, of_cupy)
        for position, leaf in enumerate(every):
            leaf.copied.part, leaf.copied.position = part, position
        return part


def by_way(groups: list[Group], change: Change) -> list[Moving]:
    """Return the groups as calls: the gathers are one, the scatters another."""
    calls = []
    for way in (True, False):
        same = [group for group in groups if group.gathers is way]
        if same:
            calls.append(Moving(same, change))
    return calls


def check_counted(sources: Sequence[Source | None], change: Change) -> None:
    """Refuse leaves that what is asked for cannot be done with; raises UnsupportedTensor."""
    for index, source in enumerate(sources):
        if source is not None:
            change.check(source.tensor.dtype, f"leaf {index}")
