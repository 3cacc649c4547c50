"""What ``use_runtime("sim")`` gives: CPU tensors on a virtual clock."""

from __future__ import annotations

from streamlap import _native
from streamlap.serving import Serving, current

MAX_LOGICAL = 64


class Simulation(Serving):
    """One run of a program on the simulated runtime.

    CPU tensors are served by streams that have no threads: they move while the program waits, one
    step at a time, in an order that the schedule picks. The same program under the same schedule
    does the same, every time. The order checker looks on: an access that is not ordered after the
    ones before raises :class:`OrderError`.

    GPUs are none of its business: whatever served them before still does.

    Attributes:
        pool: where the page-locked memory of its transfers comes from.
    """

    simulated = True

    def __init__(self, schedule: str, costs: dict[str, float] | None) -> None:
        super().__init__(current.get())
        self._simulated = _native.SimRuntime(
            schedule=schedule, devices=MAX_LOGICAL, costs=costs or {}
        )
        self._runtime = _native.checked(self._simulated)

    def _make_runtime(self, cuda: bool) -> _native.Runtime | None:
        return None if cuda else self._runtime

    def now(self) -> float:
        """Return the seconds on the virtual clock."""
        return self._runtime.now()

    def replay(self) -> str:
        """Return the schedule that makes the same decisions again."""
        return f"replay({' '.join(map(str, self._simulated.decisions()))})"

    def help(self) -> bool:
        """Move one stream, if any can move; False where none can."""
        return self._simulated.help()

    def close(self) -> None:
        """End the block: nobody is there any more to move what is in flight, so it moves now."""
        if not _native.forked() and not _native.ending():
            self._simulated.finish()
        super().close()


def spend(seconds: float) -> None:
    """From inside a computed item: let it take so many seconds of the virtual clock.

    Raises:
        InvalidArgument: the calling thread computes nothing for a simulation.
    """
    _native.spend(seconds)
