"""How long a pipeline would take on a machine that is not there: a run on the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamlap import _native, watch
from streamlap.batch import WHOLE
from streamlap.checks import as_count, as_seconds
from streamlap.devices import use_runtime
from streamlap.errors import InvalidArgument
from streamlap.simulation import spend

_PIECE = 64  # bytes that are really copied for each result; the bandwidth is scaled to them


@dataclass(frozen=True)
class Machine:
    """What a prediction has to know, as measured on one.

    Attributes:
        name: what it is called.
        to_host: bytes a second from the device into page-locked memory.
        per_copy: seconds that a copy takes beside its bytes.
        products: seconds of one product of 4000x4000, by dtype.
    """

    name: str
    to_host: float
    per_copy: float
    products: dict[str, float]


MACHINES = {
    # Medians of the bench binary on one NVIDIA H200 (benches/results/binary), over 50 products.
    "h200": Machine(
        "NVIDIA H200",
        to_host=55.2e9,
        per_copy=2.2e-6,
        products={"fp32": 0.13084 / 50, "tf32": 0.0161 / 50, "bf16": 0.0082 / 50},
    )
}


@dataclass(frozen=True)
class Prediction:
    """A predicted run, all in seconds.

    Attributes:
        seconds: until all results are on the host.
        compute: all items computed, alone.
        copy: all results copied, alone.
        one_by_one: compute, then copy.
    """

    seconds: float
    compute: float
    copy: float

    @property
    def limit(self) -> float:
        """The longer of compute and copy: no overlap makes it shorter."""
        return max(self.compute, self.copy)

    @property
    def over_limit(self) -> float:
        """The time over the limit; 1 where there is nothing to do."""
        return self.seconds / self.limit if self.limit else 1.0

    @property
    def one_by_one(self) -> float:
        """Compute, then copy."""
        return self.compute + self.copy


def predict(
    compute: float, nbytes: int, n: int = 50, *, depth: int = 4, machine: str | Machine = "h200"
) -> Prediction:
    """Say how long :func:`pipelined_run` would take.

    The pipeline itself runs, on the simulated runtime: its streams, events and order, at the
    machine's costs. For ``n`` equal items that is ``n max(g, c) + min(g, c)``, with ``g`` seconds a
    call and ``c`` a copy.

    Args:
        compute: seconds of one call of ``fn`` on the device.
        nbytes: bytes of one result.
        n: how many items.
        depth: how many results are on the device at once.
        machine: a name in ``streamlap.prediction.MACHINES``, or a ``Machine``.

    Raises:
        InvalidArgument, InvalidType: a number that makes no sense, an unknown machine.

    Launching costs nothing, results are pinned and memory is warm. Thread-safe.
    """
    watch.enter()
    seconds = as_seconds(compute, "compute")
    size = as_count(nbytes, "nbytes")
    count = as_count(n, "n")
    window = as_count(depth, "depth", 1)
    found = MACHINES.get(machine) if isinstance(machine, str) else machine
    if not isinstance(found, Machine):
        raise InvalidArgument(f"unknown machine {machine!r}; there is {', '.join(MACHINES)}")
    each = found.per_copy + size / found.to_host
    rate = _PIECE / (size / found.to_host) if size else 0.0
    total = _run(seconds, count, window, {"per_copy": found.per_copy, "memcpy": rate})
    return Prediction(total, count * seconds, count * each)


def _run(compute: float, n: int, depth: int, costs: dict[str, float]) -> float:
    """Run the pipeline on the virtual clock; return its end."""
    source = torch.zeros(_PIECE, dtype=torch.uint8)
    results = torch.zeros(n * _PIECE, dtype=torch.uint8)
    with use_runtime("sim", schedule="eager", costs=costs) as simulation:
        place = simulation.place(0)
        stream = place.runtime.stream(0, "compute")
        copies: list[_native.Transfer] = []
        for index in range(n):
            if index >= depth:
                copies[index - depth].wait_on_stream(stream)
            stream.launch(lambda: spend(compute))
            copies.append(
                place.engine.submit(
                    device=0,
                    to_device=False,
                    items=[
                        (results.data_ptr() + index * _PIECE, source.data_ptr(), _PIECE, 1, None)
                    ],
                    after=[stream],
                    chunk_bytes=WHOLE,
                    keep_source=source,
                    keep_destination=results,
                    timed=False,
                )
            )
        for copy in copies:
            copy.sync()
        return float(simulation.now())
