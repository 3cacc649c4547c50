"""When a backward pass begins, ends or fails: what the autograd engine tells, and what it does not.

A *task* is one call into the engine. Reentrant checkpointing calls it again from within: a pass
lasts from the first task until none is running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from streamlap import InvalidArgument
from streamlap.uncompiled import uncompiled


def current_task() -> int:
    """Return the number of the engine's task that the calling thread is in; -1: none."""
    return int(torch._C._current_graph_task_id())


def require_outside(call: str) -> None:
    """Raise InvalidArgument in a backward pass: a wait for its end would never return."""
    if current_task() != -1:
        raise InvalidArgument(f"{call} inside a backward pass would wait for itself")


class End:
    """The engine's last callback of a task.

    ``over(inside)`` is called once the task is done: ``inside`` if it ran within another one.
    ``lost()`` is called instead if the engine drops the callback, as it does after an error.
    """

    def __init__(self, over: Callable[[bool], object], lost: Callable[[], object]) -> None:
        self._over = over
        self._lost = lost
        self._calls = 0
        self._queue()

    def _queue(self) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self)

    @uncompiled
    def __call__(self) -> None:
        """Wait for the others' callbacks once, then end."""
        self._calls += 1
        if self._calls == 1:
            # Behind what others queued in this task: FSDP reduces its last gradients there, and
            # DDP waits for its own.
            self._queue()  # site: passes.after_others
            return
        self._over(torch._C._current_autograd_node() is not None)

    def __del__(self) -> None:
        if self._calls < 2:
            self._lost()
