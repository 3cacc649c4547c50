"""The exceptions of streamlap: one tree, each class also the built-in that fits."""

from __future__ import annotations


class StreamlapError(Exception):
    """The base of every exception that streamlap itself raises."""


class InvalidArgument(StreamlapError, ValueError):
    """A value that makes no sense. Nothing was enqueued."""


class InvalidType(StreamlapError, TypeError):
    """An argument of the wrong type. Nothing was enqueued."""


class UnsupportedTensor(InvalidType):
    """A tensor of a kind that cannot be copied as bytes. The message names the kind."""


class DeviceError(StreamlapError, RuntimeError):
    """An operation on a device failed, or the device cannot be used. The library stays usable."""


class DeviceLost(DeviceError):
    """The device's context is gone; nothing works on it until the process is restarted."""


class OutOfMemory(StreamlapError, MemoryError):
    """The system or the device gave no memory."""


class PoolExhausted(StreamlapError, MemoryError):
    """A pinned pool's limit would be exceeded by memory that users hold.

    Attributes:
        used: bytes held, in blocks.
        limit: the pool's limit in bytes.
    """

    def __init__(self, message: str, used: int, limit: int) -> None:
        super().__init__(message)
        self.used = used
        self.limit = limit

    def __reduce__(self) -> tuple[type[PoolExhausted], tuple[str, int, int]]:
        return type(self), (str(self), self.used, self.limit)


class SourceModified(StreamlapError, RuntimeError):
    """A borrowed source was written before it was known to have been read."""


class GradientsIncomplete(StreamlapError, RuntimeError):
    """The gradients of a step are not all there, or not final. The message says why."""


class TransferTimeout(StreamlapError, TimeoutError):
    """The transfer was not done in time. It goes on; ask again."""


class CaptureError(StreamlapError, RuntimeError):
    """Not possible while a CUDA graph is being captured (which goes on), or in a graph at all."""


class OrderError(StreamlapError, RuntimeError):
    """Two accesses to the same memory are not ordered; both are named. See ``checking()``."""


class ForkedProcess(StreamlapError, RuntimeError):
    """Used in a forked child of the process that started streamlap."""
