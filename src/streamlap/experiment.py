"""The demo's measurement: :func:`plan` decides what fits this machine, :func:`measure` runs it."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from streamlap import limit
from streamlap.devices import cuda_reason, cuda_runtime
from streamlap.errors import InvalidArgument
from streamlap.pinned import PinnedPool, pool_stats
from streamlap.sizes import format_size
from streamlap.ways import LIMIT_ROWS, Row, rows_alone, rows_together, to_host

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
LOGICAL_CPUS = 2

_GPU_SIZE = 4000
_GPU_BLOCKING_ROUNDS = 1  # a blocking row takes seconds, and says the same each time
_CPU_SECONDS = 0.12  # of one row, so that the default demo ends within 20 s
_CPU_LARGEST = 1024

Report = Callable[[str], None]


@dataclass
class Group:
    """The rows of one dtype on one device, or on all of them at once."""

    dtype: str
    label: str
    xs: list[torch.Tensor]
    rows: list[Row]

    @property
    def devices(self) -> list[torch.device]:
        """The devices that take part."""
        return [x.device for x in self.xs]


@dataclass
class Measured:
    """A row's figures: seconds of each round, and bytes at the most."""

    row: str
    group: Group
    samples: list[float] = field(default_factory=list)
    pinned_bytes: int = 0
    device_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.samples)


@dataclass
class Plan:
    """What is run: sizes, rounds and groups; ``notes`` say what was changed to fit the machine."""

    on_gpu: bool
    size: int
    n: int
    rounds: int
    groups: list[Group]
    notes: list[str]


@dataclass
class Outcome:
    """What was measured."""

    rows: list[Measured]
    warmup_seconds: float
    first_seconds: dict[str, float]
    verified: bool

    def find(self, group: Group, row: str) -> Measured | None:
        """Return a row's figures; None where it was not run."""
        return next((m for m in self.rows if m.group is group and m.row == row), None)

    def limit(self, group: Group) -> float:
        """Return the limit of a group in seconds."""
        return max(m.seconds for m in self.rows if m.group is group and m.row in LIMIT_ROWS)


# -- what fits this machine


def plan(device: str, dtype: str | None, size: int | None, n: int, rounds: int | None) -> Plan:
    """Choose devices, sizes and rounds.

    Args:
        device: ``all``, ``cpu`` or ``cuda:0``.
        dtype: one of ``DTYPES``; None: those that the machine is good at.
        size: rows and columns of the matrix; None: by the machine.
        n: products per device; lowered if their results would not fit.
        rounds: how often each row runs; None: by the number of devices.

    Raises:
        InvalidArgument: a device or dtype that this machine does not have, or a size that does not
            fit.
    """
    devices = _devices(device)
    on_gpu = devices[0].type == "cuda"
    notes: list[str] = []
    dtypes = _dtypes(dtype, devices, notes)
    if size is None:
        size = _GPU_SIZE if on_gpu else _cpu_size(DTYPES[dtypes[0]], n)
    if rounds is None:
        rounds = 9 if len(devices) <= 2 and on_gpu else 5 if len(devices) <= 4 else 3
    itemsize = max(DTYPES[name].itemsize for name in dtypes)
    n = _count_that_fits(n, size, size * size * itemsize, devices, notes)
    if on_gpu:
        where = f", on {devices[0]} only" if len(devices) > 2 else ""
        notes.append(f"the blocking rows are timed once{where}: they take seconds each")
    if not on_gpu and len(devices) > 1:
        notes.append(
            f"the {len(devices)} logical CPU devices share the same "
            f"{len(os.sched_getaffinity(0))} cores: all at once, each has a part of them, and only "
            "one is measured alone"
        )
    if not on_gpu:
        notes.append(
            "on a CPU a copy is a small part of the time and takes a core from the products, so "
            "overlap gains nothing; stock .to('cpu') is given copy=True, and non_blocking has no "
            "effect"
        )
    generator = torch.Generator().manual_seed(0)  # the caller's random state stays as it is
    base = torch.rand(size, size, generator=generator)
    groups = []
    for name in dtypes:
        xs = [base.to(device, DTYPES[name], copy=True) for device in devices]
        for index, x in enumerate(xs if on_gpu else xs[:1]):
            blocking = not on_gpu or index == 0 or len(devices) <= 2
            label = str(x.device) if on_gpu else "cpu:0"
            groups.append(Group(name, label, [x], rows_alone(x, n, blocking)))
        if len(xs) > 1:
            groups.append(Group(name, f"all {len(xs)} at once", xs, rows_together(xs, n)))
    return Plan(on_gpu, size, n, rounds, groups, notes)


