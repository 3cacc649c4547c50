"""``offload_activations``: what forward saves for backward waits on the host.

Every tensor that autograd saves in the block comes to :meth:`ActivationOffload._pack`, and is asked
for again, in backward, by :meth:`ActivationOffload._unpack`. In between its bytes are on the host,
in page-locked memory. Backward asks in about the reverse order of saving, so with each tensor a few
that were saved before it set out.

No memory is let go of before the host knows that the copy is done: nobody can say on which stream a
saved tensor was allocated. That bounds how far the host may be ahead of the copies, in both
directions, by a window of a few tensors.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import streamlap
from streamlap.checks import as_callable
from streamlap.sizes import parse_size
from streamlap.training.memory import identity_of
from streamlap.training.offloaded import Leaving, Offloaded, Window, root_of
from streamlap.training.pace import Mark, Pace, mark
from streamlap.training.passes import End, current_task
from streamlap.training.spread import Choice, Spread
from streamlap.training.versions import Saved, check_version, counter_of, saved_version
from streamlap.uncompiled import uncompiled

_LARGEST_GAP = 16
"""So many in a row that are gone: what was saved before is another step's."""

_FARTHEST = 64
"""So far back it is looked at most: one tensor may be saved by thousands of operations."""

_SAVED_AT_ONCE = 8
"""Tensors that one operation saves, at most: an attention saves that many."""


@dataclass(eq=False, slots=True)
class _Moved:
    memory: Offloaded
    position: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: Saved


class _Blocks(threading.local):
    """The blocks that a thread has open.

    Attributes:
        open: the hooks of each, and when it began.
        choice: what the outermost takes; None if that is not measured.
        least: smaller tensors stay.
        saved: bytes of all tensors that were saved in the outermost.
    """

    def __init__(self, least: int) -> None:
        self.open: list[tuple[torch.autograd.graph.saved_tensors_hooks, Mark | None]] = []
        self.choice: Choice | None = None
        self.least = least
        self.saved = 0


def offload_activations(
    budget: int | str | None = None,
    min_bytes: int | str = 1 << 20,
    keep: Callable[[torch.Tensor], bool] | None = None,
) -> ActivationOffload:
    """Keep what forward saves for backward on the host meanwhile: less device memory, same bits.

    ``with offload_activations(): loss = model(x)``, then ``loss.backward()``, in the block or after
    it. The object may be used again, for each step, and nested.

    Moved are tensors that operations of the graph have made. What was there before stays where it
    is: parameters, buffers and inputs, and views of them; so do tensors without gradient (masks and
    indices), expanded ones, tensor subclasses, small ones, and what is saved during backward.
    Tensors that share memory are copied once.

    Args:
        budget: bytes of page-locked memory in use at one time; what is saved beyond it stays on the
            device. An int, a string like ``"8GiB"``, or None: as much as the process's pool has.
            ``"hide"``: as much as makes the step no longer. The object must be used again for each
            step; the first two blocks move 64 MiB, or one tensor, to measure the block and the
            link, the next what the link carries in 0.6 of that time, and from then on more or less,
            as forward and backward stay as long as they are. Large tensors are preferred, and what
            is moved is spread evenly over the block. Each thread's outermost block has a budget of
            its own.
        min_bytes: smaller tensors stay.
        keep: called with each tensor that would be moved; True lets it stay.

    Raises:
        InvalidArgument, InvalidType: a budget or size that is none, or a ``keep`` that cannot be
            called.
        RuntimeError: in backward, much in autograd's words, if a saved tensor was written since. As
            everywhere in torch, writes through ``.data`` are not seen.

    Stream order: a tensor is copied after the work of the current stream at its saving, and
    backward's stream waits for it. The calling thread waits where it is more than a few tensors
    (2, or 128 MiB if that is more) ahead of the copies. On a CPU the copies are made by a worker.
    Threads may share it.
    """
    return ActivationOffload(
        Pace() if budget == "hide" else None if budget is None else _bytes_of(budget),
        parse_size(min_bytes, "min_bytes"),
        None if keep is None else as_callable(keep, "keep"),
    )


def _bytes_of(budget: int | str) -> int:
    try:
        return parse_size(budget, "budget")
    except streamlap.InvalidArgument as error:
        hint = ', or "hide"' if isinstance(budget, str) else ""
        raise streamlap.InvalidArgument(f"{error}{hint}") from None


