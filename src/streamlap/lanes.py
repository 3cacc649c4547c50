"""One device's items of a pipeline, and how each is issued.

On a GPU the caller's thread issues (``InlineLane``): ``fn`` enqueues on the caller's current stream
and the copy follows on the copy stream. For CPU tensors a worker thread does (``HostLane``), unless
the caller is such a worker itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from streamlap import _native, foreign, observe
from streamlap.arrays import as_destination, as_source, check_matches, flatten
from streamlap.batch import WHOLE, on_stream
from streamlap.devices import (
    Place,
    StreamLike,
    as_stream,
    compute_on,
    require_no_capture,
    streams_in_use,
)
from streamlap.errors import InvalidType, SourceModified
from streamlap.group import Slot
from streamlap.modes import CallerModes
from streamlap.pinned import PinnedPool
from streamlap.plan_host import plan_to_cpu
from streamlap.transfer import Transfer

E = TypeVar("E", bound=BaseException)


@dataclass(slots=True)
class Job:
    """What a lane computes and where its results go.

    Attributes:
        stream: where the default product of a CuPy array runs; None: on torch's current stream.
        of_cupy: whether ``x`` is CuPy's, so that its current stream may read and write it.
    """

    fn: Callable[[Any], Any]
    x: Any
    default_fn: bool
    as_numpy: bool
    depth: int
    pin: bool | None
    dtype: torch.dtype | None
    pool: PinnedPool | None
    place: Place
    stream: _native.Stream | None = None
    of_cupy: bool = False


class Control:
    """Whether the lanes of one pipeline go on."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def stop(self, error: BaseException | None = None) -> None:
        """Issue nothing more, because of ``error``; the first one counts."""
        self._error = self._error or error or Stopped("the pipeline was stopped")

    @property
    def stopped(self) -> bool:
        """Whether nothing more should be issued."""
        return self._error is not None or _native.ending()

    def forget(self) -> None:
        """Keep no error, whose traceback leads back to the call's arguments."""
        self._error = Stopped("the pipeline was stopped")

    def check(self) -> None:
        """Raise what stopped the pipeline."""
        if self._error is not None:
            raise self._error


class Stopped(Exception):
    """Why an item was not computed: the pipeline was stopped before."""


def annotate(error: E, index: int) -> E:
    """Attach the item's index (0-based) to what was raised while it was computed."""
    if not hasattr(error, "streamlap_index"):
        with contextlib.suppress(Exception):
            error.streamlap_index = index  # type: ignore[attr-defined]
            error.add_note(f"streamlap: raised by item {index}")
    return error


def start_copy(
    value: Any,
    out: Any,
    pin: bool | None,
    dtype: torch.dtype | None,
    pool: PinnedPool | None,
    place: Place | None,
    as_numpy: bool = False,
) -> Transfer:
    """Start copying an item's result to the host, whole."""
    if out is None:
        leaves, spec = flatten(value)
        outs = [None] * len(leaves)
    else:
        source = as_source(value)
        if source is None:
            raise InvalidType(f"with out, fn must give a tensor, not {type(value).__name__}")
        check_matches(
            as_destination(out, "out"), source.tensor.shape, dtype or source.tensor.dtype, "out"
        )
        leaves, spec = flatten(value)
        outs = [out]
    planned = plan_to_cpu(leaves, outs, dtype, pin, None, pool, WHOLE, place)
    if as_numpy:
        for leaf in planned.leaves:
            if hasattr(leaf, "as_numpy"):
                leaf.as_numpy = True
    return Transfer(planned.leaves, spec, planned.parts, planned.borrowed, False)


class Lane:
    """The items of one input; ``slots[i]`` is item i's transfer."""

    def __init__(self, job: Job, outs: list[Any] | None, control: Control) -> None:
        self._job = job
        self._outs = outs
        self._control = control
        self.slots: list[Slot] = []

    def start(self) -> None:
        """Begin, where a worker issues by itself."""

    def issue(self, index: int) -> None:
        """Issue one item, where the caller's thread does."""

    def all_issued(self) -> None:
        """Note where the last read of the input is."""

    def collect(self) -> list[Any]:
        """Wait for all items; each transfer is let go of while the next one is waited for."""
        results = []
        if self.slots:
            # First the last one: a thread that wakes for every item takes the interpreter's lock
            # from the worker that computes them.
            self.slots[-1].settle()  # site: lanes.settle_last
        for index, slot in enumerate(self.slots):
            try:
                results.append(slot.collect())
            except SourceModified as error:
                results.clear()  # or the traceback would keep them
                raise annotate(error, index) from None
            except BaseException:
                results.clear()
                raise
        return results

    def fail(self, error: BaseException) -> None:
        """After ``error``: wait for what is in flight, and give every buffer back."""
        if not isinstance(error, KeyboardInterrupt):
            self._drain()  # site: lanes.drain_failed
        stopped = Stopped("the pipeline failed")  # not `error`: its traceback leads back here
        for slot in self.slots:
            slot.revoke(stopped)

    def read_source(self, stream: StreamLike) -> None:
        """Order a later writer of the input after the last read of it.

        Nothing is left to order where a worker computes: it has read the input of an item before
        the item's slot is filled.
        """
        del stream

    def _drain(self) -> None:
        for slot in self.slots:
            if slot.transfer is not None:
                slot.transfer._settle()  # site: lanes.settle

    def _copy(self, value: Any, index: int) -> Transfer:
        job = self._job
        out = None if self._outs is None else self._outs[index]
        host_place = None if job.place.is_cuda else job.place
        as_numpy = job.as_numpy and job.default_fn
        return start_copy(value, out, job.pin, job.dtype, job.pool, host_place, as_numpy)

    def _retire(self, index: int) -> None:
        """Let go of an item's device memory, once its copy is done."""
        transfer = self.slots[index].transfer
        if transfer is not None:
            transfer._release_done()  # site: lanes.release_done


