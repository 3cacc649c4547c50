"""The handle of a copy: what ``to_cpu`` and ``to_device`` give back."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import operator
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from streamlap import _native, foreign, observe, watch
from streamlap.arrays import Source, Sources, Tree, TreeSpec, unflatten
from streamlap.batch import Copied, CopiedRow, Counts, Part
from streamlap.checks import as_callable, as_seconds
from streamlap.devices import (
    Place,
    StreamLike,
    as_stream,
    check_stream,
    current_stream,
    require_no_capture,
)
from streamlap.errors import InvalidArgument, InvalidType, SourceModified, TransferTimeout


class Transfer:
    """The handle of one copy, or of one tree of copies; the only way to the result.

    It keeps source and destination alive until the copy is done, however soon it is dropped
    itself. All methods may be called from any thread. Waiting releases the interpreter's lock, and
    Ctrl-C interrupts it; the copy goes on.

    Until :meth:`wait_source`, :meth:`done` or :meth:`result` says that it has been read, a source
    is *borrowed*: writing to it makes :meth:`result` raise :class:`SourceModified`.
    """

    def __init__(
        self,
        leaves: Sequence[Copied | Any],
        spec: TreeSpec | None,
        parts: list[Part],
        borrowed: Sequence[Source | Sources],
        to_device: bool,
        counts: list[Counts] | None = None,
        nbytes: int | None = None,
    ) -> None:
        self._counts = counts  # None: not asked for
        self._leaves = leaves
        self._spec = spec
        self._parts = parts
        self._borrowed: Sequence[Source | Sources] = borrowed
        self._to_device = to_device
        if nbytes is None:
            nbytes = sum(leaf.tensor.nbytes for leaf in leaves if isinstance(leaf, Copied))
        self._nbytes = nbytes
        self._error: Exception | None = None  # how the work ended, once it was raised here
        self._modified: str | None = None  # what SourceModified will say
        self._lock = threading.Lock()

    # -- waiting

    def result(self, timeout: float | None = None) -> Tree:
        """Block until the copy is done; return the destination, or the tree of destinations.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TransferTimeout: not done within ``timeout``. Ask again.
            SourceModified: a borrowed source was written too early; the result is not to be used.
            Exception: what the work that made the source raised, or DeviceError.
        """
        self._sync(timeout)
        self._finish()
        self._raise_modified()
        return self._value()

    def wait(self, stream: StreamLike = None) -> Tree | None:
        """Order a consumer's stream after the copy; the calling thread does not wait for it.

        Args:
            stream: whose later work reads the destination; None: the current stream of each device
                concerned. Where there is no stream (CPU tensors), the calling thread waits.

        Returns:
            The destination if it is on a device (``to_device``), else None.
        """
        self._raise_error()
        for part in self._parts:
            self._order(part, self._consumer(part.place, stream))
        return self._value() if self._to_device else None

    def wait_source(self, stream: StreamLike = None) -> None:
        """Order a later writer of the source after the copy has read it.

        Args:
            stream: the writer's stream; None: the current stream of the source's device, and
                CuPy's for a CuPy array. A source in host memory is written by the calling thread,
                so that thread waits.

        From here on the source is no longer borrowed.
        """
        self._raise_error()
        writers = [(part, self._writer(part, stream)) for part in self._parts]
        if stream is None:
            # Packed sources are no longer borrowed, but CuPy's current stream may have changed.
            for part in self._parts:
                if part.of_cupy:
                    own = foreign.cupy_handle(part.source_place.index)
                    writers.append((part, self._consumer(part.source_place, own)))
        self._return_borrowed()
        for part, writer in writers:
            self._order_source(part, writer)

    def done(self) -> bool:
        """Return whether the copy is done, with or without an error; never blocks."""
        try:
            if not all(part.native.done() for part in self._parts):
                return False
        except Exception as error:
            # It may be the question that failed, not the copy.
            if any(part.native.pending() for part in self._parts):
                return False
            self._note_error(error)
            return True
        self._finish()
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the copy is done; return what :meth:`result` would raise, or None.

        Raises:
            TransferTimeout: not done within ``timeout`` seconds.
        """
        limit = None if timeout is None else as_seconds(timeout)
        try:
            self.result(limit)
        except TransferTimeout:
            raise
        except Exception as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[Transfer], object]) -> None:
        """Call ``callback(self)`` once the copy is done: now if it is, else on one shared thread.

        What the callback raises is logged to the logger ``streamlap``. Callbacks should be short:
        they wait for each other.
        """
        as_callable(callback, "callback")
        if self.done():
            watch.run_callback(callback, self)
            return
        left = len(self._parts)
        lock = threading.Lock()

        def part_done() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                watch.run_callback(callback, self)

        watch.enter()
        for part in self._parts:
            part.native.watch(part_done)

    def __await__(self) -> Generator[Any, None, Tree]:
        """Wait in asyncio. Cancelling the await does not cancel the copy."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake(_transfer: Transfer) -> None:
            def set_done() -> None:
                if not future.done():
                    future.set_result(None)

            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody awaits any more
                loop.call_soon_threadsafe(set_done)

        self.add_done_callback(wake)
        yield from future.__await__()
        return self.result()

    # -- parts of the result

    def __bool__(self) -> bool:
        """Return True: a handle is there, whatever it has items."""
        return True

    def __len__(self) -> int:
        """Return the number of items of a list, tuple or dict; TypeError for a single tensor."""
        return len(self._children())

    def __getitem__(self, key: Any) -> Tree:
        """Wait for one item of a list, tuple or dict only, and return it."""
        children = self._children()
        if isinstance(children, Mapping):
            return self._child_result(children[key])
        if isinstance(key, slice):
            return [self._child_result(child) for child in children[key]]
        return self._child_result(children[operator.index(key)])

    def __iter__(self) -> Iterator[Tree]:
        """Iterate over the items of a list or tuple, waiting for each; over the keys of a dict."""
        children = self._children()
        if isinstance(children, Mapping):
            return iter(children)
        return (self._child_result(child) for child in children)

    def chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the pieces of the copy as they land: ``(leaf, offset, view)``.

        ``leaf`` is the leaf's index in the flattened tree, ``offset`` the piece's first element and
        ``view`` its elements as a flat tensor. Pieces come in order of issue and are cut at element
        boundaries. A leaf whose destination is not contiguous comes whole, with offset 0.
        """
        self._raise_error()
        for part in self._parts:
            for piece, (leaf, offset, nbytes) in enumerate(part.native.chunks()):
                index = part.leaves[leaf]
                tensor: torch.Tensor = self._leaves[index].tensor
                with self._waiting(part):
                    self._call(part.native.chunk_sync, piece)  # site: transfer.chunk_sync
                if tensor.is_contiguous() and nbytes < tensor.nbytes:
                    first = offset // tensor.itemsize
                    yield index, first, tensor.view(-1)[first : first + nbytes // tensor.itemsize]
                else:
                    yield index, 0, tensor.view(-1) if tensor.is_contiguous() else tensor

    # -- figures

    @property
    def nbytes(self) -> int:
        """Bytes copied, all leaves together."""
        return self._nbytes

    def elapsed(self) -> float:
        """Return the seconds from the first copy's start to the last one's end.

        Raises:
            InvalidArgument: the transfer is not done, or was not timed: see :func:`to_cpu`'s
                ``timed``.
        """
        if not self.done():
            raise InvalidArgument("elapsed() of a transfer that is not done; call result() first")
        return max((part.native.elapsed_from(part.native) for part in self._parts), default=0.0)

    def stats(self) -> dict[str, Any]:
        """Return what was done: ``nbytes``, ``leaves``, ``chunks``, and the ``paths`` taken.

        A path is ``direct`` (the copy engine, to or from pinned memory), ``staged`` (ordinary
        memory, through pinned slots), ``unpack`` (a last step after the copy), ``host`` (memcpy on
        a worker); by a kernel, or by a worker's task: ``gather`` and ``scatter`` (many leaves at
        once, or a cast on the way), ``strided`` (elements that lie apart). Once done, ``interval``
        is when the copy began and ended in seconds of ``time.perf_counter()`` where the runtime
        knows it (None elsewhere).
        """
        begin = end = None
        if self.done():
            known = [part.native.interval() for part in self._parts]
            known = [pair for pair in known if pair[0] == pair[0] and pair[1] == pair[1]]
            if known:
                begin, end = min(pair[0] for pair in known), max(pair[1] for pair in known)
        return {
            "nbytes": self.nbytes,
            "leaves": sum(isinstance(leaf, Copied) for leaf in self._leaves),
            "chunks": sum(len(part.native.chunks()) for part in self._parts),
            "paths": sorted({part.path for part in self._parts}),
            "interval": None if begin is None else (begin, end),
        }

    def nonfinite(self) -> int:
        """Block until the copy is done; return how many elements were infinite or NaN.

        They were counted as they were read, before any cast or scale.

        Raises:
            InvalidArgument: not asked for by ``nonfinite=True``.
            Exception: as :meth:`result`.
        """
        if self._counts is None:
            raise InvalidArgument("nothing was counted; start the copy with nonfinite=True")
        self._sync(None)  # site: transfer.nonfinite
        return sum(counts.value() for counts in self._counts)

    def __repr__(self) -> str:
        state = "done" if self.done() else "in flight"
        return f"<streamlap.Transfer of {self.nbytes} bytes, {state}>"

    # -- inside

    def _sync(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + as_seconds(timeout)
        self._raise_error()
        for part in self._parts:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with self._waiting(part):
                done = self._call(part.native.sync, left)  # site: transfer.sync
            if not done:
                raise TransferTimeout(
                    f"a transfer of {self.nbytes} bytes was not done within {timeout} s"
                )

    def _order(self, part: Part, stream: _native.Stream | None) -> None:
        if stream is None:
            with self._waiting(part):
                self._call(part.native.sync)  # site: transfer.order_thread
        else:
            self._call(part.native.wait_on_stream, stream)  # site: transfer.order_stream
            observe.stream_waits(stream, part.place, part.native)

    def _order_source(self, part: Part, stream: _native.Stream | None) -> None:
        if stream is None:
            with self._waiting(part):
                self._call(part.native.source_sync)  # site: transfer.order_writer_thread
        else:
            self._call(part.native.wait_source_on_stream, stream)  # site: transfer.order_writer
            observe.stream_waits(stream, part.place, part.native)

    def _hold(self, stream: _native.Stream) -> None:
        """Let a worker's later work start after the end of the copy, failed or not."""
        for part in self._parts:
            part.native.hold_stream(stream)  # site: transfer.hold_stream
            observe.stream_waits(stream, part.place, part.native)

    def _waiting(self, part: Part) -> contextlib.AbstractContextManager[Any]:
        return observe.waiting(lambda: observe.lane_of(part.place, self._to_device, part.path))

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            self._note_error(error)
            raise

    def _note_error(self, error: Exception) -> None:
        """If that is what ended the work, keep it here and let go of both ends.

        The native transfer holds the same object, whose traceback now leads to this transfer: a
        circle that no garbage collector sees.
        """
        for part in self._parts:
            try:
                part.native.done()
            except Exception as own:
                if own is not error:
                    continue
                self._error = error
                for failed in self._parts:
                    failed.native.discard()
                self._parts, self._leaves, self._borrowed = [], [], []
                return

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _raise_modified(self) -> None:
        if self._modified is not None:
            raise SourceModified(self._modified)

    def _finish(self) -> None:
        """Once done: check what was borrowed, and let go of the source."""
        self._return_borrowed()
        for part in self._parts:
            part.native.release_all()  # site: transfer.release_all

    def _return_borrowed(self) -> None:
        """From here on the sources may be written: check them a last time."""
        if self._borrowed:
            self._check_borrowed(last=True)

    def _check_borrowed(self, last: bool = False) -> None:
        # Under the lock, so that who returns them does not go on to write while another checks.
        with self._lock:
            for source in self._borrowed:
                written = source.written()
                if written is not None:
                    shape = tuple(written.shape)
                    self._modified = (
                        f"the source of a transfer (shape {shape} on {written.device}) was "
                        "written while it was borrowed, so the copy may hold old or new bytes. "
                        "Call wait_source(), done() or result() before writing to it, or pass "
                        "protect=True"
                    )
            if last:
                self._borrowed = []

    # -- for the pipelines

    def _all_parts(self) -> list[Part]:
        return self._parts

    def _settle(self) -> None:
        """Block until the copy is done, however it ended; nobody reads what has come."""
        with contextlib.suppress(Exception):
            self._raise_error()
            for part in self._parts:
                self._call(part.native.sync, None, False)  # site: transfer.settle
            self._finish()

    def _wait_read(self) -> None:
        """Block until the source has been read, and let go of it; raise what ended the work."""
        self._raise_error()
        for part in self._parts:
            with self._waiting(part):
                self._call(part.native.source_sync)  # site: transfer.wait_read
        self._return_borrowed()
        for part in self._parts:
            part.native.release_source()  # site: transfer.release_read
        self._raise_modified()

    def _release_done(self) -> None:
        """Let go of the source of a transfer that a stream was made to wait for."""
        self.done()

    def _consumer(self, place: Place, stream: StreamLike) -> _native.Stream | None:
        if stream is None:
            consumer = current_stream(place)
        elif not place.is_cuda and not isinstance(stream, _native.Stream):
            check_stream(stream)
            consumer = None  # the copy is a host's; no device stream can wait for it
        else:
            consumer = as_stream(stream, place)
        require_no_capture(consumer, "wait()")
        return consumer

    def _writer(self, part: Part, stream: StreamLike) -> _native.Stream | None:
        if stream is None and not part.source_on_device:
            return None
        if stream is not None:
            return self._consumer(part.source_place, stream)
        writer = current_stream(part.source_place)
        require_no_capture(writer, "wait_source()")
        return writer

    def _value(self) -> Tree:
        leaves = self._leaves
        if isinstance(leaves, CopiedRow):
            values: list[Any] = list(leaves.tensors)
        else:
            values = [leaf.value() if isinstance(leaf, Copied) else leaf for leaf in leaves]
        return values[0] if self._spec is None else unflatten(values, self._spec)

    def _children(self) -> Any:
        """Return the items of the root, each as (first leaf, past the last, spec)."""
        spec = self._spec
        if spec is None or spec.is_leaf():
            raise InvalidType("a transfer of a single tensor has no items; use result()")
        children = []
        first = 0
        for child in spec.children():
            children.append((first, first + child.num_leaves, child))
            first += child.num_leaves
        kind = spec.type  # torch's pytree has functions for some, namedtuple among them
        if not (isinstance(kind, type) and issubclass(kind, dict)):
            return children
        keys = spec.context[1] if issubclass(kind, collections.defaultdict) else spec.context
        return dict(zip(keys, children, strict=True))

    def _child_result(self, child: tuple[int, int, TreeSpec]) -> Tree:
        self._raise_error()
        first, last, spec = child
        for leaf in self._leaves[first:last]:
            if isinstance(leaf, Copied) and leaf.part is not None:
                with self._waiting(leaf.part):
                    native = leaf.part.native
                    self._call(native.leaf_sync, leaf.position)  # site: transfer.leaf_sync
        self._check_borrowed()
        self._raise_modified()
        values = [
            leaf.value() if isinstance(leaf, Copied) else leaf for leaf in self._leaves[first:last]
        ]
        return unflatten(values, spec)