def _devices(name: str) -> list[torch.device]:
    reason = cuda_reason()
    if name == "cpu" or (name == "all" and reason):
        return [torch.device("cpu")] * LOGICAL_CPUS
    if reason:
        raise InvalidArgument(f"no GPU can be used ({reason}); use --device cpu")
    count = cuda_runtime().device_count
    if name == "all":
        return [torch.device("cuda", index) for index in range(count)]
    index = int(name.removeprefix("cuda:"))
    if index >= count:
        raise InvalidArgument(f"there is no {name}; the last GPU is cuda:{count - 1}")
    return [torch.device("cuda", index)]


def _dtypes(dtype: str | None, devices: Sequence[torch.device], notes: list[str]) -> list[str]:
    if devices[0].type == "cpu":
        if dtype == "tf32":
            raise InvalidArgument("a CPU has no TF32; use --dtype fp32 or bf16")
        return [dtype or "fp32"]
    old = [device for device in devices if torch.cuda.get_device_capability(device) < (8, 0)]
    if dtype == "tf32" and old:
        raise InvalidArgument(f"{old[0]} has no TF32; use --dtype fp32 or bf16")
    if dtype is not None:
        return [dtype]
    if old:
        notes.append(f"{old[0]} has no TF32, so only fp32 is run")
    return ["fp32"] if old else ["fp32", "tf32"]


