"""Gradients of a step on the host, by plain torch: after backward, or from hooks during it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..checks import poison
from ..gpt import Training, kept, require_kept
from ..limit import synchronize
from ..rows import Tensors, Way


class GradientWay(Way):
    """Forward and backward, with all gradients on the host at the end.

    ``cold`` is called before each round. Every round that is checked runs a step more, outside the
    clock, in which the gradients are kept on the device and compared with what arrives.
    """

    def __init__(self, training: Training, cold: Callable[[], object] = lambda: None) -> None:
        self.training = training
        self.parameters = training.parameters
        self.cold = cold

    def attach(self) -> None:
        """Register hooks, if there are any."""

    def detach(self) -> None:
        """Remove them."""

    def collect(self) -> Tensors:
        """Return the gradients on the host, ready to read, once backward has returned."""
        raise NotImplementedError

    def before(self) -> None:
        self.training.clear()
        self.cold()

    def go(self) -> Tensors:
        self.training.forward().backward()
        return self.collect()

    def timed(self, devices: Sequence[torch.device]) -> tuple[float, Any]:
        self.attach()
        try:
            return super().timed(devices)
        finally:
            self.detach()
            self.training.clear()

    def results(self, value: Any) -> Tensors:
        del value
        with kept(self.parameters) as found:
            self.attach()
            try:
                require_kept(self.go(), found, self.parameters)
            finally:
                self.detach()
                self.training.clear()
        return []


class StepAlone(GradientWay):
    """Forward and backward; nothing leaves the device."""

    def collect(self) -> Tensors:
        synchronize([self.training.device])
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


class GradientsAlone(Way):
    """The copies alone, into memory that is ready."""

    def __init__(self, training: Training) -> None:
        self.device = training.device
        self.sources = [torch.rand_like(parameter) for parameter in training.parameters]
        self.ready = ready_memory(training.parameters)

    def go(self) -> Tensors:
        for source, out in zip(self.sources, self.ready, strict=True):
            out.copy_(source, non_blocking=True)
        synchronize([self.device])
        return []


class CpuAfterwards(GradientWay):
    """``p.grad.cpu()`` of each, after backward."""

    def collect(self) -> Tensors:
        return [p.grad.cpu() if p.is_cuda else p.grad.clone() for p in self.parameters]


class NonBlockingAfterwards(GradientWay):
    """``p.grad.to("cpu", non_blocking=True)`` of each, after backward."""

    def collect(self) -> Tensors:
        copies = [p.grad.to("cpu", non_blocking=True, copy=True) for p in self.parameters]
        synchronize([self.training.device])
        return copies


class HooksByHand(GradientWay):
    """A hook for each gradient, a side stream, and pinned memory that is ready."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.ready = dict(zip(self.parameters, ready_memory(self.parameters), strict=True))
        on_gpu = training.device.type == "cuda"
        self.stream = torch.cuda.Stream(training.device) if on_gpu else None
        self.kept: Tensors = []
        self.handles: list[Any] = []
        self.first: torch.cuda.Event | None = None
        self.began = threading.Event()

    def poison(self) -> None:
        poison(self.ready.values())

    def attach(self) -> None:
        self.first = None
        self.began.clear()
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self.copy) for parameter in self.parameters
        ]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.kept.clear()

    def copy(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if self.stream is None:
            self.ready[parameter].copy_(grad)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.ready[parameter].copy_(grad, non_blocking=True)
                if self.first is None:
                    self.first = self.stream.record_event()
            self.kept.append(grad)
            parameter.grad = None
        self.began.set()

    def collect(self) -> Tensors:
        if self.stream is not None:
            self.stream.synchronize()
        return list(self.ready.values())

    def wait_first(self) -> float:
        """Block until the first gradient can be read; return when that was."""
        self.began.wait()
        if self.first is not None:
            self.first.synchronize()
        return time.perf_counter()


def ready_memory(parameters: Tensors) -> Tensors:
    """Return host memory for each, page-locked for a GPU, all pages touched."""
    pinned = parameters[0].is_cuda
    made = [torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in parameters]
    poison(made)
    return made
