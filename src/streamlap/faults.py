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
from typing import cast

from streamlap import _native
from streamlap.devices import Place, checking_now, cuda_runtime, host_place, simulation
from streamlap.errors import InvalidArgument, InvalidType
from streamlap.pinned import PinnedPool
from streamlap.simulation import Checked, OwnPool

_lock = threading.Lock()


class _Side:
    """One runtime on which calls fail, its places and its pool."""

    def __init__(self, inner: _native.Runtime) -> None:
        self.runtime = _native.FaultyRuntime(inner)
        self.places: dict[int, Place] = {}
        self.pool: PinnedPool = OwnPool(self.runtime)


# One for each runtime, used again by later blocks: streams live to the end of the process.
_side = functools.cache(_Side)


class _Faulty:
    """What serves in a block of :func:`injected`."""

    def __init__(self) -> None:
        self._inner = host_place(0)
        self.sides = {False: _side(self._inner.runtime)}

    def place(self, index: int, cuda: bool = False) -> Place:
        """Return a device whose calls may fail."""
        if cuda and cuda not in self.sides:
            self.sides[cuda] = _side(cuda_runtime())
        places = self.sides[cuda].places
        if index not in places:
            places[index] = Place(self.sides[cuda].runtime, index, cast("Checked", self))
        return places[index]

    def pool_of(self, place: Place) -> PinnedPool:
        """Return the pool for results of ``place``."""
        return self.sides[place.is_cuda].pool

    def now(self) -> float:
        """Return the seconds on the clock of the runtime beneath."""
        return self._inner.runtime.now()

    def help(self) -> bool:
        """Return False: a simulation beneath is asked by itself."""
        return False


class Injection:
    """What has happened in a block of :func:`injected`.

    Attributes:
        plan: as it was written.
    """

    def __init__(self, plan: str, sides: list[_Side]) -> None:
        self.plan = plan
        self._runtimes = [side.runtime for side in sides]

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
        serving = _Faulty()
        if cuda:
            serving.place(0, cuda=True)
        sides = list(serving.sides.values())
        for side in sides:
            side.runtime.arm(plan)
        before = simulation.set(cast("Checked", serving))
        before_cuda = checking_now.set(cast("Checked", serving)) if cuda else None
        try:
            yield Injection(plan, sides)
        finally:
            for side in sides:
                side.runtime.disarm()
            if before_cuda is not None:
                checking_now.reset(before_cuda)
            simulation.reset(before)
    finally:
        _lock.release()
