"""GEMMs (or any function) on the compute stream, their results on the way to the host meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from streamlap import _native, foreign, observe, watch
from streamlap.arrays import Tree, as_destination, as_source, check_matches, overlapping
from streamlap.checks import as_callable, as_count, as_dtype, as_flag, as_pin
from streamlap.devices import Place, StreamLike, as_stream, compute_on, current_stream, place_of
from streamlap.devices import require_no_capture as _require_no_capture
from streamlap.errors import InvalidArgument, InvalidType, PoolExhausted, UnsupportedTensor
from streamlap.group import Slot, TransferGroup
from streamlap.host_products import MULTIPLIED as MULTIPLIED_ON_HOST
from streamlap.host_products import host_products
from streamlap.lanes import Control, HostLane, InlineLane, Job, Lane, annotate
from streamlap.mapping import map_items
from streamlap.modes import CallerModes, on_worker
from streamlap.panels import as_panels, check_divides
from streamlap.pinned import PinnedPool, as_pool, pool_for
from streamlap.policy import policy
from streamlap.product import MULTIPLIED, ProductLane, square, usual_products
from streamlap.uncompiled import uncompiled

Fn = Callable[[Any], Any]


@uncompiled
def run(x: Any, n: int = 50, *, fn: Fn | None = None) -> list[Any]:
    """Compute ``fn(x)`` ``n`` times where ``x`` is; return the ``n`` results there.

    Args:
        x: a square matrix for the default ``fn``, else whatever ``fn`` takes.
        n: how often.
        fn: ``x.mm(x)`` if left out, which gives tensors. It runs under ``no_grad``.

    On a GPU the results are not finished when this returns, as with any torch operation; on a CPU
    they are.

    Raises:
        InvalidArgument, InvalidType: ``n`` is no count, ``x`` is not square for the default ``fn``.
        Exception: what ``fn`` raised, with ``.streamlap_index``.

    Stream order: on the caller's current stream. With a CuPy ``x`` and the default ``fn``, after
    what CuPy's current stream has been given, whose later work comes after the products.
    Thread-safe.
    """
    watch.enter()
    count = as_count(n, "n")
    given = checked_x(x, fn, 0)
    compute = square if fn is None else as_callable(fn, "fn")
    results = []
    with torch.no_grad(), _lent_to_torch(given):
        for index in range(count):
            try:
                with observe.compute(given.place, index):
                    results.append(compute(given.argument))
            except BaseException as error:
                annotate(error, index)
                raise
    return results


@uncompiled
def parallel_run(xs: Sequence[Any], n: int = 50, *, fn: Fn | None = None) -> list[list[Any]]:
    """Run :func:`run` for each of ``xs`` at once, each on its own device.

    Args:
        xs: inputs, usually one a device; CPU tensors are spread over logical devices in order.
        n: how often each.
        fn: as for :func:`run`.

    Returns:
        A list for each input, as :func:`run` gives it.

    Raises:
        As :func:`run`.

    Stream order: on the caller's current streams, as :func:`run`. Thread-safe.
    """
    watch.enter()
    count = as_count(n, "n")
    if not isinstance(xs, (list, tuple)):
        raise InvalidType(f"parallel_run takes a list of inputs, not {type(xs).__name__}")
    compute = square if fn is None else as_callable(fn, "fn")
    checked = [checked_x(x, fn, position) for position, x in enumerate(xs)]
    results: list[list[Any]] = [[] for _ in checked]
    here = on_worker()
    inline = [lane for lane, given in enumerate(checked) if given.place.is_cuda or here]
    workers = [lane for lane in range(len(checked)) if lane not in inline]
    modes = CallerModes()
    slots = []
    control = Control()

    def work(lane: int, slot: Slot) -> None:
        error: BaseException | None = None
        for index in range(count):
            if control.stopped:
                break
            try:
                with observe.compute(checked[lane].place, index):
                    results[lane].append(modes.run(compute, checked[lane].argument))
            except BaseException as raised:
                error = annotate(raised, index)
                control.stop(error)
                break
        slot.fill(None, error or _Finished())

    try:
        for lane in workers:
            slot = Slot()
            compute_on(
                checked[lane].place,
                functools.partial(work, lane, slot),
                functools.partial(slot.fill, None),
            )
            slots.append(slot)
        with torch.no_grad(), contextlib.ExitStack() as lent:
            for lane in inline:
                lent.enter_context(_lent_to_torch(checked[lane]))
            for index in range(count):
                for lane in inline:
                    try:
                        with observe.compute(checked[lane].place, index):
                            results[lane].append(compute(checked[lane].argument))
                    except Exception as raised:
                        annotate(raised, index)
                        raise
        for slot in slots:
            with contextlib.suppress(_Finished):
                slot.get()  # site: pipeline.wait_for_results
    except BaseException as error:
        control.stop()
        if not isinstance(error, KeyboardInterrupt):
            for slot in slots:
                # the item that a worker is at is finished, nothing runs on
                slot.settle()  # site: pipeline.wait_for_workers
        control.forget()
        raise
    return results


class _Finished(BaseException):
    """Not an error: a worker has no transfer to deliver."""


@uncompiled
def pipelined_run(
    x: Any,
    n: int = 50,
    *,
    fn: Fn | None = None,
    out: Any = None,
    depth: int | None = None,
    pin: bool | None = None,
    dtype: torch.dtype | None = None,
    panels: int | str | None = None,
    wait: bool = True,
    pool: PinnedPool | None = None,
) -> Any:
    """Compute ``fn(x)`` ``n`` times and bring all results to the host meanwhile.

    Args:
        x: a tensor, CuPy or NumPy array, or anything on a device with DLPack. A list of them runs
            on all their devices at once and gives a list of lists.
        n: how often ``fn`` is called, exactly.
        fn: ``x.mm(x)`` (``x`` square) if left out. On a GPU it is called in this thread on the
            current stream, under ``no_grad``; for CPU tensors on a worker thread with the caller's
            gradient, inference and autocast modes. It must give a fresh result each time.
        out: where results go: ``n`` tensors or arrays, or one with leading dimension ``n``; for a
            list of ``x`` a list of these.
        depth: how many results may be on the device at once; None: as :func:`configure` says, 4 if
            it was not called.
        pin: results in page-locked memory (True), in ordinary memory (False), or (None) in
            page-locked memory as far as the pool's limit allows and then in ordinary memory.
        dtype: convert results to this dtype on the device.
        panels: into how many row panels the product of one item is cut, each copied as soon as it
            is there. None: as :func:`configure` says, "auto" if it was not called. "auto": 4, for
            the last item, from 8 MiB an item on, where copies wait for products. A number,
            which must divide the rows of ``x``: so many, for the last; 1: none. Only the default
            ``fn`` on one GPU, in a call without ``out``, ``depth``, ``dtype``, ``pool``,
            ``pin=False`` or ``wait=False``, is cut, and only once an earlier call has found that
            panels of this shape give the same bits.
        wait: False returns a :class:`Transfer` of ``n`` items as soon as everything is issued
            (GPU; it may wait for room) or at once (CPU).
        pool: where pinned memory comes from.

    Returns:
        A list of ``n`` host tensors, ready to read; NumPy arrays for CuPy and NumPy input.

    Raises:
        InvalidArgument, InvalidType: an argument that makes no sense. Nothing was enqueued.
        PoolExhausted: with ``pin=True``, the results do not fit the pool's limit.
        SourceModified: ``fn`` wrote to a result that it had given before.
        Exception: what ``fn`` raised, the original object, with ``.streamlap_index``. What was in
            flight was waited for, and every buffer given back.

    Stream order: everything starts after the work that the current stream has been given. For a
    CuPy ``x`` that is CuPy's current stream on the device of ``x``, and the default product runs
    there, whatever torch's current stream is (with CuPy's per-thread default stream it runs on
    torch's current stream, after CuPy's); a ``fn`` of your own runs on the current stream of
    the library that it calls.

    Thread-safe. The device holds at most ``depth`` results; of default products no larger than
    ``policy().tiny_item_bytes`` as many as fit ``depth`` times that size, and groups of them share
    a block of pinned memory. For CPU tensors, pipelines on one logical device take turns on its one
    worker; so ``fn`` must not wait for a thread that itself runs a pipeline there (``fn`` itself
    may run one).
    """
    panels = as_panels(panels)
    if fn is None and out is None and dtype is None and wait is True:
        products = usual_products(x, n, depth, pin, pool, policy().depth, panels)
        if products is not None:
            return products
        if not panels or panels == 1:
            on_host = host_products(x, n, depth, pin, pool)
            if on_host is not None:
                return on_host
    watch.enter()
    many = isinstance(x, (list, tuple))
    inputs = list(x) if many else [x]
    count = as_count(n, "n")
    limit = as_depth(depth)
    pin, dtype, pool, wait = as_pin(pin), as_dtype(dtype), as_pool(pool), as_flag(wait, "wait")
    compute = square if fn is None else as_callable(fn, "fn")
    checked = [checked_x(item, fn, position) for position, item in enumerate(inputs)]
    _check_panels(panels, fn, checked)
    outs = _checked_outs(out, many, count, [given.argument for given in checked], fn, dtype)
    pinned = pin is not False
    fits = True
    if fn is None and out is None and pinned:
        try:
            _check_room(checked, count, dtype, pool)
        except PoolExhausted:
            if pin:
                raise
            fits = False

    control = Control()
    modes: CallerModes | None = None
    lanes: list[Lane] = []
    for given, lane_out in zip(checked, outs, strict=True):
        place = given.place
        job = Job(
            *(compute, given.argument, fn is None, given.as_numpy, limit, pin, dtype, pool, place),
            *(_own_stream(given) if fn is None else None, given.stream is not None),
        )
        if place.is_cuda or on_worker():
            stream = job.stream or current_stream(place)
            _require_no_capture(stream, "pipelined_run()")
            _require_no_capture(given.stream, "pipelined_run()")  # fn may use it
            usual = fn is None and lane_out is None and dtype is None and pinned and fits
            if stream is not None and usual:
                lanes.append(ProductLane(job, control, stream, count, timed=not wait))
            else:
                lanes.append(InlineLane(job, lane_out, control))
        else:
            modes = modes or CallerModes()
            lanes.append(HostLane(job, lane_out, control, modes, count))
    try:
        for lane in lanes:
            lane.start()
        with torch.no_grad():
            for index in range(count):
                for lane in lanes:
                    lane.issue(index)
        if not wait:
            for lane in lanes:
                lane.all_issued()
            groups = [TransferGroup(lane.slots, lane.read_source) for lane in lanes]
            return _bundle(groups) if many else groups[0]
        results = [lane.collect() for lane in lanes]
    except BaseException as error:
        control.stop(error)
        for lane in lanes:
            lane.fail(error)
        control.forget()
        raise
    return results if many else results[0]


def _bundle(groups: list[TransferGroup]) -> TransferGroup:
    slots = []
    for group in groups:
        slot = Slot()
        slot.fill(group)
        slots.append(slot)

    def read_source(stream: StreamLike) -> None:
        del stream  # each group has done it for itself

    return TransferGroup(slots, read_source)


@uncompiled
def pipelined_map(
    fn: Fn,
    items: Iterable[Any],
    depth: int | None = None,
    *,
    pin: bool | None = None,
    dtype: torch.dtype | None = None,
    pool: PinnedPool | None = None,
) -> Generator[Tree, None, None]:
    """Yield ``fn(item)`` on the host for each item, in order, computing ahead meanwhile.

    Args:
        fn: called once an item, in order. Items with CPU tensors are computed on a worker thread,
            everything else in the consumer's thread on its current stream.
        items: any iterable; it is advanced in the consumer's thread, at most ``depth`` items ahead.
        depth: how many items are in flight; it bounds device and pinned memory. None: as for
            :func:`pipelined_run`.
        pin, dtype, pool: as for :func:`pipelined_run`.

    Yields:
        Host tensors (or trees of them), ready to read.

    Raises:
        InvalidArgument, InvalidType: at the call, not at the first item.
        Exception: what ``fn`` or ``items`` raised, at that item's turn, with ``.streamlap_index``.

    A consumer that stops early (``close()``, ``break``) loses nothing: what is in flight is waited
    for, and every buffer is given back. One thread at a time may advance it.
    """
    watch.enter()
    limit = as_depth(depth)
    pin, dtype, pool = as_pin(pin), as_dtype(dtype), as_pool(pool)
    compute = as_callable(fn, "fn")
    try:
        iterator: Iterator[Any] = iter(items)
    except TypeError as error:
        raise InvalidType(f"items must be iterable, not {type(items).__name__}") from error
    return map_items(compute, iterator, limit, pin, dtype, pool)


# -- checks


def as_depth(depth: int | None) -> int:
    """Return the ``depth`` argument; None: the policy's."""
    return policy().depth if depth is None else as_count(depth, "depth", 1)


