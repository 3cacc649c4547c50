"""What ``use_runtime("sim")`` gives: a runtime on a virtual clock, its devices and its pool."""

from __future__ import annotations

from streamlap import _native
from streamlap.devices import MAX_LOGICAL, Place
from streamlap.pinned import PinnedPool


class _SimulatedPool(PinnedPool):
    """The pool of one simulation."""

    def __init__(self, runtime: _native.Runtime) -> None:
        super().__init__()
        self._simulated = runtime

    def _runtime(self) -> _native.Runtime:
        return self._simulated


class Simulation:
    """One run of a program on the simulated runtime.

    CPU tensors are served by streams that have no threads: they move while the program waits, one
    step at a time, in an order that the schedule picks. The same program under the same schedule
    does the same, every time.

    Attributes:
        pool: where the page-locked memory of its transfers comes from.
    """

    def __init__(self, schedule: str, costs: dict[str, float] | None) -> None:
        self._runtime = _native.SimRuntime(
            schedule=schedule, devices=MAX_LOGICAL, costs=costs or {}
        )
        self._places: dict[int, Place] = {}
        self.pool: PinnedPool = _SimulatedPool(self._runtime)

    def now(self) -> float:
        """Return the seconds on the virtual clock."""
        return self._runtime.now()

    def replay(self) -> str:
        """Return the schedule that makes the same decisions again."""
        return f"replay({' '.join(map(str, self._runtime.decisions()))})"

    def help(self) -> bool:
        """Move one stream, if any can move; False where none can."""
        return self._runtime.help()

    def place(self, index: int) -> Place:
        """Return a simulated logical device."""
        if index not in self._places:
            self._places[index] = Place(self._runtime, index, self)
        return self._places[index]


def spend(seconds: float) -> None:
    """From inside a computed item: let it take so many seconds of the virtual clock.

    Raises:
        InvalidArgument: the calling thread computes nothing for a simulation.
    """
    _native.spend(seconds)
