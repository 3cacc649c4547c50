"""The last product of a pipeline, cut into row panels that are copied one by one.

Compute-bound, nothing hides the last copy: with its product cut, all but a panel of it is hidden.
The other items stay whole, since each panel costs a launch and a copy. Copy-bound, it is the first
product that nothing hides. Cut, it would send its first panel sooner by three quarters of its own
time, 0.24 ms of 58 in TF32; but the calls for a panel and its copy take 0.1 to 0.3 ms on the cold
caches that a host has then. On four machines with an H200, cutting it by hand gained between
0.4 % and nothing in TF32, here at best nothing; in bfloat16 it cost 0.3 %. So nothing is cut.

A panel may be computed by another kernel than the whole product, with another order of summation.
So panels are used only where they are known to give the same bits: once for everything that the
choice of a kernel depends on (``Key``), both are computed from random numbers and compared. That
is enqueued at the end of a call, after its results are there, and its outcome is read by the first
call that finds it done; no call waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from streamlap import _native
from streamlap.batch import WHOLE
from streamlap.checks import as_count
from streamlap.devices import Place
from streamlap.errors import InvalidArgument, InvalidType
from streamlap.pinned import PinnedPool
from streamlap.policy import policy

PANELS = 4
"""How many by default: where the rows of a product are dealt out to a GPU's processors in waves,
four panels needed no more waves than the whole in the sizes measured; 5, 8 and 10 did, and gave
other bits in fp32."""

LEAST_BYTES = 8 << 20
"""Of an item; below, what the panels of one item can save (0.1 ms) is what their calls cost."""

ALIGNMENT = 256
"""Bytes: torch's memory on a device is aligned to so many or more, the same memory cut is not."""

Key = tuple[Any, ...]


def as_panels(value: object) -> int | None:
    """Return the ``panels`` argument; None: the policy's, 0: decided here.

    Raises:
        InvalidType: neither None, "auto" nor an int.
        InvalidArgument: less than 1.
    """
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        return 0
    if isinstance(value, str):
        raise InvalidType(f"panels must be an int, 'auto' or None, not {value!r}")
    return as_count(value, "panels", 1)


def check_divides(panels: int | None, rows: int) -> None:
    """Raise InvalidArgument where ``rows`` cannot be cut into so many equal panels."""
    if panels and (panels > max(rows, 1) or rows % panels):
        raise InvalidArgument(f"panels={panels} does not divide the {rows} rows of x")


def resolved(panels: int | None, rows: int) -> int:
    """Return how many panels are asked for, by the argument or by the policy; 0: decided here."""
    if panels is not None:
        return panels
    usual = policy().panels
    if isinstance(usual, str):
        return 0
    return usual if rows % usual == 0 else 1


def wanted(panels: int, rows: int, nbytes: int) -> int:
    """Return how many panels an end of ``rows`` and ``nbytes`` should have; 1: stay whole."""
    if panels:
        return panels
    return PANELS if nbytes >= LEAST_BYTES and rows % PANELS == 0 else 1


class _Native(Protocol):
    """What the pipeline needs of an item's transfer."""

    def sync(self, timeout: float | None = None, reads: bool = True) -> bool: ...
    def wait_on_stream(self, stream: _native.Stream) -> None: ...
    def release_source(self) -> None: ...


class Panelled:
    """The transfers of one item's panels, used as one: they follow each other on one stream."""

    def __init__(self, parts: Sequence[_Native]) -> None:
        self._parts = parts

    def sync(self, timeout: float | None = None, reads: bool = True) -> bool:
        """Block until all of them are done."""
        return all(part.sync(timeout, reads) for part in self._parts)  # site: panels.sync

    def wait_on_stream(self, stream: _native.Stream) -> None:
        """Let ``stream`` wait for all of them."""
        self._parts[-1].wait_on_stream(stream)  # site: panels.wait_on_stream

    def release_source(self) -> None:
        """Let go of the product."""
        for part in self._parts:
            part.release_source()  # site: panels.release_source


def panel_rows(rows: int, panels: int) -> list[slice]:
    """Return the rows of each panel."""
    step = rows // panels
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


def _getters() -> list[Callable[[], object]]:
    names = (
        "_get_cublas_allow_tf32",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_deterministic_algorithms",
        "_get_blas_preferred_backend",
    )
    getters = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
    newer = getattr(torch._C, "_get_fp32_precision_getter", None)  # since torch 2.9
    return getters if newer is None else [functools.partial(newer, "cuda", "matmul"), *getters]


_SETTINGS = _getters()


def key_of(x: torch.Tensor, panels: int) -> Key | None:
    """Return everything that the choice of a product's kernel depends on; None: torch won't say."""
    try:
        settings = [get() for get in _SETTINGS]
    except RuntimeError:  # where its old and new names of a setting were mixed
        return None
    return (x.device, x.shape[0], x.dtype, panels, *settings)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    return tensor.view(sizes[tensor.itemsize])


def cut_product(x: torch.Tensor, panels: int) -> torch.Tensor:
    """Return ``x.mm(x)``, computed in row panels."""
    product = x.new_empty(x.shape)
    for rows in panel_rows(x.shape[0], panels):
        torch.mm(x[rows], x, out=product[rows])
    return product