def _check_panels(panels: int | None, fn: Fn | None, checked: list[_Input]) -> None:
    if fn is None:
        for given in checked:
            check_divides(panels, given.argument.shape[0])
    elif panels is not None and panels > 1:
        raise InvalidArgument(f"panels={panels} concerns the default fn only")


class _Input(NamedTuple):
    """An ``x``: what ``fn`` is given, whether results are NumPy arrays, and where it runs.

    ``stream`` is CuPy's current one for a CuPy array on a GPU, else None.
    """

    argument: Any
    as_numpy: bool
    place: Place
    stream: _native.Stream | None


def _own_stream(given: _Input) -> _native.Stream | None:
    """Return the stream on which the default product of a CuPy array runs; None: torch's."""
    if given.stream is None or given.stream.handle != foreign.PER_THREAD:
        return given.stream
    # Products need memory, see foreign.PER_THREAD.
    current = current_stream(given.place)
    assert current is not None
    _require_no_capture(given.stream, "pipelined_run()")
    _require_no_capture(current, "pipelined_run()")
    current.wait(given.stream.record())  # site: pipeline.product_after_cupy
    return None


@contextlib.contextmanager
def _lent_to_torch(given: _Input) -> Iterator[None]:
    """Let torch's current stream read a CuPy array: after CuPy's work, and before what follows."""
    current = current_stream(given.place)
    if given.stream is None or current is None or not isinstance(given.argument, torch.Tensor):
        yield
        return
    _require_no_capture(given.stream, "run()")
    current.wait(given.stream.record())  # site: pipeline.run_after_cupy
    try:
        yield
    finally:
        given.stream.wait(current.record())  # site: pipeline.cupy_after_run


