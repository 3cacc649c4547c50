"""Page-locked memory as tensors: pools with a hard limit, and tensors that own their block."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Sequence

import torch

from streamlap import _native, observe, watch
from streamlap.checks import LARGEST, as_count, as_dtype, as_flag
from streamlap.devices import (
    Place,
    StreamLike,
    as_stream,
    cuda_place,
    cuda_runtime,
    parse_device,
    place_of,
)
from streamlap.errors import InvalidArgument, InvalidType, PoolExhausted
from streamlap.policy import policy
from streamlap.serving import current
from streamlap.sizes import default_pinned_limit, parse_size
from streamlap.uncompiled import uncompiled

AHEAD_BYTES = 8 << 20
"""Less than this grows sooner than a thread gets going."""


class PinnedPool:
    """A pool of page-locked memory with a hard limit.

    Blocks come back when the last tensor on them is gone *and* every event that used them is done.
    Sizes are rounded up by at most 12.5 % from 4 KiB up; smaller ones take 4 KiB. A block is never
    smaller than what was asked for. On a machine without a GPU it is ordinary memory, handled the
    same way.

    Args:
        limit: bytes that may be reserved, as an int or a string like ``"2GiB"``. ``None``: a
            quarter of the memory, divided by ``LOCAL_WORLD_SIZE``; ``STREAMLAP_PINNED_LIMIT``
            overrides.

    Raises:
        InvalidArgument: a limit that is no size, or below the smallest block (4 KiB).

    Thread-safe. Blocks are not sorted by NUMA node: on a machine with several, run one process per
    node under ``numactl`` to keep copies local.
    """

    def __init__(self, limit: int | str | None = None) -> None:
        self._given = None if limit is None else parse_size(limit, "limit")
        if self._given is not None and self._given < _native.Pool.smallest_block:
            raise InvalidArgument(
                f"a pool limit of {self._given} bytes is below the smallest block "
                f"({_native.Pool.smallest_block} bytes)"
            )
        self._lock = threading.Lock()
        self._native: _native.Pool | None = None
        self._runtime: _native.Runtime | None = None  # None: whose serves at the first use
        self._spilled = 0

    @classmethod
    def _of(cls, runtime: _native.Runtime) -> PinnedPool:
        """Return a pool of one runtime's memory."""
        made = cls()
        made._runtime = runtime
        return made

    def _pool(self) -> _native.Pool:
        _native.require_usable()
        if self._native is None:
            runtime = self._runtime or current.get().pool._runtime
            assert runtime is not None
            with self._lock:
                if self._native is None:
                    limit = self._given if self._given is not None else default_pinned_limit()
                    self._native = _native.Pool(runtime, limit, policy().slab_bytes)
        return self._native

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised pinned tensor of this pool; see :func:`empty_pinned`."""
        sizes = _as_shape(shape)
        wanted = as_dtype(dtype, convert=False) or torch.get_default_dtype()
        count = math.prod(sizes)
        as_count(max(count, 1) * wanted.itemsize, "the bytes of the tensor")
        return self._new(sizes, wanted, None, count)

    def _new(
        self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None, count: int
    ) -> torch.Tensor:
        """Return a tensor of ``count`` elements without checks.

        ``stride``, in elements, must be dense and without overlap; None: contiguous.
        """
        if count == 0:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            return tensor if stride is None else tensor.as_strided(shape, stride)
        return view_of(self._allocate(count * dtype.itemsize), shape, dtype, stride)

    def _new_or_none(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None,
        count: int,
        pin: bool | None,
    ) -> torch.Tensor | None:
        """As :meth:`_new`; None past the limit, unless ``pin`` insists on pinned memory."""
        try:
            return self._new(shape, dtype, stride, count)
        except PoolExhausted:
            if pin:
                raise
        with self._lock:
            self._spilled += 1
        _warn_once(self.limit)
        return None

    def _allocate(self, nbytes: int) -> _native.Block:
        recorder = observe.recorder
        if recorder is None:
            return self._take(nbytes)
        begin = recorder.now()
        block = self._take(nbytes)
        if block.fresh:
            recorder.grew(nbytes, begin)
        return block

    def _take(self, nbytes: int) -> _native.Block:
        pool = self._pool()
        if nbytes > LARGEST:
            raise PoolExhausted(f"{nbytes} bytes are more than any pool has", pool.live, pool.limit)
        try:
            return pool.allocate(nbytes)
        except PoolExhausted:
            if not self._refresh_limit():
                raise
            return pool.allocate(nbytes)

    def _has_room(self, nbytes: int, count: int) -> bool:
        """Return whether ``count`` blocks for ``nbytes`` can ever be had beside what is held."""
        pool = self._pool()
        if nbytes > LARGEST:
            return False
        return pool.has_room(nbytes, count) or (
            self._refresh_limit() and pool.has_room(nbytes, count)
        )

    def _grow_ahead(self, nbytes: int, count: int) -> _native.Growth | None:
        """Begin to make ``count`` blocks for ``nbytes`` in the background, if that is worth it.

        Whoever asks for one of them meanwhile waits for the next. To be cancelled, if not None,
        when the caller needs no more.
        """
        return self._pool().grow_ahead(nbytes, count) if nbytes * count >= AHEAD_BYTES else None

    def _prewarm(self, nbytes: int, count: int, wait: bool) -> None:
        self._has_room(nbytes, count)  # for the limit that it refreshes
        growth = self._pool().prewarm(nbytes, count)
        if growth is None or not wait:
            return
        try:
            growth.wait()  # site: pinned.prewarm
        except BaseException:
            growth.cancel()
            raise

    def _refresh_limit(self) -> bool:
        """Raise a default limit if the machine's memory has grown, as virtual machines' does.

        Returns whether the limit was raised.
        """
        pool = self._pool()
        if self._given is not None:
            return False
        limit = default_pinned_limit()
        if limit <= pool.limit:
            return False
        pool.limit = limit
        return True

    @property
    def live(self) -> int:
        """Bytes in blocks that are held."""
        return self._pool().live

    @staticmethod
    def _block_bytes(nbytes: int) -> int:
        """Return the bytes that a block for ``nbytes`` takes of the limit."""
        return _native.Pool.size_class(nbytes)

    @property
    def limit(self) -> int:
        """The limit in bytes."""
        return self._pool().limit

    def stats(self) -> dict[str, int]:
        """Return the pool's figures, all taken at one moment.

        Bytes: ``limit``, ``reserved`` (= ``live`` + ``in_flight`` + ``cached`` + ``growing``),
        ``live`` (held), ``in_flight`` (let go, work not done), ``cached`` (ready for reuse),
        ``growing`` (being reserved), ``waste`` (rounding of what is held), ``peak`` (most ever
        reserved); of a default pool also ``staging`` (slots for ordinary memory, beside the limit).
        Counts: ``live_blocks``, ``slabs`` (reservations, each of one block or of several that are
        smaller than 1 MiB), ``hits``, ``misses``, and ``spilled``: results that went to ordinary
        memory because of the limit.
        """
        stats = self._pool().stats() | {"spilled": self._spilled}
        if self._runtime is not None:
            stats["staging"] = _native.engine(self._runtime).staging_bytes()
        return stats

    def trim(self) -> int:
        """Give cached memory back to the system; return the bytes given back.

        Small blocks (below 1 MiB) share a reservation, which stays while one of them is in use.
        """
        freed = 0 if self._native is None else self._native.trim()
        if self._runtime is not None:
            freed += _native.engine(self._runtime).trim_staging()
        return freed

    def __repr__(self) -> str:
        if self._native is None:
            return "PinnedPool(unused)"
        stats = self.stats()
        return f"PinnedPool(limit={stats['limit']}, live={stats['live']}, cached={stats['cached']})"


def view_of(
    block: _native.Block,
    shape: Sequence[int],
    dtype: torch.dtype,
    stride: Sequence[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """Return a tensor of at least one element that owns a block, from ``offset`` (bytes) on.

    ``stride`` is that of a dense tensor; None: contiguous.
    """
    flat = torch.frombuffer(block, dtype=dtype, count=math.prod(shape), offset=offset)
    if stride is not None:
        return flat.as_strided(shape, stride)
    return flat if len(shape) == 1 else flat.view(shape)  # a view costs as much as the block


def views_of(
    block: _native.Block,
    shapes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    offsets: list[int],
    has_empty: bool,
) -> list[torch.Tensor]:
    """Return tensors carved out of one block, each from its offset (bytes) on.

    Offsets are multiples of the elements' sizes. One without elements has memory of its own. Where
    there is a row of what they will be, its ``made_in`` does the same in a third of the time.
    """
    room = block.nbytes
    flats = {
        dtype: torch.frombuffer(block, dtype=dtype, count=room // dtype.itemsize)
        for dtype in set(dtypes)
        if dtype.itemsize <= room
    }
    if len(flats) == 1 and not has_empty:  # no line of Python a leaf
        ((dtype, flat),) = flats.items()
        size = dtype.itemsize
        return list(map(flat.as_strided, shapes, strides, [offset // size for offset in offsets]))
    return [
        flats[dtype].as_strided(shape, stride, offset // dtype.itemsize)
        if math.prod(shape)
        else torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        for shape, stride, dtype, offset in zip(shapes, strides, dtypes, offsets, strict=True)
    ]


_warned = False


def _warn_once(limit: int) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"the pinned pool's limit of {limit} bytes is reached: more results go to ordinary memory, "
        "which is slower. Drop results or raise the limit (STREAMLAP_PINNED_LIMIT); pin=True "
        "raises PoolExhausted instead. This is said once in a process",
        RuntimeWarning,
        stacklevel=2,
    )


def pool_for(place: Place) -> PinnedPool:
    """Return the default pool for results of ``place``."""
    return place.pool


def _as_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(shape, (list, tuple)):
        return tuple(as_count(size, "a size in shape") for size in shape)
    if hasattr(shape, "__index__"):
        return (as_count(shape, "shape"),)
    raise InvalidType(f"shape must be an int or a list of ints, not {shape!r}")


def as_pool(pool: object) -> PinnedPool | None:
    """Return the ``pool`` argument."""
    if pool is not None and not isinstance(pool, PinnedPool):
        raise InvalidType(f"pool must be a PinnedPool, not {type(pool).__name__}")
    return pool


@uncompiled
def empty_pinned(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    pool: PinnedPool | None = None,
) -> torch.Tensor:
    """Return an uninitialised contiguous tensor in page-locked memory.

    Args:
        shape: an int or a sequence of ints.
        dtype: torch's default dtype if left out.
        pool: where the memory comes from; the process's own pool if left out.

    Raises:
        PoolExhausted: the limit would be exceeded by what is held; it waits only for blocks whose
            work is in flight.
        InvalidArgument, InvalidType: a shape or dtype that is none.

    The tensor and its views own the block. When the last one dies, the block is reused after the
    work that torch's current streams have been given by then, in the thread where it dies; work on
    other streams is declared with :func:`record_use`. A Transfer that is in flight may outlive the
    tensor and let go of the block elsewhere. Thread-safe.
    """
    watch.enter()
    return (as_pool(pool) or current.get().pool).empty(shape, dtype)


@uncompiled
def prewarm(
    nbytes: int | str,
    *,
    block: int | str | None = None,
    pool: PinnedPool | None = None,
    wait: bool = True,
) -> None:
    """Reserve page-locked memory now, so that later results find it in the pool.

    Afterwards ``nbytes`` in blocks of the size ``block`` are ready for reuse, or in use by work in
    flight; what lay ready before counts. A block serves requests of about its own size only: for
    50 results of 64 MB that is ``prewarm(50 * 64_000_000, block=64_000_000)``.

    Args:
        nbytes: bytes in all, rounded up to whole blocks; an int or a string like ``"3GiB"``.
        block: bytes of one block; all of it in one if left out.
        pool: which pool; the process's own if left out.
        wait: False returns at once, and threads of the pool's own do it. Whoever asks for such a
            block meanwhile waits for the next one. Memory that the system refuses is then not
            reserved, without an error; who needs it tries again.

    Raises:
        PoolExhausted: it does not fit the limit beside what is held. Nothing was reserved.
        OutOfMemory: the system refused memory. What it had given stays in the pool.
        InvalidArgument, InvalidType: sizes that are none, or a block larger than ``nbytes``.

    Thread-safe. The interpreter's lock is released, and Ctrl-C ends the wait and what is not begun.
    Without a GPU it is ordinary memory: addresses are reserved, and pages come when written to.
    """
    watch.enter()
    total = as_count(parse_size(nbytes, "nbytes"), "nbytes", 1)
    size = total if block is None else as_count(parse_size(block, "block"), "block", 1)
    if size > total:
        raise InvalidArgument(f"block ({size} bytes) is larger than nbytes ({total} bytes)")
    (as_pool(pool) or current.get().pool)._prewarm(size, -(-total // size), as_flag(wait, "wait"))


@uncompiled
def record_use(tensor: torch.Tensor, stream: StreamLike) -> None:
    """Declare that work enqueued on ``stream`` so far uses a pinned tensor's memory.

    Its block is not reused before that work is done, however soon the tensor dies.

    Args:
        tensor: any view of a tensor of streamlap's pinned memory.
        stream: a stream of torch, CuPy or numba, a raw handle, or streamlap's own.

    Raises:
        InvalidArgument: the tensor is not in a pinned pool.

    Thread-safe.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        raise InvalidType("record_use needs a tensor in pinned memory")
    if isinstance(stream, _native.Stream):
        native = stream
    else:
        if stream is None:
            raise InvalidType("record_use needs the stream that uses the tensor")
        cuda_runtime()
        resolved = as_stream(stream, cuda_place(torch.cuda.current_device()))
        assert resolved is not None
        native = resolved
    if tensor.numel() == 0:
        return
    address = tensor.data_ptr()
    if not _native.record_use(address, native):  # site: pinned.record_use
        raise InvalidArgument("the tensor is not in memory of a pinned pool")


def pool_stats(device: str | int | torch.device | None = None) -> dict[str, int]:
    """Return the figures of the process's own pool: see :meth:`PinnedPool.stats`.

    ``staging`` is beside the limit: bytes in the rings that copies to and from ordinary memory go
    through, at most 64 MiB for each device and direction.

    Args:
        device: ``"cpu"`` or a CUDA device: the pool that serves it; None: the one that
            :func:`empty_pinned` uses.

    Raises:
        InvalidArgument: no such device.

    Thread-safe.
    """
    if device is None:
        return current.get().pool.stats()
    return pool_for(place_of(parse_device(device))).stats()