def enqueue_comparison(
    x: torch.Tensor, panels: int, stream: _native.Stream
) -> tuple[torch.Tensor, _native.Event]:
    """Compare both ways to compute, with random numbers in place of ``x``.

    The content of ``x`` itself may hide a difference: sums of small integers are exact in any
    order. ``stream`` is the current one.

    Returns:
        Whether they differ, as a tensor on the host, and the event after which it may be read.
    """
    generator = torch.Generator(x.device).manual_seed(1)  # not the user's random numbers
    sample = torch.empty_like(x).normal_(generator=generator)
    differ = torch.ne(_bits(sample.mm(sample)), _bits(cut_product(sample, panels))).any()
    answer = torch.empty((), dtype=torch.bool, pin_memory=x.is_cuda)
    answer.copy_(differ, non_blocking=True)
    event = stream.record()  # site: panels.record_answer
    return answer, event


class _Known:
    """What was found out about one key.

    Attributes:
        copies_last: copies took longer than products in the last call; None: it is not known.
    """

    def __init__(self) -> None:
        self.copies_last: bool | None = None
        self._same: bool | None = None
        self._asked: tuple[torch.Tensor, _native.Event] | None = None
        self._lock = threading.Lock()

    def same_bits(self) -> bool:
        """Return whether panels are known to give the same bits; never waits for a device."""
        if self._asked is not None:
            with self._lock:
                if self._asked is not None and self._asked[1].done():
                    self._same = not bool(self._asked[0])
                    self._asked = None
        return self._same is True

    def ask(self, x: torch.Tensor, panels: int, stream: _native.Stream) -> None:
        """Enqueue the comparison, unless that was done."""
        with self._lock:
            if self._same is not None or self._asked is not None:
                return
            try:
                self._asked = enqueue_comparison(x, panels, stream)
            except RuntimeError:  # no memory for it, or no such random numbers: whole for good
                self._same = False


_known: dict[Key, _Known] = {}


def _settle(parts: Sequence[_native.Transfer]) -> None:
    for part in parts:
        with contextlib.suppress(Exception):
            part.sync()  # site: panels.drain_sync


class Ends:
    """The ends of one call: which is cut, and what this call finds out for the next.

    Attributes:
        cut: the index of the item that is cut; -1: none.
    """

    def __init__(self, x: torch.Tensor, n: int, panels: int | None) -> None:
        self.cut = -1
        self._n = n
        self._last_product: _native.Event | None = None
        self._known: _Known | None = None
        asked = resolved(panels, x.shape[0])
        self._panels = wanted(asked, x.shape[0], x.nbytes)
        if self._panels == 1:
            return
        # The comparison has memory of its own, so what else a kernel is chosen by must be usual.
        unusual = not x.is_contiguous() or x.data_ptr() % ALIGNMENT
        if unusual or x.is_conj() or x.is_neg() or torch.is_autocast_enabled(x.device.type):
            return
        key = key_of(x, self._panels)
        if key is None:
            return
        self._known = _known.get(key) or _known.setdefault(key, _Known())
        if not self._known.same_bits():
            return
        if asked or n == 1 or self._known.copies_last is False:
            self.cut = n - 1

    def start(
        self, x: torch.Tensor, place: Place, stream: _native.Stream, pool: PinnedPool
    ) -> tuple[Panelled, torch.Tensor]:
        """Enqueue the products of the item that is cut on the current stream, and their copies."""
        product = part = x.new_empty(x.shape)
        dst = pool._new(product.shape, product.dtype, None, product.numel())
        parts: list[_native.Transfer] = []
        try:
            for rows in panel_rows(x.shape[0], self._panels):
                part = product[rows]
                torch.mm(x[rows], x, out=part)
                if place.checked:
                    place.took_memory()
                    place.runtime.declare(stream, part.data_ptr(), part.nbytes, True)
                item = (dst[rows].data_ptr(), part.data_ptr(), part.nbytes, part.itemsize, None)
                parts.append(
                    place.engine.submit(
                        device=place.index,
                        to_device=False,
                        items=[item],
                        after=[stream],  # site: panels.after
                        chunk_bytes=WHOLE,
                        keep_source=(product, x),  # site: panels.keep_source
                        keep_destination=dst,  # site: panels.keep_destination
                        timed=False,
                    )
                )
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                _settle(parts)  # site: panels.drain
            parts.clear()
            del product, part, dst  # the traceback keeps this frame
            raise
        return Panelled(parts), dst

    def issued(self, stream: _native.Stream | None) -> None:
        """Note where the last product ends."""
        if self._known is not None and stream is not None and self._n > 1:
            self._last_product = stream.record()  # site: panels.record_last_product

    def copied(self, index: int) -> None:
        """Note that the copy of item ``index`` has ended.

        If the last product is done when the copy before its own has ended, products wait for
        copies. If copies wait for products, that copy began with the last product, and ends sooner.
        A host that looks late may take the one for the other, until it looks again.
        """
        if self._last_product is not None and index == self._n - 2:
            assert self._known is not None
            self._known.copies_last = self._last_product.done()

    def end(self, x: torch.Tensor, stream: _native.Stream | None) -> None:
        """After the last copy: let the device compare, where that was not done."""
        if self._known is not None and stream is not None:
            self._known.ask(x, self._panels, stream)