def checked_x(x: Any, fn: Fn | None, position: int) -> _Input:
    """Return an ``x`` as the pipelines need it."""
    source = as_source(x)
    if source is None:
        raise InvalidType(f"x must be a tensor or an array on a device, not {type(x).__name__}")
    tensor = source.tensor
    place = place_of(tensor.device, position)
    stream = as_stream(source.stream, place) if source.stream is not None else None
    if fn is not None:
        return _Input(x, source.as_numpy, place, stream)
    if tensor.ndim != 2 or tensor.shape[0] != tensor.shape[1]:
        raise InvalidArgument(
            f"x must be a square matrix for the default fn, x.mm(x), not {tuple(tensor.shape)}; "
            "pass fn for anything else"
        )
    _check_multiplies(tensor)
    return _Input(tensor, source.as_numpy, place, stream)


def _check_multiplies(x: torch.Tensor) -> None:
    """Refuse dtypes that torch has no product for, before the first item."""
    if x.dtype not in (MULTIPLIED if x.is_cuda else MULTIPLIED_ON_HOST):
        raise UnsupportedTensor(f"torch multiplies no matrices of {x.dtype} on {x.device}")


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of ``x.mm(x)`` here, under autocast or not."""
    kind = x.device.type
    if x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _checked_outs(
    out: Any, many: bool, n: int, xs: list[Any], fn: Fn | None, dtype: torch.dtype | None
) -> list[list[Any] | None]:
    if out is None:
        return [None] * len(xs)
    if many and (not isinstance(out, (list, tuple)) or len(out) != len(xs)):
        raise InvalidArgument(f"out must be a list of {len(xs)}, one for each x")
    lanes: list[list[Any] | None] = []
    every: list[torch.Tensor] = []
    for lane_out, x in zip(out if many else [out], xs, strict=True):
        if isinstance(lane_out, (list, tuple)):
            items = list(lane_out)
        else:
            whole = as_destination(lane_out, "out")
            if whole.ndim == 0 or whole.shape[0] != n:
                raise InvalidArgument(
                    f"out must be {n} tensors or one of leading dimension {n}, "
                    f"not of shape {tuple(whole.shape)}"
                )
            items = list(lane_out)
        if len(items) != n:
            raise InvalidArgument(f"out has {len(items)} items, not {n}")
        for index, item in enumerate(items):
            tensor = as_destination(item, f"out[{index}]")
            if tensor.device.type != "cpu":
                raise InvalidArgument(f"out[{index}] is on {tensor.device}, not on the host")
            if fn is None:
                check_matches(tensor, x.shape, dtype or product_dtype(x), f"out[{index}]")
            every.append(tensor)
        lanes.append(items)
    pair = overlapping(every)
    if pair is not None:
        raise InvalidArgument(f"out[{pair[0]}] and out[{pair[1]}] overlap in memory")
    for x in xs:
        source = as_source(x)
        if source is not None and any(overlapping([x_out, source.tensor]) for x_out in every):
            raise InvalidArgument("out overlaps x in memory")
    return lanes


def _check_room(
    checked: list[_Input],
    n: int,
    dtype: torch.dtype | None,
    pool: PinnedPool | None,
) -> None:
    """Refuse results that can never fit, before the first product."""
    counts: dict[tuple[PinnedPool, int], int] = {}
    for given in checked:
        tensor = given.argument
        key = (
            pool or pool_for(given.place),
            tensor.numel() * (dtype or product_dtype(tensor)).itemsize,
        )
        counts[key] = counts.get(key, 0) + n
    # Inputs of different sizes are judged one size at a time; the rest shows when it is reached.
    for (target, nbytes), count in counts.items():
        if nbytes and not target._has_room(nbytes, count):
            live, limit = target.live, target.limit
            raise PoolExhausted(
                f"{count} results of {nbytes} bytes need more pinned memory than there is: {live} "
                f"of the pool's {limit} bytes are held. Drop results, raise the limit "
                "(STREAMLAP_PINNED_LIMIT), or pass out= or pin=False",
                live,
                limit,
            )
