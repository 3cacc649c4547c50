"""The ways to bring many products to the host that the demo compares, each as a row.

Stock ways are plain torch; the rows of the limit are in ``limit.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from streamlap import limit
from streamlap.devices import use_runtime
from streamlap.pipeline import parallel_run, pipelined_run, run

COMPUTE_ALONE = "compute alone"
COPY_ALONE = "copy alone"
LIMIT_ROWS = (COMPUTE_ALONE, COPY_ALONE)
# The rows that do all of the work; the others do a part of it.
WHOLE_ROWS = ("pipelined_run", "stock non_blocking", "run then copy")


@dataclass(frozen=True)
class Row:
    """One way to do the work.

    Attributes:
        prepare: makes what ``body`` is given, outside the clock.
        body: what is timed; what it returns is kept until the memory has been counted.
        blocking: takes seconds on a GPU.
        ready: the results can be read when ``body`` returns; else the clock waits for the devices.
    """

    name: str
    body: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    blocking: bool = False
    ready: bool = False


def to_host(result: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy by stock torch."""
    # A CPU tensor is on the host already; copy=True makes torch copy it nevertheless.
    return result.to("cpu", non_blocking=non_blocking, copy=True)


def _stock_products(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    with torch.no_grad():
        results = [x.mm(x) for _ in range(n)]
    limit.synchronize([x.device])
    return results


def _stock_run_then_copy(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    return [to_host(result) for result in _stock_products(x, n)]


def _stock_non_blocking(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    with torch.no_grad():
        results = [x.mm(x) for _ in range(n)]
        on_host = [to_host(result, non_blocking=True) for result in results]
    limit.synchronize([x.device])  # until then the results must not be read
    return on_host


def _limit_rows(xs: list[torch.Tensor], n: int) -> list[Row]:
    return [
        Row(COMPUTE_ALONE, lambda _: limit.products(xs, n)),
        Row(COPY_ALONE, limit.copies, lambda: limit.ready_pairs(xs, n)),
    ]


def rows_alone(x: torch.Tensor, n: int, blocking: bool) -> list[Row]:
    """Return the rows of one device; ``blocking`` says whether the slow ones are among them."""
    rows = [Row("run alone", lambda _: run(x, n))]
    if blocking:
        rows += [
            Row(
                "copy blocking",
                lambda ready: [to_host(result) for result in ready],
                lambda: _stock_products(x, n),
                blocking=True,
                ready=True,
            ),
            Row("run then copy", lambda _: _stock_run_then_copy(x, n), blocking=True, ready=True),
        ]
    # Stock before the limit's copies: torch's pinned memory is new to its first user, and warm-up
    # shows what that costs.
    rows.append(Row("stock non_blocking", lambda _: _stock_non_blocking(x, n), ready=True))
    rows.append(Row("pipelined_run", lambda _: pipelined_run(x, n), ready=True))
    return rows + _limit_rows([x], n)


def rows_together(xs: list[torch.Tensor], n: int) -> list[Row]:
    """Return the rows of several devices at once."""

    @contextlib.contextmanager
    def on_logical_devices() -> Iterator[None]:
        if xs[0].device.type == "cpu":
            with use_runtime("host", devices=len(xs)):
                yield
        else:
            yield

    def parallel(_: Any) -> Any:
        with on_logical_devices():
            return parallel_run(xs, n)

    def pipelined(_: Any) -> Any:
        with on_logical_devices():
            return pipelined_run(xs, n)

    return [
        Row("parallel_run", parallel),
        Row("pipelined_run", pipelined, ready=True),
        *_limit_rows(xs, n),
    ]
