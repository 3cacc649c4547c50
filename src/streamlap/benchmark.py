"""A stopwatch that knows about asynchronous work."""

from __future__ import annotations

import time
from types import TracebackType

from streamlap.devices import synchronize


class Benchmark:
    """Time a ``with`` block, devices synchronised at both ends, and print it.

    Args:
        description: printed before the time: ``Run on GPU1: 0.1313 sec``.

    Attributes:
        seconds: the time, once the block has ended.

    Nothing is printed when the block raises. Raises what :func:`streamlap.synchronize` raises. One
    object times one block at a time.
    """

    def __init__(self, description: str = "Done") -> None:
        self.description = description
        self.seconds: float | None = None
        self._begin = 0.0

    def __enter__(self) -> Benchmark:
        synchronize()
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            synchronize()
        self.seconds = time.perf_counter() - self._begin
        if kind is None:
            print(f"{self.description}: {self.seconds:.4f} sec")
