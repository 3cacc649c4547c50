"""Faults made on purpose: ``with faults.injected("event_record:3:once") as plan: ...``.

A plan is ``CALL:NUMBER:MODE``, or several with commas. The call is one of the runtime's, listed in
``csrc/check/fault_plan.h``; the number says which of that kind in the block, from 1. Modes:

=============  =====================================================================================
``once``       this call fails
``always``     this one and all later ones of its kind fail
``sticky``     the device's context is lost: from here on every call fails
``later``      the call succeeds; whoever waits for its stream meets the error
``memory``     there is no memory for it
``interrupt``  a wait of the host ends as Ctrl-C ends it
=============  =====================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterator

from streamlap import _native
from streamlap.errors import InvalidArgument, InvalidType
from streamlap.serving import Serving, cuda_runtime, current, serve

_lock = threading.Lock()


@functools.cache
def _on_gpus() -> tuple[_native.FaultyRuntime, _native.Engine]:
    """Return what serves GPUs in every block: streams of the driver live to the process's end."""
    runtime = _native.FaultyRuntime(_native.checked(cuda_runtime()))
    return runtime, _native.engine(runtime)


class _Faulty(Serving):
    """What serves in a block of :func:`injected`."""

    def __init__(self, outer: Serving, cuda: bool) -> None:
        super().__init__(outer)
        self.simulated = outer.simulated
        self.runtimes: list[_native.FaultyRuntime] = []
        self._cuda = cuda
        for gpus in (False, True)[: 1 + cuda]:
            self.runtime(gpus)

    def _make_runtime(self, cuda: bool) -> _native.Runtime | None:
        assert self.outer is not None
        if cuda and not self._cuda:
            return None
        if cuda:
            made, _engine = _on_gpus()
        else:
            # Worker threads of its own, which end with the block; a simulation's do anyway.
            inner = self.outer.runtime() if self.simulated else _native.new_host_runtime()
            made = _native.FaultyRuntime(inner if self.simulated else _native.checked(inner))
        self.runtimes.append(made)
        return made

    def now(self) -> float:
        """Return the seconds on the clock of what serves outside."""
        assert self.outer is not None
        return self.outer.now()


class Injection:
    """What has happened in a block of :func:`injected`.

    Attributes:
        plan: as it was written.
    """

    def __init__(self, plan: str, runtimes: list[_native.FaultyRuntime]) -> None:
        self.plan = plan
        self._runtimes = runtimes

    @property
    def fired(self) -> int:
        """How many calls have failed; after ``sticky`` only the first one counts."""
        return sum(runtime.fired for runtime in self._runtimes)

    @property
    def counts(self) -> dict[str, int]:
        """How many calls of each kind there were; kinds without one are left out."""
        total: Counter[str] = Counter()
        for runtime in self._runtimes:
            total.update(runtime.counts)
        return dict(total)

    def disarm(self) -> None:
        """Let nothing fail any more in the rest of the block, not even after ``sticky``."""
        for runtime in self._runtimes:
            runtime.disarm()

    @property
    def sites(self) -> list[str]:
        """The places in the source of the calls that failed, where they have a name."""
        return [site for runtime in self._runtimes for site in runtime.sites]


@contextlib.contextmanager
def injected(plan: str = "", *, cuda: bool = False) -> Iterator[Injection]:
    """Let calls fail as planned, in a block; for tests of what a program does then.

    Args:
        plan: ``"event_record:3:once"``; see the module. Empty: nothing fails, calls are counted.
        cuda: on GPUs, too. Each of the runtimes counts for itself.

    Raises:
        InvalidArgument: no plan, or another block is open.
        InvalidType: ``plan`` is no string.

    What serves CPU tensors outside of the block serves them inside, with the fault: worker threads,
    or the simulation of a surrounding ``use_runtime("sim")``. Pools and streams are the block's
    own. Errors are those of a real fault; ``interrupt`` raises KeyboardInterrupt, and ``memory``
    MemoryError. When the block ends nothing fails any more, but what failed has failed. The block
    belongs to the calling thread, and there is one at a time.
    """
    if not isinstance(plan, str):
        raise InvalidType(f"plan must be a str, not {type(plan).__name__}")
    if not _lock.acquire(blocking=False):
        raise InvalidArgument("another block of injected() is open")
    try:
        serving = _Faulty(current.get(), cuda)
        for runtime in serving.runtimes:
            runtime.arm(plan)
        injection = Injection(plan, serving.runtimes)
        with serve(serving):
            try:
                yield injection
            finally:
                injection.disarm()
    finally:
        _lock.release()
