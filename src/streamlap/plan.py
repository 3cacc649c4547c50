"""A pipeline that is made once and called many times, into the same memory."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from streamlap import _native, watch
from streamlap.arrays import Source
from streamlap.checks import as_callable, as_count, as_dtype, as_flag
from streamlap.devices import Place, current_stream, require_no_capture
from streamlap.errors import CaptureError, InvalidArgument, InvalidType
from streamlap.graphs import MOST_STREAMS, Captured, NotCaptured
from streamlap.lanes import current_device
from streamlap.pinned import PinnedPool, as_pool, pool_for
from streamlap.pipeline import Fn, as_depth, checked_x, pipelined_run, product_dtype
from streamlap.static_memory import StaticInput, StaticResults, dense_stride
from streamlap.uncompiled import uncompiled

# The plans whose calls led to the code that runs, on a worker too: one that waited for its own end
# would wait for ever.
_running: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("running", default=())


PRODUCT_STREAMS = 4
"""Products of 256x256 fill an eighth of an H200."""


class Pipeline:
    """:func:`pipelined_run`, prepared: ``plan(x)`` gives ``n`` results ``fn(x)`` on the host.

    Each call copies ``x`` into the plan's own input and brings the results into the plan's own
    pinned memory. On a GPU, small items are captured as one CUDA graph, so that a call costs one
    launch instead of ``n`` times the issue of a product and a copy.

    Args:
        fn: ``x.mm(x)`` (``x`` square) if left out; else a function of the plan's input that gives
            one tensor, of the same shape and dtype each time. It must not write to its argument.
        like: what the ``x`` of each call is like: a tensor, an array of NumPy or CuPy, or anything
            on a device with DLPack. For a graph its content is what preparation computes with.
        n: how many results.
        compute_streams: on how many streams the calls of ``fn`` in a graph take turns, for items
            that do not fill the GPU; they must not depend on one another then. None: 4 for
            products, 1 for an ``fn``. Outside of a graph there is always one.
        graph: None: a graph on a GPU if an item has at most ``policy().graph_item_bytes`` and all
            of them at most 256 MiB, and if ``fn`` can be captured. True: a graph, or an error.
            False: none.
        depth: how many results may be on the device at once, where there is no graph; None: as for
            :func:`pipelined_run`. A graph has all ``n`` there.
        dtype: convert results to this dtype on the device.
        pool: where pinned memory comes from.

    Attributes:
        n: how many results.
        captured: whether a call launches a graph.
        reason: why it does not, in words; None if it does.

    How often ``fn`` is called: with a graph, ``1 + 2 * compute_streams + n`` times during
    preparation and never again; what it does besides enqueuing work is then not repeated, gradients
    are off, and precision and autocast are those of the preparation. Without one, ``n`` times a
    call as by :func:`pipelined_run`, and not before, except that with ``graph=None`` on a GPU it is
    called before it is known that there will be none. Random numbers of torch's default generator
    go on from call to call; another generator cannot be captured.

    Raises:
        InvalidArgument, InvalidType: an argument that makes no sense. Nothing was enqueued.
        CaptureError: ``graph=True``, and ``fn`` cannot be captured; or this is inside a capture.
        PoolExhausted: the results do not fit the pool's limit.
        Exception: what ``fn`` raised.

    Stream order, of preparation and calls: on the current stream of the device of ``like``, after
    what it has been given, and what CuPy's current stream has been for a CuPy array. Preparing a
    graph waits for that work.

    Thread-safe: calls from several threads take turns, and the results are those of the last one.
    """

    @uncompiled
    def __init__(
        self,
        fn: Fn | None = None,
        like: Any = None,
        n: int = 50,
        *,
        compute_streams: int | None = None,
        graph: bool | None = None,
        depth: int | None = None,
        dtype: torch.dtype | None = None,
        pool: PinnedPool | None = None,
    ) -> None:
        watch.enter()
        self.n = as_count(n, "n")
        self._depth = as_depth(depth)
        self._dtype = as_dtype(dtype)
        streams = PRODUCT_STREAMS if fn is None and graph is not False else 1
        if compute_streams is not None:
            streams = as_count(compute_streams, "compute_streams", 1)
        if streams > MOST_STREAMS:
            raise InvalidArgument(f"compute_streams must be at most {MOST_STREAMS}, not {streams}")
        graph = None if graph is None else as_flag(graph, "graph")
        if graph is False and streams > 1:
            raise InvalidArgument("several compute_streams need a graph, and graph is False")
        self._fn = fn if fn is None else as_callable(fn, "fn")
        given = checked_x(like, fn, 0)
        self._place: Place = given.place
        if graph and not self._place.is_cuda:
            raise InvalidArgument(f"a graph needs a GPU, and like is on {self._place}")
        self._pool = as_pool(pool) or pool_for(self._place)
        self._as_numpy = given.as_numpy and fn is None
        self._lock = threading.Lock()
        self._closed = False
        self._graph: Captured | None = None
        self._outs: list[Any] | None = None  # None: fn has not shown yet what it gives
        self.reason: str | None = "it was not asked for"
        require_no_capture(current_stream(self._place), "Pipeline()")
        require_no_capture(given.stream, "Pipeline()")
        with current_device(self._place):
            self._input = StaticInput(like, fn, self._place)
            if self._place.is_cuda and graph is not False and self.n:
                self._input.load(self._input.check(like))
                self._prepare_graph(streams, forced=graph is True)
            elif not self._place.is_cuda:
                self.reason = f"like is on {self._place}"
            if self._outs is None and (fn is None or not self.n):
                x = self._input.tensor
                item = torch.empty(x.shape, dtype=self._dtype or product_dtype(x), device="meta")
                self._outs = StaticResults(self.n, item, dense_stride(item), self._pool).items

    @property
    def captured(self) -> bool:
        """Whether a call launches a graph."""
        return self._graph is not None

    def _prepare_graph(self, streams: int, forced: bool) -> None:
        x = self._input.tensor
        try:
            if not self._input.of_torch:
                raise NotCaptured("torch captures no work of another library")
            self._graph = Captured(
                self._fn, x, self.n, streams, self._dtype, self._pool, self._place, forced
            )
        except NotCaptured as error:
            if forced:
                raise CaptureError(f"the plan cannot be captured: {error}") from error.__cause__
            self.reason = str(error)
            if error.__cause__ is not None:
                warnings.warn(
                    f"streamlap: no graph, because fn cannot be captured ({error}); pass "
                    "graph=False if that is as it should be",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return
        self.reason = None
        self._outs = self._graph.results.items

    @uncompiled
    def __call__(self, x: Any, clone: bool = False) -> list[Any]:
        """Compute and bring all ``n`` results to the host; block until they are there.

        Args:
            x: of the shape, strides, dtype and device of ``like``. It may be written as soon as
                this returns.
            clone: give copies, in ordinary memory, that the caller owns.

        Returns:
            ``n`` host tensors in pinned memory; NumPy arrays for CuPy and NumPy input. They are the
            plan's: its next call overwrites them, after what :func:`record_use` has declared.

        Raises:
            InvalidArgument, InvalidType: an ``x`` that is unlike ``like``, a plan that was closed,
                or a call from inside its own ``fn``. Nothing was enqueued.
            CaptureError: during CUDA graph capture.
            Exception: what ``fn`` raised, where there is no graph, with ``.streamlap_index``.
        """
        watch.enter()
        clone = as_flag(clone, "clone")
        if id(self) in _running.get():
            raise InvalidArgument("fn of a plan calls that plan")
        source = self._input.check(x)
        with self._lock, current_device(self._place):
            _native.acquired(id(self))  # a checker sees no lock of Python's
            try:
                values = self._call(source)
                return [_clone(value) for value in values] if clone else values
            finally:
                _native.released(id(self))

    def _call(self, source: Source) -> list[Any]:
        if self._closed:
            raise InvalidArgument("the plan is closed")
        if not self.n:
            return []
        self._order_after_readers()
        self._input.load(source)
        if self._graph is not None:
            self._graph.run()
        else:
            token = _running.set((*_running.get(), id(self)))
            try:
                self._run()
            finally:
                _running.reset(token)
        return self._values()

    def _order_after_readers(self) -> None:
        """Let the call's work start after what still uses the plan's memory."""
        stream = current_stream(self._place)
        require_no_capture(stream, "a plan")
        if self._graph is not None and stream is not None:
            self._graph.order(stream)  # site: plan.after_last_launch
        for address in self._blocks():
            for use in _native.uses_of(address, self._pool._pool().runtime):
                if stream is None:
                    use.synchronize()  # site: plan.thread_after_readers
                else:
                    stream.wait(use)  # site: plan.stream_after_readers

    def _blocks(self) -> list[int]:
        """Return an address in each block of page-locked memory."""
        if self._graph is not None:
            return [self._graph.results.block.data_ptr()]
        return [_address(out) for out in self._outs or []]

    def _run(self) -> None:
        results = pipelined_run(
            self._input.argument,
            self.n,
            fn=self._fn,
            out=self._outs,
            depth=self._depth,
            dtype=self._dtype,
            pool=self._pool,
        )
        if self._outs is None:
            for index, result in enumerate(results):
                if not isinstance(result, (torch.Tensor, np.ndarray)):
                    raise InvalidType(
                        "the fn of a Pipeline must give one tensor, not "
                        f"{type(result).__name__} (item {index})"
                    )
            self._outs = results

    def _values(self) -> list[Any]:
        assert self._outs is not None
        return [out.numpy() for out in self._outs] if self._as_numpy else list(self._outs)

    def close(self) -> None:
        """Give the graph and all memory back, after the call in progress if there is one.

        Results that somebody holds stay as they are. A closed plan cannot be called.

        Raises:
            InvalidArgument: from inside its own ``fn``.
        """
        if id(self) in _running.get():
            raise InvalidArgument("fn of a plan closes that plan")
        with self._lock:
            self._closed = True
            graph, self._graph = self._graph, None
            self._outs = None
            if graph is not None:
                graph.release()  # site: plan.close_after_launch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        graph = self.__dict__.get("_graph")
        if graph is not None:
            with contextlib.suppress(Exception):
                graph.release()  # site: plan.die_after_launch

    def __repr__(self) -> str:
        how = "one graph" if self.captured else f"no graph: {self.reason}"
        return f"<streamlap.Pipeline of {self.n} items on {self._place}, {how}>"


def _address(out: torch.Tensor | np.ndarray[Any, Any]) -> int:
    return out.data_ptr() if isinstance(out, torch.Tensor) else out.ctypes.data


def _clone(value: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor | np.ndarray[Any, Any]:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()
