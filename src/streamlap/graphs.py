"""A pipeline of small items as one CUDA graph: calls of ``fn`` on compute streams, few copies.

What is captured is torch's own: kernels of ``fn``, and ``copy_(non_blocking=True)`` from one buffer
on the device into page-locked memory, which torch lets pass inside a capture and which becomes a
memcpy node.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from streamlap import _native, observe
from streamlap.arrays import plain_tensor
from streamlap.batch import external_stream
from streamlap.devices import Place, current_stream
from streamlap.errors import InvalidArgument, InvalidType
from streamlap.pinned import PinnedPool
from streamlap.policy import policy
from streamlap.static_memory import StaticResults, carve, dense_stride, new_like

SMALL_TOTAL = 256 << 20
"""Bytes of all items up to which a plan is captured unasked: a graph has all of them on the device
at once."""

MOST_STREAMS = 32
_WARM_UPS = 2  # on each stream, after the first call, which shows what the items are

# A copy costs about 2.25 us before its first byte, the time of 124 KB on the wire.
_SMALLEST_GROUP = 128 << 10
_LARGEST_GROUP = 4 << 20


def is_small(nbytes: int, n: int) -> bool:
    """Return whether a plan of ``n`` items of ``nbytes`` is captured unasked."""
    return 0 < nbytes <= policy().graph_item_bytes and nbytes * n <= SMALL_TOTAL


def copy_groups(n: int, nbytes: int) -> list[int]:
    """Return how many items go into each copy.

    The first copy waits for its items, and after the last item its copy is left, so groups are
    smallest at both ends; every copy has a fixed cost, so they grow towards the middle. They
    double: while a group is copied, twice as many items can be computed if computing takes half as
    long as copying, and where it takes longer, the computing hides the copies anyway. The smallest
    group is one whose bytes cost what the copy itself does; the largest is one where that is 3 %.
    For 50 products of 256x256 in fp32 these are 10 copies: 22 us instead of 112 beside 233 us of
    bytes, and 5 us of wire are lost at either end.
    """
    least = max(1, _SMALLEST_GROUP // nbytes)
    most = max(least, _LARGEST_GROUP // nbytes)
    head: list[int] = []
    tail: list[int] = []
    left, size = n, least
    while size < most and left >= 4 * size:  # both ends, and as much again between them
        head.append(size)
        tail.append(size)
        left -= 2 * size
        size *= 2
    parts = -(-left // most)
    middle = [left // parts + (part < left % parts) for part in range(parts)]
    return head + middle + tail[::-1]


class NotCaptured(Exception):
    """Why there is no graph."""


_one_at_a_time = threading.RLock()  # captures, launches, and the use of what is below
_streams: dict[int, list[torch.cuda.Stream]] = {}
# The end of the last launch. Graphs that were captured on one stream share what libraries keep for
# each stream, such as the workspace of cuBLAS, and so they must not run side by side.
_launched: dict[Place, _native.Event] = {}


def _order_after_launches(stream: _native.Stream | None, place: Place) -> None:
    """Let ``stream`` wait for all graphs of ``place`` so far. The lock is held."""
    last = _launched.get(place)
    if last is not None and stream is not None:
        stream.wait(last)  # site: graphs.after_other_launches


def _own_streams(place: Place, count: int) -> list[torch.cuda.Stream]:
    """Return streams that nobody else enqueues on; torch's pool hands each out many times."""
    streams = _streams.setdefault(place.index, [])
    while len(streams) < count:
        native = place.runtime.stream(place.index, "compute")
        streams.append(external_stream(native.handle, place.index))
    return streams[:count]


