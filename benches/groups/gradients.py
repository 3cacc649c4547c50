"""The gradients of a training step, on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import streamlap

from ..gpt import Training
from ..limit import synchronize
from ..peers.gradients_by_hand import (
    CpuAfterwards,
    GradientsAlone,
    GradientWay,
    HooksByHand,
    NonBlockingAfterwards,
    StepAlone,
)
from ..rows import Planned, Row, Setting, Table, Tensors
from ..runner import release

TITLE = "Gradients on the host"
ABOUT = (
    "Forward and backward of a GPT (bf16 autocast on a GPU), every gradient on the host and ready "
    "to read at the end. The limit is the longer of the step alone and the copies alone. The first "
    "step finds no page-locked memory; only the hooks by hand have theirs from before. The last "
    "table has the time from the start of backward until its first gradient can be read."
)
NOT_ON_CPU = ""

BLOCKING_ROUNDS = 3


class StreamGradients(GradientWay):
    """``stream_gradients``."""

    def __init__(
        self, training: Training, free: bool, cold: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(training, cold)
        self.free = free
        self.handle: streamlap.training.GradientStream | None = None

    def attach(self) -> None:
        self.handle = streamlap.stream_gradients(self.training.model, free=self.free)

    def detach(self) -> None:
        assert self.handle is not None
        self.handle.close()
        self.handle = None

    def collect(self) -> Tensors:
        assert self.handle is not None
        return list(self.handle.result().values())


class UntilFirst(GradientWay):
    """The seconds of backward until a first gradient is there, in another way's backward."""

    def __init__(self, way: GradientWay) -> None:
        super().__init__(way.training)
        self.way = way

    def timed(self, devices: Sequence[torch.device]) -> tuple[float, Any]:
        way = self.way
        seen: list[float] = []
        way.attach()
        try:
            loss = way.training.forward()
            synchronize(devices)
            wait = self._waiter()
            thread = threading.Thread(target=lambda: seen.append(wait()))
            thread.start()
            begin = time.perf_counter()
            loss.backward()
            if isinstance(way, StepAlone):
                way.collect()
            elif isinstance(way, CpuAfterwards):
                way.parameters[0].grad.cpu()
            end = time.perf_counter()
            thread.join()
            way.collect()
        finally:
            way.detach()
            way.training.clear()
        return (seen[0] or end) - begin, None

    def _waiter(self) -> Callable[[], float]:
        """Return what blocks until then and returns when it was; 0: once backward has returned."""
        way = self.way
        if isinstance(way, HooksByHand):
            return way.wait_first
        if isinstance(way, StreamGradients):
            assert way.handle is not None
            arrivals = way.handle.completed()

            def first() -> float:
                next(arrivals)
                return time.perf_counter()

            return first
        return lambda: 0.0

    def results(self, value: Any) -> Tensors:
        return self.way.results(value)


def _warm(training: Training, rounds: int | None) -> list[Row]:
    return [
        Row("forward and backward alone", lambda: StepAlone(training), "limit"),
        Row("copies alone", lambda: GradientsAlone(training), "limit"),
        Row(".cpu() afterwards", lambda: CpuAfterwards(training), rounds=rounds),
        Row("non_blocking afterwards", lambda: NonBlockingAfterwards(training)),
        Row("hooks by hand, ready", lambda: HooksByHand(training)),
        Row("stream_gradients", lambda: StreamGradients(training, False), "ours"),
        Row("stream_gradients(free=True)", lambda: StreamGradients(training, True), "ours"),
    ]


def _first(training: Training) -> list[Row]:
    def cold() -> None:
        release(training.device)

    return [
        Row("forward and backward alone", lambda: StepAlone(training, cold), "limit"),
        Row(".cpu() afterwards", lambda: CpuAfterwards(training, cold)),
        Row("non_blocking afterwards", lambda: NonBlockingAfterwards(training, cold)),
        Row("hooks by hand, ready", lambda: HooksByHand(training)),
        Row("stream_gradients", lambda: StreamGradients(training, False, cold), "ours"),
        Row("stream_gradients(free=True)", lambda: StreamGradients(training, True, cold), "ours"),
    ]


def _until_first(training: Training) -> list[Row]:
    return [
        Row("backward alone", lambda: UntilFirst(StepAlone(training)), "limit"),
        Row(".cpu() afterwards", lambda: UntilFirst(CpuAfterwards(training))),
        Row("hooks by hand, ready", lambda: UntilFirst(HooksByHand(training))),
        Row("stream_gradients", lambda: UntilFirst(StreamGradients(training, False)), "ours"),
    ]


def plan(setting: Setting) -> list[Planned]:
    def build(rows: Callable[[Training], list[Row]], **options: Any) -> Table:
        training = Training(setting.device, setting.quick)
        return Table(
            rows(training),
            [setting.device],
            training.change,
            check=lambda _nothing: None,  # the rows check for themselves, with a step more
            against="limit",
            settings=training.settings(),
            **options,
        )

    def warm() -> Table:
        blocking = BLOCKING_ROUNDS if setting.on_gpu else None
        return build(lambda training: _warm(training, blocking))

    few = min(BLOCKING_ROUNDS, setting.rounds)
    return [
        Planned("a step and its gradients, warm", warm),
        Planned("the first step", lambda: build(_first, rounds=few)),
        Planned("until the first gradient", lambda: build(_until_first)),
    ]
