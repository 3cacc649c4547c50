"""torch's thread-local modes, taken from the caller and applied on a worker thread."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from streamlap.devices import cuda_in_use

_here = threading.local()


def on_worker() -> bool:
    """Return whether this thread is a compute worker in the middle of an item.

    A worker that waited for a worker could wait for itself, so a pipeline inside a pipeline's
    function computes where it is.
    """
    return getattr(_here, "depth", 0) > 0


class CallerModes:
    """What the calling thread has set: gradients, inference, autocast, streams, context vars."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._streams = (
            [torch.cuda.current_stream(torch.cuda.current_device())] if cuda_in_use() else []
        )
        self._context = contextvars.copy_context()

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._cache))
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn`` as if the caller did."""

        def call() -> Any:
            with self._applied():
                return fn(*args)

        _here.depth = getattr(_here, "depth", 0) + 1
        try:
            return self._context.copy().run(call)
        finally:
            _here.depth -= 1