class Captured:
    """``n`` calls of ``fn`` and their copies, to be launched again and again.

    Attributes:
        results: where the items come to.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any] | None,
        x: torch.Tensor,
        n: int,
        compute_streams: int,
        dtype: torch.dtype | None,
        pool: PinnedPool,
        place: Place,
        forced: bool,
    ) -> None:
        """Warm up and capture. The caller's device is the current one, and ``x`` has content.

        Raises:
            NotCaptured: too large, unless ``forced``, or what ``fn`` does cannot be captured.
            Exception: what ``fn`` raised outside of the capture.
        """
        self._fn = fn
        self._x = x
        self._place = place
        self._flying: _native.Event | None = None
        with _one_at_a_time, torch.no_grad():
            streams = _own_streams(place, compute_streams + 1)
            copies, computes = streams[0], streams[1:]
            _order_after_launches(current_stream(place), place)
            self._order_after_caller(computes)
            try:
                self._warm_up(computes, n, dtype, pool, forced)
            except BaseException:
                self._order_caller_after(computes)
                raise
            groups = copy_groups(n, self.results.step)
            self._graph = _captured(
                lambda: self._issue(computes, copies, groups), computes[0], place
            )

    def _warm_up(
        self,
        computes: list[torch.cuda.Stream],
        n: int,
        dtype: torch.dtype | None,
        pool: PinnedPool,
        forced: bool,
    ) -> None:
        """Find out what the items are, make room for them, and compute on each stream."""
        fn, x = self._fn, self._x
        with torch.cuda.stream(computes[0]):
            first = self._item(x.mm(x) if fn is None else fn(x))
        self._shape, self._source_dtype = first.shape, first.dtype
        like = torch.empty(first.shape, dtype=dtype or first.dtype, device="meta")
        stride = dense_stride(first)
        del first
        nbytes = like.numel() * like.itemsize
        if not nbytes:
            raise NotCaptured("the items are empty")
        if not forced and not is_small(nbytes, n):
            raise NotCaptured(f"{n} items of {nbytes} bytes hide the cost of their calls")
        self.results = StaticResults(n, like, stride, pool)
        step = self.results.step
        template = torch.empty(0, dtype=torch.uint8, device=x.device)
        self._buffer = new_like((n * step,), (1,), template)
        self._items = carve(self._buffer, n, step, like, stride)
        # Each stream has a workspace of its own in cuBLAS, which must not be made in a capture.
        self._order_after_caller(computes)
        for stream in computes * _WARM_UPS:
            with torch.cuda.stream(stream):
                self._compute(0)
        for stream in computes:
            stream.synchronize()  # site: graphs.warm_before_capture

    def _order_after_caller(self, streams: list[torch.cuda.Stream]) -> None:
        current = torch.cuda.current_stream(self._place.index)
        for stream in streams:
            stream.wait_stream(current)  # site: graphs.after_caller

    def _order_caller_after(self, streams: list[torch.cuda.Stream]) -> None:
        """After an error: the memory that goes back to the caller's stream may still be in use."""
        current = torch.cuda.current_stream(self._place.index)
        for stream in streams:
            current.wait_stream(stream)  # site: graphs.caller_after_failure

    def _item(self, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise InvalidType(
                f"the fn of a Pipeline must give one tensor, not {type(value).__name__}"
            )
        item = plain_tensor(value)
        if item.device != self._x.device:
            raise NotCaptured(f"fn gave a tensor on {item.device}, not on {self._x.device}")
        return item

    def _compute(self, index: int) -> None:
        target = self._items[index]
        # Into its place, unless autocast or a conversion gives it another dtype on the way.
        if self._fn is None and self._source_dtype == self._x.dtype == target.dtype:
            torch.mm(self._x, self._x, out=target)
            return
        item = self._item(self._x.mm(self._x) if self._fn is None else self._fn(self._x))
        if item.shape != self._shape or item.dtype != self._source_dtype:
            raise InvalidArgument(
                f"fn gave shape {tuple(item.shape)} of {item.dtype}, and before shape "
                f"{tuple(self._shape)} of {self._source_dtype}: the items of a plan are alike"
            )
        target.copy_(item, non_blocking=True)

    def _issue(
        self, computes: list[torch.cuda.Stream], copies: torch.cuda.Stream, groups: list[int]
    ) -> None:
        """Enqueue everything, forked from ``computes[0]`` and joined there again."""
        origin = computes[0]
        for stream in [*computes[1:], copies]:
            stream.wait_stream(origin)  # site: graphs.fork
        begin, step = 0, self.results.step
        for size in groups:
            end = begin + size
            for index in range(begin, end):
                with torch.cuda.stream(computes[index % len(computes)]):
                    self._compute(index)
            for stream in computes:
                copies.wait_stream(stream)  # site: graphs.copy_after_items
            with torch.cuda.stream(copies):
                part = slice(begin * step, end * step)
                self.results.block[part].copy_(self._buffer[part], non_blocking=True)
            begin = end
        for stream in [*computes[1:], copies]:
            origin.wait_stream(stream)  # site: graphs.join

    def order(self, stream: _native.Stream) -> None:
        """Let ``stream`` wait for a launch that nobody has waited for."""
        if self._flying is not None:
            stream.wait(self._flying)  # site: graphs.order

    def run(self) -> None:
        """Launch on the current stream, and block until the results are there."""
        place, block = self._place, self.results.block
        stream = current_stream(place)
        assert stream is not None
        if place.checked:
            place.runtime.declare(stream, block.data_ptr(), block.nbytes, True)
        with _one_at_a_time:
            _order_after_launches(stream, place)
            with observe.graph(place):
                self._graph.replay()
            self._flying = stream.record()  # site: graphs.record_end
            _launched[place] = self._flying
        self._flying.synchronize()  # site: graphs.sync
        self._flying = None
        if place.checked:
            place.runtime.host_reads(block.data_ptr(), block.nbytes)

    def release(self) -> None:
        """Wait until nothing of it runs, so that it may be destroyed."""
        if _native.forked() or _native.closing():
            _leak(self._graph)  # its end is a call of the driver
        elif self._flying is not None:
            self._flying.synchronize()  # site: graphs.end_after_launch
            self._flying = None


def _leak(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _captured(
    issue: Callable[[], None], origin: torch.cuda.Stream, place: Place
) -> torch.cuda.CUDAGraph:
    """Return what ``issue`` enqueues as a graph; raise NotCaptured where it cannot be one."""
    memory = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    try:
        with _capture(graph, origin, memory):
            issue()
    except BaseException as error:
        _clear_up(graph, memory, origin, place)
        if not isinstance(error, Exception):
            raise
        raise NotCaptured(f"{type(error).__name__}: {error}") from error
    return graph


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph, origin: torch.cuda.Stream, memory: Any) -> Iterator[None]:
    # Not torch.cuda.graph: it waits for the device and empties torch's cache, and where the end of
    # a capture fails, it leaves its own stream the current one.
    with torch.cuda.stream(origin):
        graph.capture_begin(pool=memory, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            # The streams must leave the capture. That it is empty is no news then.
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph.capture_end()
            raise
        graph.capture_end()


def _clear_up(
    graph: torch.cuda.CUDAGraph, memory: Any, origin: torch.cuda.Stream, place: Place
) -> None:
    """Undo what a capture that failed leaves behind in torch.

    Its end throws before the allocator is told, which then goes on asking the graph where memory is
    to come from: the graph must live on. And random numbers on the device would be refused from
    here on, until some capture has ended well.
    """
    _leak(graph)
    with contextlib.suppress(RuntimeError):  # it was told
        torch._C._cuda_endAllocateToPool(place.index, memory)
    with contextlib.suppress(RuntimeError):  # nothing was ever begun
        torch._C._cuda_releasePool(place.index, memory)
    good = torch.cuda.CUDAGraph()
    with contextlib.suppress(RuntimeError), torch.cuda.stream(origin):
        word = torch.zeros(1, device=torch.device("cuda", place.index))
        with _capture(good, origin, torch.cuda.graph_pool_handle()):
            word.fill_(1)