def _cpu_size(dtype: torch.dtype, n: int) -> int:
    """Return a size of which ``n`` products take about ``_CPU_SECONDS``."""
    probe = 512
    x = torch.ones(probe, probe, dtype=dtype)
    limit.products([x], 1)
    seconds = statistics.median(
        limit.timed(lambda: limit.products([x], 1), [])[0] for _ in range(5)
    )
    size = probe * (_CPU_SECONDS / (max(n, 1) * seconds)) ** (1 / 3)
    return max(64, min(_CPU_LARGEST, int(size) // 32 * 32))


def _count_that_fits(
    n: int, size: int, nbytes: int, devices: Sequence[torch.device], notes: list[str]
) -> int:
    stats = pool_stats(devices[0])
    pinned = stats["limit"] - stats["live"]
    fits = pinned // (PinnedPool._block_bytes(nbytes) * len(devices))
    where = f"the pinned pool's limit of {format_size(stats['limit'])}"
    if devices[0].type == "cuda":
        # Inputs in every dtype and the matrix library's workspace need room beside the results.
        free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
        on_device = int(free * 0.8) // nbytes - 4
        if on_device < fits:
            fits, where = on_device, f"the {format_size(free)} of free device memory"
    if fits < 1:
        raise InvalidArgument(f"--size {size} is too large for {where}; use a smaller one")
    if fits < n:
        notes.append(f"n is {fits} instead of {n}: the results must fit {where}")
    return min(n, fits)


# -- running them


def measure(planned: Plan, report: Report) -> Outcome:
    """Warm up, check the results once, then run every row once a round.

    Args:
        planned: what to run.
        report: called with a line on what is being done.

    Rows alternate, so that a machine that slows down slows all of them.
    """
    first: dict[str, float] = {}
    begin = time.perf_counter()
    verified = True
    with matmul_precision():
        for group in planned.groups:
            for row in group.rows:
                if row.blocking and planned.on_gpu:
                    continue  # blocking copies go to fresh memory each time: nothing gets warm
                report(f"warm-up: {group.dtype}, {group.label}: {row.name}")
                seconds = _run_once(row, group, None)
                first.setdefault(row.name, seconds)
            report(f"checking results: {group.dtype}, {group.label}")
            verified = _results_are_right(group) and verified
        warmup = time.perf_counter() - begin

        figures: dict[tuple[int, str], Measured] = {}
        for index in range(planned.rounds):
            for number, group in enumerate(planned.groups):
                for row in group.rows:
                    if row.blocking and planned.on_gpu and index >= _GPU_BLOCKING_ROUNDS:
                        continue
                    report(
                        f"round {index + 1} of {planned.rounds}: {group.dtype}, {group.label}: "
                        f"{row.name}"
                    )
                    measured = figures.setdefault((number, row.name), Measured(row.name, group))
                    measured.samples.append(_run_once(row, group, measured))
    return Outcome(list(figures.values()), warmup, first, verified)


@contextlib.contextmanager
def matmul_precision(dtype: str | None = None) -> Iterator[None]:
    """Set what products of ``dtype`` need; in the end all is as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch point to a newer name for it
        before = torch.backends.cuda.matmul.allow_tf32
        try:
            if dtype is not None:
                torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def _run_once(row: Row, group: Group, measured: Measured | None) -> float:
    """Run a row and drop its results, so that the next one finds the pools as this one did."""
    torch.backends.cuda.matmul.allow_tf32 = group.dtype == "tf32"
    memory = _MemoryCount(group.devices)
    body = functools.partial(row.body, row.prepare())
    seconds, results = limit.timed(body, group.devices, row.ready)
    if measured is not None:
        measured.pinned_bytes = max(measured.pinned_bytes, memory.pinned())
        measured.device_bytes = memory.on_devices()
    del results
    return seconds


def _results_are_right(group: Group) -> bool:
    """Compare pipelined_run's results with ``x.mm(x)``, byte by byte."""
    torch.backends.cuda.matmul.allow_tf32 = group.dtype == "tf32"
    pipelined = next(row for row in group.rows if row.name == "pipelined_run")
    results = pipelined.body(None)
    for x, mine in zip(group.xs, results if len(group.xs) > 1 else [results], strict=True):
        with torch.no_grad():
            expected = to_host(x.mm(x)).view(torch.uint8)
        if not all(torch.equal(result.view(torch.uint8), expected) for result in mine):
            return False
    return True


class _MemoryCount:
    """Bytes taken since it was made: of pinned memory (ours and torch's) and of the devices."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = sorted({device.index for device in devices if device.type == "cuda"})
        self._pool = devices[0]
        if self._cuda:
            # torch looks after its pinned blocks only when asked for one.
            torch.empty(1, pin_memory=True)
        self._pinned = self._pinned_now()
        for index in self._cuda:
            torch.cuda.reset_peak_memory_stats(index)
        self._allocated = sum(torch.cuda.memory_allocated(index) for index in self._cuda)

    def pinned(self) -> int:
        """Return what is held now. Results only accumulate, so it is also the most."""
        return max(0, self._pinned_now() - self._pinned)

    def on_devices(self) -> int | None:
        """Return the most there was, all GPUs together; None for a CPU."""
        if not self._cuda:
            return None
        return sum(torch.cuda.max_memory_allocated(index) for index in self._cuda) - self._allocated

    def _pinned_now(self) -> int:
        total = pool_stats(self._pool)["live"]
        if self._cuda and hasattr(torch.cuda, "host_memory_stats"):
            stats = torch.cuda.host_memory_stats()
            total += int(stats.get("active_bytes.current", 0))
        return total
