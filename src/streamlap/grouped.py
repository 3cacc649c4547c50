"""Products so small that the calls cost more than the work: groups of them share a copy.

The products of a group are computed side by side into one device buffer and leave it in one copy to
one pinned block. Two buffers take turns: while one is copied, the other is filled.

With 256x256 matrices in fp32 a product's launch takes the host 8 us, a copy and its events 8 us,
and the wire 5 us for 256 KiB. Copied alone, an item costs 16 us; with eight in a group, 9. What is
lost is the last group's copy, which nothing hides: 40 us of about 450. Larger groups would lose
more there than they save, smaller ones pay for more copies: for n items and c us a copy the sum
``n / g * c + g * wire`` is least at ``g = sqrt(n * c / wire)``, nine here, and flat around it.
"""

from __future__ import annotations

import contextlib

import torch

from streamlap import _native
from streamlap.batch import WHOLE
from streamlap.devices import Place, current_handle
from streamlap.direct import copy_out
from streamlap.lanes import annotate
from streamlap.pinned import PinnedPool, view_of

ALIGN = 512
"""torch's allocator starts every tensor at such an address, and cuBLAS picks its kernel, and so the
bits of the result, by the alignment too."""


class Layout:
    """How the ``n`` items of a call are grouped, none of them larger than ``tiny`` bytes.

    Attributes:
        pitch: bytes from one item to the next.
        group: items in a group.
        buffers: groups on the device at once.
    """

    def __init__(self, item: int, n: int, depth: int, tiny: int) -> None:
        self.pitch = (item + ALIGN - 1) // ALIGN * ALIGN
        self.buffers = min(2, depth)
        # The device holds `depth` items of the largest size there is here, at most.
        self.group = min(n, max(1, depth * tiny // self.buffers // self.pitch))
        self.groups = (n - 1) // self.group + 1


def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
    """Compute ``x.mm(x)`` into ``out``."""
    torch.mm(x, x, out=out)


def _order(stream: _native.Stream, native: _native.Transfer) -> None:
    """Let what ``stream`` is given next, which writes the source again, wait for its copy."""
    native.wait_on_stream(stream)  # site: grouped.order


def grouped_products(
    x: torch.Tensor, n: int, layout: Layout, place: Place, pool: PinnedPool
) -> list[torch.Tensor]:
    """Return ``n`` products ``x.mm(x)`` on the host, each a tensor of its own.

    Results of one group share a pinned block, which is in use until the last of them is gone.
    """
    rows, dtype = x.shape[0], x.dtype
    pitch = layout.pitch // x.itemsize
    shape = (rows, rows)
    flying: list[_native.Transfer] = []
    blocks: list[tuple[_native.Block, int]] = []
    filled: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
    results: list[torch.Tensor] = []
    stream: _native.Stream | None = None
    growth: _native.Growth | None = None
    index = 0
    try:
        for first in range(0, n, layout.group):
            count = min(layout.group, n - first)
            if len(flying) < layout.buffers:
                buffer = torch.empty(count * pitch, dtype=dtype, device=x.device)
                views = buffer.as_strided((count, rows, rows), (pitch, rows, 1)).unbind(0)
                filled.append((buffer, views))
            else:
                assert stream is not None
                _order(stream, flying[-layout.buffers])
                buffer, views = filled[len(flying) % layout.buffers]
            for index in range(first, first + count):
                multiply(x, views[index - first])
            if stream is None:  # only now: the first product has begun
                stream = place.runtime.adopt(place.index, current_handle(place.index))
                growth = pool._grow_ahead(layout.group * layout.pitch, n // layout.group)
            nbytes = count * layout.pitch
            if place.checked:
                place.took_memory()
                place.runtime.declare(stream, buffer.data_ptr(), nbytes, True)
            native, block = copy_out(
                place,
                pool,
                buffer,
                nbytes,
                WHOLE,
                False,
                after=stream,  # site: grouped.after
                keep_source=(buffer, x),  # site: grouped.keep_source
            )
            flying.append(native)
            blocks.append((block, count))
        # Made while the last copy is on its way. Views of one tensor would share its storage, and
        # with it what is written when one of them is saved.
        for block, count in blocks:
            for item in range(count):
                results.append(view_of(block, shape, dtype, None, item * layout.pitch))
        for position, native in enumerate(flying):
            index = position * layout.group
            native.sync()  # site: grouped.sync
    except BaseException as error:
        annotate(error, index)
        if not isinstance(error, KeyboardInterrupt):
            for native in flying:
                with contextlib.suppress(Exception):
                    native.sync()  # site: grouped.drain_sync
        # The traceback keeps this frame.
        flying.clear()
        blocks.clear()
        filled.clear()
        results.clear()
        native = block = buffer = views = None  # type: ignore[assignment]
        raise
    finally:
        if growth is not None:
            growth.cancel()
    return results