class InlineLane(Lane):
    """Issued by the caller's thread, on its current stream, under the caller's ``no_grad``."""

    _last_reads: Sequence[_native.Event] = ()

    def start(self) -> None:
        job = self._job
        if job.stream is None or self._outs is None:
            return
        # Copies find job.stream as torch's current one; who reads the old contents is elsewhere.
        for index, handle in streams_in_use():
            reader = job.place.runtime.adopt(index, handle)
            require_no_capture(reader, "pipelined_run(out=...)")
            job.stream.wait(reader.record())  # site: lanes.start_after_readers

    def issue(self, index: int) -> None:
        job = self._job
        if index >= job.depth:
            try:
                self._make_room(index - job.depth)
            except SourceModified as error:
                annotate(error, index - job.depth)
                raise
        try:
            with on_stream(job.stream, job.place):
                with current_device(job.place), observe.compute(job.place, index):
                    value = job.fn(job.x)
                transfer = self._copy(value, index)
        except BaseException as error:
            annotate(error, index)
            raise
        slot = Slot()
        slot.fill(transfer)
        self.slots.append(slot)

    def _make_room(self, index: int) -> None:
        # Nobody knows on which stream fn allocated its result: only one that has been read is safe.
        # A staged copy may still be on its way from the ring to its destination.
        transfer = self.slots[index].transfer
        assert transfer is not None
        transfer._wait_read()  # site: lanes.make_room

    def all_issued(self) -> None:
        users = self._users(None)
        self._last_reads = [user.record() for user in users]  # site: lanes.record_last_reads

    def read_source(self, stream: StreamLike) -> None:
        for writer in self._users(stream):
            require_no_capture(writer, "wait_source()")
            for read in self._last_reads:
                writer.wait(read)  # site: lanes.writer_waits

    def _users(self, stream: StreamLike) -> list[_native.Stream]:
        """Return the streams that read or write x: the given one, or all that are current."""
        job = self._job
        found = [as_stream(stream, job.place)]
        if stream is None and job.place.is_cuda and job.of_cupy:
            found.append(as_stream(foreign.cupy_handle(job.place.index), job.place))
            found.append(job.stream)
        return [user for user in found if user is not None]


def current_device(place: Place) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current device, where it is not already."""
    if not place.is_cuda or torch.cuda.current_device() == place.index:
        return contextlib.nullcontext()
    return torch.cuda.device(place.index)


class HostLane(Lane):
    """Issued by the compute worker of a logical device: each item's task launches the next."""

    def __init__(
        self, job: Job, outs: list[Any] | None, control: Control, modes: CallerModes, n: int
    ) -> None:
        super().__init__(job, outs, control)
        self.slots = [Slot() for _ in range(n)]
        self._started = False
        self._modes = modes
        self._compute = job.place.compute_stream()

    def start(self) -> None:
        if self.slots:
            self._launch(0)
            self._started = True

    def fail(self, error: BaseException) -> None:
        if self._started and not isinstance(error, KeyboardInterrupt) and not _native.ending():
            for slot in self.slots:  # the worker fills every slot, with the error after a stop
                slot.settle()  # site: lanes.wait_for_worker
        super().fail(error)

    def _launch(self, index: int) -> None:
        compute_on(self._job.place, lambda: self._step(index), self._skipped)

    def _skipped(self, error: Exception) -> None:
        self._control.stop(error)
        for slot in self.slots:
            slot.revoke(error)

    def _compute_and_copy(self, index: int) -> Transfer:
        try:
            with observe.compute(self._job.place, index, self._compute):
                value = self._job.fn(self._job.x)
            return self._copy(value, index)
        except BaseException as error:
            annotate(error, index)
            raise

    def _step(self, index: int) -> None:
        """Compute an item and launch the next; what left it would stop the worker for all."""
        if _native.ending():
            return  # nobody is left to deliver to
        try:
            self._control.check()
            if index >= self._job.depth:
                self._retire(index - self._job.depth)
            self.slots[index].fill(self._modes.run(self._compute_and_copy, index))
            if index + 1 < len(self.slots):
                self._wait_for_room(index + 1)
                self._launch(index + 1)
        except BaseException as error:
            self._control.stop(error)
            with contextlib.suppress(BaseException):
                self._drain()  # site: lanes.drain_stopped
            for slot in self.slots:
                slot.revoke(error)

    def _wait_for_room(self, index: int) -> None:
        """Let the worker wait until the copy of the item ``depth`` before is done."""
        earlier = self.slots[index - self._job.depth].transfer if index >= self._job.depth else None
        if earlier is not None:
            earlier._hold(self._compute)  # site: lanes.hold_for_room