class ActivationOffload:
    """What :func:`offload_activations` gives: a context manager, and its figures."""

    def __init__(
        self,
        budget: int | Pace | None,
        min_bytes: int,
        keep: Callable[[torch.Tensor], bool] | None,
    ) -> None:
        self._pace = budget if isinstance(budget, Pace) else None
        self._budget = None if isinstance(budget, Pace) else budget
        self._least = max(1, min_bytes)
        self._spread = Spread(self._least)
        self._blocks = _Blocks(self._least)
        self._keep = keep
        # Re-entrant, because a collection of garbage inside may run anything.
        self._lock = threading.RLock()
        # By the order in which they were saved: backward asks in about the reverse. One that
        # several operations have saved is there several times.
        self._all: weakref.WeakValueDictionary[int, Offloaded] = weakref.WeakValueDictionary()
        self._saved = 0
        # By where it lies and its version. A tensor: what had no room when one operation saved it
        # is not moved for another, or it would be in both places.
        self._known: weakref.WeakValueDictionary[tuple[int, ...], Offloaded | torch.Tensor]
        self._known = weakref.WeakValueDictionary()
        self._leaving: Window[Leaving] = Window()
        self._arriving: Window[streamlap.Transfer] = Window(2)  # one is ahead, the host another
        self._here: Window[weakref.ref[Offloaded]] = Window(2)
        self._died: deque[Leaving] = deque()  # destructors take no lock
        self._orphans: deque[Leaving] = deque()
        self._warned = False
        self._task = -1
        self._tasks: set[int] = set()  # whose ends are waited for
        self._count = {"moved": 0, "moved_bytes": 0, "shared": 0, "stayed": 0, "fetched": 0}
        self._held = self._peak = 0
        self._arguments = ("hide" if isinstance(budget, Pace) else budget, min_bytes, keep)

    def __reduce__(self) -> tuple[Any, ...]:
        return offload_activations, self._arguments  # a copy has moved nothing

    @uncompiled
    def __enter__(self) -> ActivationOffload:
        blocks, begin, choice = self._blocks, None, None
        if self._pace is not None and not blocks.open:
            begin = mark()
            with self._lock:
                choice = self._spread.begin(self._pace.budget(), not self._pace.knows_link())
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()  # after it nothing fails: nobody would take the hooks away
        blocks.open.append((hooks, begin))
        if choice is not None:
            blocks.choice, blocks.least, blocks.saved = choice, choice.least, 0
        return self

    @uncompiled
    def __exit__(self, *error: object) -> None:
        blocks = self._blocks
        if not blocks.open:
            raise streamlap.InvalidArgument(
                "this thread has no block of offload_activations() open"
            )
        hooks, begin = blocks.open.pop()
        hooks.__exit__(*error)
        if blocks.open or blocks.choice is None:
            return
        choice, blocks.choice, blocks.least = blocks.choice, None, self._least
        # Half a block tells nothing, nor does one without a graph, as in an evaluation.
        if error[0] is None and choice.seen and self._pace is not None and begin is not None:
            with self._lock:
                self._spread.end(choice)
                self._pace.block(begin, mark(), blocks.saved)

    def stats(self) -> dict[str, int]:
        """Return the figures so far.

        ``moved`` and ``moved_bytes`` were copied to the host, ``fetched`` copies came back;
        ``shared`` are saved tensors whose memory was copied for another one, ``stayed`` those left
        alone. ``held_bytes`` are on the host now, ``peak_bytes`` at most so far. Thread-safe.
        """
        with self._lock:
            return self._count | {"held_bytes": self._in_use(), "peak_bytes": self._peak}

    # -- forward

    @uncompiled
    def _pack(self, tensor: torch.Tensor) -> Saved | _Moved:
        # This is called for every tensor that is saved: what lets most of them stay comes first.
        if _has_size(tensor):
            nbytes, blocks = tensor.nbytes, self._blocks
            blocks.saved += nbytes
            if nbytes >= blocks.least:
                span = _movable_range(tensor)
                if span is not None and not (self._keep is not None and self._keep(tensor)):
                    return self._offered(tensor, *span)
        with self._lock:
            self._count["stayed"] += 1
        return saved_version(tensor, tensor.detach())  # the tensor itself would hold its own graph

    def _offered(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, first: int, nbytes: int
    ) -> Saved | _Moved:
        key = (identity_of(storage), first, nbytes, tensor._version)
        with self._lock:
            known = self._known.get(key)
            if isinstance(known, Offloaded) and known.root() is root_of(tensor):
                self._count["shared"] += 1
                return self._moved(tensor, known, first)
            memory = None
            if not isinstance(known, torch.Tensor):
                memory = self._send(tensor, storage, first, nbytes)
            if memory is not None:
                self._known[key] = memory
                return self._moved(tensor, memory, first)
            alias = tensor.detach()
            self._known[key] = alias
            self._count["stayed"] += 1
            return saved_version(tensor, alias)

    def _moved(self, tensor: torch.Tensor, memory: Offloaded, first: int) -> _Moved:
        memory.users += 1
        position, self._saved = self._saved, self._saved + 1
        self._all[position] = memory
        offset = int(tensor.storage_offset()) - first // tensor.itemsize
        version = saved_version(tensor, counter_of(tensor))
        return _Moved(
            *(memory, position, tensor.dtype, tensor.shape, tensor.stride(), offset, version)
        )

    def _send(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, first: int, nbytes: int
    ) -> Offloaded | None:
        if self._budget is not None and self._in_use() + nbytes > self._budget:
            return None
        choice = self._blocks.choice
        if self._pace is not None and (choice is None or not choice.takes(tensor.nbytes, nbytes)):
            return None
        try:
            timed = None if self._pace is None else True  # the pace is made of these times
            memory = Offloaded(tensor, storage, first, nbytes, self._died, timed)
        except streamlap.PoolExhausted as error:
            if choice is not None:
                choice.gives_back(nbytes)
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"activations stay on the device, the pinned pool is full: {error}",
                    stacklevel=2,
                )
            return None
        self._held += nbytes
        self._peak = max(self._peak, self._in_use())
        self._count["moved"] += 1
        self._count["moved_bytes"] += nbytes
        self._leaving.add(memory.leaving, nbytes)
        self._let_go()
        return memory

    def _let_go(self, wanted: set[Offloaded | None] | None = None) -> None:
        """Let go of memory on the device whose copy is done; wait for that where there is much.

        ``wanted``: of backward, which has use for these and waits for none.
        """
        while len(self._leaving):
            oldest = self._leaving.oldest()
            memory = oldest.memory()
            if wanted is None and self._leaving.full():
                oldest.wait_until_left()
            elif not oldest.left() or (wanted is not None and memory in wanted):
                return
            if memory is not None:
                self._note_pace(memory)
                memory.source = None
            self._leaving.pop()

    def _forget(self) -> None:
        """Let go of copies for nobody, as of a graph that was dropped, that are done."""
        while self._died:
            leaving = self._died.popleft()
            self._held -= leaving.nbytes
            if leaving.orphan is not None:
                self._orphans.append(leaving)
        # Copies end in the order of sending, and users die in that order, or in the reverse.
        orphans = self._orphans
        while orphans and orphans[-1].left():
            orphans.pop().orphan = None
        while orphans and orphans[0].left():
            orphans.popleft().orphan = None

    def _note_pace(self, memory: Offloaded) -> None:
        if self._pace is not None and not memory.measured:
            memory.measured = True
            self._pace.copied(memory.nbytes, memory.seconds())

    def _in_use(self) -> int:
        """Return the bytes on the host, those included that are copied for nobody any more."""
        self._forget()
        return self._held + sum(leaving.nbytes for leaving in self._orphans)

    # -- backward

    @uncompiled
    def _unpack(self, packed: Saved | _Moved) -> torch.Tensor:
        if not isinstance(packed, _Moved):
            if self._pace is not None and self._pace.learns():
                with self._lock:
                    self._expect_the_end()
            check_version(packed)
            return packed[0]
        memory = packed.memory
        check_version(packed.version, (packed.dtype, packed.shape, memory.device))
        with self._lock:
            in_backward = self._expect_the_end()
            self._forget()  # what was used while it was copied may be much
            flat = memory.source
            back = None if flat is not None else memory.way_back() or self._fetch(memory)
            if flat is not None and self._pace is not None and memory.left():
                self._note_pace(memory)
            if in_backward:
                self._fetch_ahead(packed.position)
            else:
                self._arriving.clear()
            if back is not None:
                flat = memory.arrive(back, self._task)
            assert flat is not None
        view = torch.empty(0, dtype=packed.dtype, device=flat.device)
        start = flat.storage_offset() // packed.dtype.itemsize
        view.set_(flat.untyped_storage(), start + packed.offset, packed.shape, packed.stride)
        # A graph of the backward may save it, and is to notice a write to what was saved here.
        alias = packed.version[0].detach()
        alias.data = view
        return alias

    def _expect_the_end(self) -> bool:
        """Let the end of this backward let go of what it has fetched; False: there is none."""
        task = current_task()
        if task == -1:
            return False
        self._task = task
        if task not in self._tasks:  # one may come back to it after another within it
            self._tasks.add(task)
            begin = mark() if self._pace is not None and self._pace.learns() else None
            End(lambda inside: self._end(task, None if inside else begin), lambda: self._fail(task))
        return True

    def _end(self, task: int, begin: Mark | None) -> None:
        with self._lock:
            self._tasks.discard(task)
            if self._pace is not None and begin is not None:
                self._pace.backward(begin, mark())
            self._arriving.clear()
            self._forget()
            under_way = [one.orphan for one in self._orphans if one.orphan is not None]
        # Nobody may call again for long.
        me = weakref.ref(self)

        def forget(_done: streamlap.Transfer) -> None:
            this = me()
            if this is not None:
                with this._lock:
                    this._forget()

        for copy in under_way:
            copy.add_done_callback(forget)

    def _fail(self, task: int) -> None:
        with self._lock:
            self._tasks.discard(task)
            self._arriving.clear()

    def _fetch_ahead(self, position: int) -> None:
        """Start the way back of those that were saved before this one."""
        ahead: Window[None] = Window()
        # One operation asks for what it has saved from the first on: those after it are next.
        wanted = {self._all.get(position + later) for later in range(_SAVED_AT_ONCE)}
        gone = 0
        for earlier in range(position - 1, max(position - _FARTHEST, 0) - 1, -1):
            if gone == _LARGEST_GAP or ahead.full():
                break
            memory = self._all.get(earlier)
            if memory is None:
                gone += 1
                continue
            gone = 0
            if memory.spent == self._task or memory in wanted:
                continue
            if not memory.here:
                self._fetch(memory)
            ahead.add(None, memory.nbytes)
            wanted.add(memory)
        self._drop_stale(wanted)
        if self._pace is not None:
            self._let_go(wanted)

    def _drop_stale(self, wanted: set[Offloaded | None]) -> None:
        """Let go of what nobody seems to ask for, if there is much: it can be fetched again."""
        for _ in range(len(self._here)):
            if not self._here.full():
                return
            memory = self._here.pop()()
            if memory is None or not memory.here:
                continue
            if memory in wanted:
                self._here.add(weakref.ref(memory), memory.nbytes)
            else:
                memory.drop()

    def _fetch(self, memory: Offloaded) -> streamlap.Transfer:
        while len(self._arriving) and (self._arriving.full() or self._arriving.oldest().done()):
            self._arriving.pop().result()  # site: activations.bound_arriving
        while len(self._here):
            oldest = self._here.oldest()()
            if oldest is not None and oldest.here:
                break
            self._here.pop()
        back = memory.fetch()
        self._arriving.add(back, memory.nbytes)
        self._count["fetched"] += 1
        self._here.add(weakref.ref(memory), memory.nbytes)
        return back


def _has_size(tensor: torch.Tensor) -> bool:
    """Return whether it is no subclass, and its memory is one block."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _movable_range(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int] | None:
    """Return a tensor's storage, the first byte there and the bytes to move; None: it stays."""
    if root_of(tensor).is_leaf:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    if tensor.device.type not in ("cpu", "cuda") or current_task() != -1:
        return None
    nbytes, storage = tensor.nbytes, tensor.untyped_storage()
    whole = storage.nbytes()
    if nbytes == whole:
        return storage, 0, whole
    dense = tensor.is_contiguous()
    if not dense:
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        dense = tensor.permute(order).is_contiguous()
    if dense:
        return storage, int(tensor.storage_offset()) * tensor.itemsize, nbytes
    # With gaps, as the thirds of a common product have: all of the memory, once for all of them.
    return (storage, 0, whole) if nbytes <= whole <= 4 * nbytes else None
