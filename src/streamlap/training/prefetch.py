"""``Prefetcher``: the next batches travel to the device while the model works on this one.

The loader is pulled in the consumer's thread, inside ``next``, as other prefetchers do. A thread of
ours would draw from the random generators that the model draws from, at moments that differ from
run to run; it would not have the caller's modes, device, stream and context; and it could not be
stopped while a loader blocks. Reading in the background is what ``DataLoader(num_workers=...)`` is
for: then a pull only takes what is ready. Only the copies go on by themselves: of pinned batches by
the copy engine, of ordinary ones by a worker of the library.

There is no ring of buffers here: torch's allocator is one. Each batch is allocated on the
consumer's stream, and its copy starts after what that stream has been given by then. So the memory
of a batch that the consumer has dropped serves a later one, in stream order, and
``record_stream`` is not used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

import streamlap
from streamlap.checks import as_callable, as_count
from streamlap.devices import parse_device, place_of
from streamlap.training.memory import MemoryRef
from streamlap.uncompiled import uncompiled


@dataclass(eq=False)
class _Fetched:
    """A batch on its way, or the error that takes its place."""

    source: Any = None
    transfer: streamlap.Transfer | None = None
    stream: int | None = None  # where its memory was allocated
    error: Exception | None = None


class Prefetcher:
    """Iterate over a loader's batches on a device, copied there ahead of use.

    ``for batch in Prefetcher(loader, "cuda"):`` stands for ``for batch in loader: batch =
    batch.to("cuda")``, for any tree of tensors. Iterating again starts a new pass.

    Args:
        loader: an iterable of batches: tensors, arrays, or trees of them, as
            :func:`streamlap.to_device` takes them. Leaves that are no tensors pass through. Batches
            in page-locked memory (``DataLoader(pin_memory=True)``) travel fastest.
        device: as for :func:`streamlap.to_device`.
        depth: how many batches are fetched beyond the one that is handed out, at least 1.
        transform: called with each batch on the device, in the consumer's thread and on its stream,
            when the batch is handed out; what it returns is handed out instead.

    Raises:
        InvalidType, InvalidArgument, DeviceError: at once, for a loader that cannot be iterated
            over, a depth below 1, or a device that is not known or cannot be used.
        SourceModified: while iterating, if the loader wrote to a batch that was still being copied.
            It may do so once ``2 * depth + 1`` further batches were asked for. The check is torch's
            version counter: writes through NumPy are not seen.

    An error of the loader, or of a batch that cannot be copied, is raised in that batch's turn,
    after the ones before it were handed out. Leaving the loop early lets go of everything: batches,
    copies, and the loader's iterator with its workers.

    Memory: on the device there are the ``depth`` batches ahead, what the consumer holds, and at
    most ``depth`` that it dropped before their copies were done.

    Stream order: the consumer's current stream waits for the batch. The calling thread does so only
    for batches in ordinary memory that are not there yet, when it is ``depth`` batches ahead of
    the device, and where there is no stream (``device="cpu"``). A batch belongs to the stream that
    was current when it was handed out, as if it had been made there. Each iterator may be used by
    one thread at a time.
    """

    @uncompiled
    def __init__(
        self,
        loader: Iterable[Any],
        device: str | int | torch.device,
        depth: int = 2,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise streamlap.InvalidType(f"loader must be iterable, not {type(loader).__name__}")
        self._loader = loader
        self._device = parse_device(device)
        place_of(self._device)
        self._depth = as_count(depth, "depth", 1)
        self._transform = None if transform is None else as_callable(transform, "transform")
        # Re-entrant, because a collection of garbage inside may end a pass.
        self._lock = threading.RLock()
        self._count = {"batches": 0, "bytes": 0, "ahead": 0}
        self._given: deque[list[tuple[MemoryRef, int]]] = deque()
        self._scan_at = 16

    def __len__(self) -> int:
        """Return the loader's length; TypeError where it has none."""
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Start a pass. The loader's iterator is made now, as by a plain loop."""
        return self._pass(iter(self._loader))

    def stats(self) -> dict[str, int]:
        """Return what was done so far, all passes together.

        ``batches`` and ``bytes`` were handed out; ``ahead`` is how many batches are fetched and not
        handed out; ``held_batches`` and ``held_bytes`` are those whose memory somebody still holds:
        more than one or two mean that the loop keeps its batches. Thread-safe.
        """
        with self._lock:
            self._forget_dropped()
            held = [sum(n for ref, n in refs if ref.alive()) for refs in self._given]
            return self._count | {"held_batches": len(held), "held_bytes": sum(held)}

    # -- inside

    def _pass(self, batches: Iterator[Any] | None) -> Generator[Any, None, None]:
        device, depth = self._device, self._depth
        index: int | None = device.index  # torch's types deny the None of a plain "cuda"
        if device.type == "cuda" and index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        ahead: deque[_Fetched] = deque()
        unfinished: deque[streamlap.Transfer] = deque()  # handed out before their copies were done
        try:
            while True:
                while unfinished and (len(unfinished) >= depth or unfinished[0].done()):
                    unfinished.popleft().result()  # site: prefetch.bound
                while batches is not None and len(ahead) <= depth:
                    fetched = _fetch(batches, device)
                    if fetched is None or fetched.error is not None:
                        batches = None
                    if fetched is not None:
                        ahead.append(fetched)
                        self._add(ahead=1)
                    del fetched  # an iterator that sleeps must keep nothing alive
                if not ahead:
                    return
                self._add(ahead=-1)
                yield self._hand_out(ahead.popleft(), device, unfinished)
        finally:
            self._add(ahead=-len(ahead))
            # Also out of the reach of an exception's traceback, which holds this frame.
            batches = None
            ahead.clear()
            unfinished.clear()

    @uncompiled
    def _hand_out(
        self, fetched: _Fetched, device: torch.device, unfinished: deque[streamlap.Transfer]
    ) -> Any:
        try:
            if fetched.error is not None:
                raise fetched.error
            if fetched.stream != _current(device):
                # Its memory is of another stream's allocator, which could give it to others too
                # early. The source is here: fetch it anew.
                fetched = _started(fetched.source, device)
            transfer = fetched.transfer
            assert transfer is not None
            batch = transfer.wait()  # site: prefetch.wait_batch
            if transfer.done():
                transfer.result()  # for SourceModified
            else:
                unfinished.append(transfer)
            self._note(batch, transfer.nbytes)
        finally:
            del fetched  # with its error, whose traceback leads here
        return batch if self._transform is None else self._transform(batch)

    @uncompiled
    def _add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._count[name] += count

    def _note(self, batch: Any, nbytes: int) -> None:
        refs = [
            (MemoryRef(leaf.untyped_storage()), leaf.nbytes)
            for leaf in _pytree.tree_leaves(batch)
            if isinstance(leaf, torch.Tensor) and leaf.numel()
        ]
        self._add(batches=1, bytes=nbytes)
        with self._lock:
            self._given.append(refs)
            if len(self._given) >= self._scan_at:
                self._forget_dropped()
                self._scan_at = max(16, 2 * len(self._given))  # so that a scan is rare

    def _forget_dropped(self) -> None:
        alive = (refs for refs in self._given if any(ref.alive() for ref, _ in refs))
        self._given = deque(alive)


def _current(device: torch.device) -> int | None:
    """Return the handle of the consumer's stream; None where there is none."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else None


def _started(source: Any, device: torch.device) -> _Fetched:
    return _Fetched(source, streamlap.to_device(source, device), _current(device))


@uncompiled
def _fetch(batches: Iterator[Any], device: torch.device) -> _Fetched | None:
    """Pull a batch and start its copy; None at the loader's end."""
    try:
        return _started(next(batches), device)
    except StopIteration:
        return None
    except Exception as error:
        return _Fetched(error=error)
