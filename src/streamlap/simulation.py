"""What ``use_runtime("sim")`` gives: a runtime on a virtual clock, its devices and its pool."""

from __future__ import annotations

from streamlap import _native
from streamlap.devices import MAX_LOGICAL, Place, cuda_runtime
from streamlap.pinned import PinnedPool


class OwnPool(PinnedPool):
    """The pool of one runtime that serves a block."""

    def __init__(self, runtime: _native.Runtime) -> None:
        super().__init__()
        self._own = runtime

    def _runtime(self) -> _native.Runtime:
        return self._own


class Simulation:
    """One run of a program on the simulated runtime.

    CPU tensors are served by streams that have no threads: they move while the program waits, one
    step at a time, in an order that the schedule picks. The same program under the same schedule
    does the same, every time. The order checker looks on: an access that is not ordered after the
    ones before raises :class:`OrderError`.

    Attributes:
        pool: where the page-locked memory of its transfers comes from.
    """

    def __init__(self, schedule: str, costs: dict[str, float] | None) -> None:
        self._simulated = _native.SimRuntime(
            schedule=schedule, devices=MAX_LOGICAL, costs=costs or {}
        )
        self._runtime = _native.checked(self._simulated)
        self._places: dict[int, Place] = {}
        self.pool: PinnedPool = OwnPool(self._runtime)

    def now(self) -> float:
        """Return the seconds on the virtual clock."""
        return self._runtime.now()

    def replay(self) -> str:
        """Return the schedule that makes the same decisions again."""
        return f"replay({' '.join(map(str, self._simulated.decisions()))})"

    def help(self) -> bool:
        """Move one stream, if any can move; False where none can."""
        return self._simulated.help()

    @property
    def accesses(self) -> int:
        """How many accesses were checked so far."""
        return self._runtime.accesses()

    def pool_of(self, place: Place) -> PinnedPool:
        """Return the pool for results of ``place``."""
        return self.pool

    def place(self, index: int) -> Place:
        """Return a simulated logical device."""
        if index not in self._places:
            self._places[index] = Place(self._runtime, index, self)
        return self._places[index]


class Checked:
    """Runtimes of their own, with the order checker in between."""

    def __init__(self) -> None:
        self._host = _native.checked(_native.new_host_runtime())
        self._cuda: _native.Runtime | None = None
        self._places: dict[tuple[bool, int], Place] = {}
        self._pools: dict[bool, PinnedPool] = {}

    def place(self, index: int, cuda: bool = False) -> Place:
        """Return a device that is checked."""
        if (cuda, index) not in self._places:
            if cuda and self._cuda is None:
                self._cuda = _native.checked(cuda_runtime())
            runtime = self._cuda if cuda and self._cuda is not None else self._host
            self._places[cuda, index] = Place(runtime, index, self)
        return self._places[cuda, index]

    def pool_of(self, place: Place) -> PinnedPool:
        """Return the pool for results of ``place``."""
        if place.is_cuda not in self._pools:
            self._pools[place.is_cuda] = OwnPool(place.runtime)
        return self._pools[place.is_cuda]

    @property
    def accesses(self) -> int:
        """How many accesses were checked so far."""
        return self._host.accesses() + (self._cuda.accesses() if self._cuda else 0)

    def now(self) -> float:
        """Return the seconds on the host's clock."""
        return self._host.now()

    def help(self) -> bool:
        """Return False: threads of its own move it."""
        return False


def spend(seconds: float) -> None:
    """From inside a computed item: let it take so many seconds of the virtual clock.

    Raises:
        InvalidArgument: the calling thread computes nothing for a simulation.
    """
    _native.spend(seconds)
