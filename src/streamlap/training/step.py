"""The gradients of a step on their way to the host: who waits for what, and until when."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import streamlap
from streamlap.checks import as_dtype
from streamlap.training.arrival import Arrival, Shipment, deadline_after, left_until
from streamlap.training.passes import End, current_task, require_outside
from streamlap.uncompiled import uncompiled


@dataclass(eq=False)
class Step:
    """What the backward passes of one step have sent.

    Attributes:
        latest: the last arrival of each name, in the order in which they were sent.
        passes: how many passes have come to their end.
        wanted: how many it will have; None while nobody has said so.
        closed: the next pass belongs to another step.
        why_failed: why the gradients are not to be used; empty if they are.
        reentrant: passes ran within another one, whose end nobody tells.
        unscaled: whether the scaler's factor is out.
    """

    latest: dict[str, Arrival] = field(default_factory=dict)
    passes: int = 0
    wanted: int | None = None
    closed: bool = False
    why_failed: str = ""
    reentrant: bool = False
    unscaled: bool = False


class Gradients:
    """The host's gradients, step by step; what all helpers that send gradients give back.

    A *step* is all backward passes until its gradients are collected: until :meth:`result` has
    returned, or until it has had the passes that :meth:`completed` was told of. The next pass
    begins a new one. ``zero_grad()`` ends no step: one that is thrown away is dropped with
    :meth:`reset`. All methods may be called from any thread.
    """

    def __init__(self, names: list[str], dtype: torch.dtype | None) -> None:
        self._names = names
        self._dtype = as_dtype(dtype)
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise streamlap.InvalidArgument(
                f"gradients as {dtype} would be rounded to whole numbers: dtype must be a "
                "floating-point type"
            )
        self._changed = threading.Condition()  # reentrant: a pass may be dropped anywhere
        self._step = Step()
        self._coming: Step | None = None  # that an iteration already waits for
        self._tasks: dict[int, Any] = {}  # those running, and what a subclass keeps for each
        self._arrived = False  # something, in the running pass
        self._closed = False
        # Hooks are called in the engine's threads, which know nothing of use_runtime().
        self._context = contextvars.copy_context()

    # -- for the user

    def result(self, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """Block until all gradients of the step are on the host; return them by name.

        Waits for a backward pass that is running in another thread, too. The names are in the order
        of the parameters; one that got no gradient is not among them. The tensors are yours, in
        page-locked memory. Asked again before the next pass, it returns the same ones.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            GradientsIncomplete: no pass has sent anything since the last step, or one has failed.
            TransferTimeout: not all were there in time; ask again.
            SourceModified: a gradient was written, in the pass itself, while it was copied.
            InvalidArgument: called inside a backward pass.
        """
        require_outside("result()")
        deadline = deadline_after(timeout)
        with self._changed:
            self._wait_until(lambda: not self._tasks, deadline)  # site: step.pass_is_over
            step = self._step
            self._require_good(step)
            if not step.latest:
                raise streamlap.GradientsIncomplete(
                    "no gradient has come since the last step: call backward() before result(), "
                    "and attach again if the parameters were replaced"
                )
            step.closed = True
            latest = dict(step.latest)
        # In the order of sending, which small gradients wait for: what has come is looked at while
        # the last are on their way, and nothing but looking is left for when they have come.
        sent = sorted(latest.values(), key=Arrival.order)
        landings = [(arrival.name, arrival.landing(deadline)) for arrival in sent]
        come = {name: landing() for name, landing in landings}
        return {name: come[name] for name in self._names if name in come}

    def completed(
        self, backwards: int = 1, timeout: float | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over ``(name, tensor)``, each as soon as it is on the host.

        It belongs to the step that is not collected yet, or to the coming one: call ``completed()``
        before ``backward()`` and iterate in another thread. There ``next`` blocks until a gradient
        has arrived, and the iteration ends with the step, which the autograd engine tells. Called
        after ``backward()`` has returned, it gives what is there, and waits for no pass::

            with ThreadPoolExecutor(1) as thread:
                work = thread.submit(update_on_cpu, grads.completed())
                loss.backward()
                work.result()

        The order is that of arrival: the order of sending on each device.

        Args:
            backwards: how many backward passes the step has. Gradients are given out once they are
                final, in the last pass; those that it does not touch, at its end.
            timeout: seconds to wait for the next gradient; None waits for as long as it takes.

        Raises:
            GradientsIncomplete: from the iterator. The backward pass failed, ``close()`` or
                ``reset()`` was called, or reentrant checkpointing accumulated into a gradient
                already given out, or hides where the pass ends. The step has no result then.
            TransferTimeout: from the iterator, which is over then; ``result()`` may still be asked.
        """
        if isinstance(backwards, bool) or not isinstance(backwards, int):
            raise streamlap.InvalidType(f"backwards must be an int, not {backwards!r}")
        if backwards < 1:
            raise streamlap.InvalidArgument(f"backwards must be at least 1, not {backwards}")
        deadline_after(timeout)
        with self._changed:
            self._require_open()
            step = self._step
            if step.closed:
                step = self._coming = self._coming or Step()
            step.wanted = backwards
            step.closed = step.passes >= backwards
        return self._iterate(step, backwards, timeout)

    def unscale_(self, scaler: torch.amp.GradScaler) -> int:
        """Divide the step's host gradients in place by the scaler's factor, as ``unscale_`` does.

        Call it once a step and before ``scaler.update()``, which changes the factor.

        Returns:
            How many values are not finite; with any, skip the step as the scaler does.

        Raises:
            InvalidArgument: the step is unscaled already.
            Exception: as :meth:`result`, which it calls.
        """
        if not isinstance(scaler, torch.amp.GradScaler):
            raise streamlap.InvalidType(f"scaler must be a GradScaler, not {type(scaler).__name__}")
        grads = self.result()
        with self._changed:
            if self._step.unscaled:
                raise streamlap.InvalidArgument("the gradients of this step are unscaled already")
            self._step.unscaled = True
        # The rounding is the scaler's own: the reciprocal in double precision, used in single.
        scale = torch.tensor(scaler.get_scale(), dtype=torch.float64)
        inverse = float(scale.reciprocal().float())
        not_finite = 0
        for grad in grads.values():
            not_finite += grad.numel() - int(torch.isfinite(grad).sum())
            grad.mul_(inverse)
        return not_finite

    def reset(self) -> None:
        """Drop what the step has so far, as after a loss that was not finite.

        Call it whenever ``backward()`` has raised: an iteration that waits for the step ends with
        an error. By itself a failure is noticed only once backward has reached the outputs of the
        module, or the first parameter.

        Raises:
            InvalidArgument: called inside a backward pass.
        """
        require_outside("reset()")
        with self._changed:
            self._wait_until(lambda: not self._tasks, None)  # site: step.reset_waits
            dropped = self._coming if self._step.closed else self._step
            if dropped is not None:
                dropped.why_failed = "reset() was called"
            self._step, self._coming = Step(), None
            self._changed.notify_all()

    def close(self) -> None:
        """Send nothing any more. What was sent can still be had from :meth:`result`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- for the hooks

    @uncompiled
    def _enter(self) -> None:
        """Have the pass begin with the engine's task that calls."""
        self._kept()

    def _kept(self) -> Any:
        """Return what is kept for the engine's task that calls; the first call begins it."""
        task = current_task()
        with self._changed:
            kept = self._tasks.get(task)
            if kept is None:
                kept = self._tasks[task] = self._begin()
                End(lambda inside: self._over(task, inside), lambda: self._lost(task))
            return kept

    def _expect(self, name: str) -> tuple[Arrival, Arrival | None]:
        """Return a gradient of the running pass, and the step's earlier one of that name.

        The caller has the lock.
        """
        if not self._arrived:
            self._go_on()
            self._arrived = True
        arrival = Arrival(name, self._step.passes, self._changed)
        return arrival, self._step.latest.get(name)

    def _note(self, arrival: Arrival) -> None:
        """Make it the latest of its name. The caller has the lock."""
        self._step.latest.pop(arrival.name, None)  # the last of the dict is the last sent
        self._step.latest[arrival.name] = arrival

    def _wake(self) -> None:
        """Wake up who waits for a gradient that was neither on its way yet nor lost."""
        with self._changed:
            self._changed.notify_all()

    def _to_cpu(self, tree: Any, protect: bool) -> Shipment:
        return Shipment(self._context.copy().run(self._start, tree, protect))

    def _start(self, tree: Any, protect: bool) -> streamlap.Transfer:
        dtype = self._dtype
        if protect or dtype is not None or not isinstance(tree, torch.Tensor):
            return streamlap.to_cpu(tree, dtype=dtype, protect=protect)
        return streamlap.to_cpu(tree, chunk_bytes=streamlap.policy().bulk_chunk_bytes)

    def _begin(self) -> Any:
        """Return what is kept while the engine's task runs."""
        return ()

    def _finish(self, kept: Any) -> None:
        """Send what is left of a task that has come to its end."""

    def _drop(self, kept: Any, error: Exception) -> None:
        """Let go of what is left of a task that has failed."""

    # -- inside

    def _over(self, task: int, inside: bool) -> None:
        try:
            self._finish(self._tasks[task])
        except BaseException:
            self._lost(task)
            raise
        with self._changed:
            del self._tasks[task]
            step = self._step
            if not self._tasks and self._arrived:
                self._arrived = False
                step.passes += not inside
                step.reentrant |= inside
                step.closed = step.wanted is not None and step.passes >= step.wanted
            self._changed.notify_all()

    def _lost(self, task: int) -> None:
        with self._changed:
            kept = self._tasks.pop(task, None)
            self._go_on()
            self._step.why_failed = (
                "a backward pass has failed, and its gradients with it: call reset() before the "
                "next step"
            )
            self._arrived = bool(self._tasks)
            self._drop(kept, streamlap.GradientsIncomplete("the backward pass has failed"))
            self._changed.notify_all()

    def _go_on(self) -> None:
        """Begin the next step if the last one is closed and the pass has brought nothing yet."""
        if not self._arrived and self._step.closed:
            self._step, self._coming = self._coming or Step(), None

    def _wait_until(self, look: Callable[[], Any], deadline: float | None) -> Any:
        found = self._changed.wait_for(look, left_until(deadline))
        if not found:
            raise streamlap.TransferTimeout("the backward pass did not come so far in time")
        return found

    def _require_good(self, step: Step) -> None:
        if step.why_failed:
            raise streamlap.GradientsIncomplete(step.why_failed)

    def _require_open(self) -> None:
        if self._closed:
            raise streamlap.GradientsIncomplete("close() was called: no gradients will come")

    def _iterate(
        self, step: Step, backwards: int, timeout: float | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        given: dict[str, Arrival] = {}
        while True:
            deadline = deadline_after(timeout)
            look = functools.partial(self._look, step, given, backwards)
            with self._changed:
                over, waiting = self._wait_until(look, deadline)  # site: step.next_arrival
            if over and not waiting:
                return
            while waiting:
                # What has arrived from another device does not wait for what is sent first.
                ready = next((i for i, one in enumerate(waiting) if one.done()), 0)
                arrival = waiting.pop(ready)
                given[arrival.name] = arrival
                yield arrival.name, arrival.tensor(deadline)
                deadline = deadline_after(timeout)

    def _look(
        self, step: Step, given: dict[str, Arrival], backwards: int
    ) -> tuple[bool, list[Arrival]] | None:
        """Return whether the step is over, and what is final and not given out; None: neither."""
        self._require_good(step)
        if step.reentrant:
            raise streamlap.GradientsIncomplete(
                "a backward pass ran inside another one, as with reentrant checkpointing, and it "
                "is not known when that ends: give stream_gradients() the module that is called, "
                "use use_reentrant=False, or ask result()"
            )
        over = step.passes >= backwards
        waiting, left = [], 0
        for name, arrival in step.latest.items():
            if name not in given:
                left += 1
                if arrival.travels() and (over or arrival.turn >= backwards - 1):
                    waiting.append(arrival)
            elif given[name] is not arrival:
                raise streamlap.GradientsIncomplete(
                    f"the gradient of {name!r} was accumulated again after it had been given out, "
                    "as reentrant checkpointing does with shared parameters: use result()"
                )
        if waiting or (over and not left):
            return over, waiting
        self._require_open()
        return None
