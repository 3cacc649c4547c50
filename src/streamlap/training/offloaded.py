"""A tensor's memory on its way to the host, there, and on its way back."""

from __future__ import annotations

import contextvars
import weakref
from collections import deque
from typing import Generic, TypeVar

import torch

import streamlap
from streamlap.training.memory import MemoryRef

T = TypeVar("T")


COUNT = 2
BYTES = 128 << 20


class Window(Generic[T]):
    """What is under way, oldest first; full beyond a few of them *and* so many bytes."""

    def __init__(self, scale: int = 1) -> None:
        self._scale = scale
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T, nbytes: int) -> None:
        """Add one as the youngest."""
        self._items.append((item, nbytes))
        self._bytes += nbytes

    def oldest(self) -> T:
        """Return the oldest."""
        return self._items[0][0]

    def pop(self) -> T:
        """Take out the oldest."""
        item, nbytes = self._items.popleft()
        self._bytes -= nbytes
        return item

    def clear(self) -> None:
        """Forget them all."""
        self._items.clear()
        self._bytes = 0

    def full(self) -> bool:
        """Return whether there are too many: the oldest should go."""
        return len(self._items) > self._scale * COUNT and self._bytes > self._scale * BYTES


class Leaving:
    """A copy to the host, as long as it has not been seen to be done.

    Attributes:
        memory: what is copied, weakly.
        nbytes: of it.
        orphan: the copy, if it was not known to be done when the last user of the memory died: what
            it reads and writes is in use until it is.
    """

    def __init__(self, memory: Offloaded) -> None:
        self.memory = weakref.ref(memory)
        self.nbytes = memory.nbytes
        self.orphan: streamlap.Transfer | None = None

    def left(self) -> bool:
        """Return whether it is done."""
        copy = self._copy()
        return copy is None or copy.done()

    def wait_until_left(self) -> None:
        """Block until it is done; raise its error if somebody needs it."""
        copy = self._copy()
        if copy is not None:
            error = copy.exception()  # site: activations.bound_leaving
            if error is not None and copy is not self.orphan:
                raise error

    def _copy(self) -> streamlap.Transfer | None:
        memory = self.memory()
        return self.orphan if memory is None else memory.out


class Offloaded:
    """A range of a tensor's memory, copied to the host; whoever saved it shares it.

    Attributes:
        root: the tensor whose memory it is, weakly: while it lives, unwritten, the copy is good.
        nbytes: of the range.
        source: the memory on the device, until the copy has gone past.
        out: the copy to the host.
        leaving: the same, as who bounds how many there are sees it.
        measured: the time of the copy was noted.
        users: how many saved tensors lie in it.
        device: the tensor's.
        spent: the backward in which each of them was given its bytes; its node may keep it alive
            until it has asked for its others.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        first: int,
        nbytes: int,
        died: deque[Leaving],
        timed: bool | None = None,
    ) -> None:
        self.root = weakref.ref(root_of(tensor))
        self.nbytes = nbytes
        self.measured = False
        self.users = 0
        self.spent: int | None = None
        self.source: torch.Tensor | None = None
        self._memory = MemoryRef(storage)  # so that no other storage gets its identity
        self.device = tensor.device
        self._taken = 0
        self._died: deque[Leaving] | None = None
        self._back: streamlap.Transfer | None = None
        self._stream: int | None = None
        # Backward may run in a thread of autograd's, which has no context of the caller's.
        self._context = contextvars.copy_context()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(storage, first, (nbytes,), (1,))
        self.out = streamlap.to_cpu(
            flat, timed=timed, chunk_bytes=streamlap.policy().bulk_chunk_bytes
        )
        self.source = flat
        self.leaving = Leaving(self)
        self._died = died

    def __del__(self) -> None:
        if self._died is None:
            return
        # The copy is not asked whether it is done: at the end of the process nobody may answer.
        if self.source is not None:
            self.leaving.orphan = self.out
        self._died.append(self.leaving)

    def left(self) -> bool:
        """Return whether the copy to the host is done."""
        return self.out.done()

    def seconds(self) -> float:
        """Return how long the copy to the host took; it must be done, and timed. 0: it failed."""
        return self.out.elapsed()

    @property
    def here(self) -> bool:
        """Whether it is on the device, or on its way."""
        return self.source is not None or self._back is not None

    def fetch(self) -> streamlap.Transfer:
        """Start the way back, for the current stream."""
        host = self.out.result()  # site: activations.read_host
        self._stream = _current(self.device)
        self._back = self._context.run(_to_device, host, self.device)
        return self._back

    def way_back(self) -> streamlap.Transfer | None:
        """Return the way back that was started for the current stream, if there is one."""
        if self._stream != _current(self.device):
            self.drop()  # another stream's memory, which may be given to others too early
        return self._back

    def arrive(self, back: streamlap.Transfer, task: int) -> torch.Tensor:
        """Return the bytes on the device, readable by the current stream, in backward ``task``.

        They stay until each user has had them once, so that all have the same.
        """
        flat = back.wait()  # site: activations.wait_back
        assert isinstance(flat, torch.Tensor)
        self._taken += 1
        if self._taken >= self.users:
            self.spent = task
            self.drop()
        return flat

    def drop(self) -> None:
        """Let go of the memory on the device that it was fetched to, if any."""
        self._back = None
        self._taken = 0


def _to_device(host: torch.Tensor, device: torch.device) -> streamlap.Transfer:
    return streamlap.to_device(host, device, chunk_bytes=streamlap.policy().bulk_chunk_bytes)


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view is a view of, or the tensor itself."""
    base = tensor._base
    return tensor if base is None else base


def _current(device: torch.device) -> int | None:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else None
