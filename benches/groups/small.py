"""Many small tensors: a model's gradients, say."""

from __future__ import annotations

import functools

import torch

from ..ours import CallToCpu, ToCpu
from ..peers.ready_copies import CatThenCopy, CopyEach, ForeachCopy
from ..peers.stock_cpu import EachToCpu
from ..peers.stock_non_blocking import CallNonBlocking, EachNonBlocking
from ..rows import Planned, Row, Setting, Table
from ..sources import Sources

TITLE = "Many small tensors"
ABOUT = (
    "2000 tensors of one size to the host; the cost of a call for each is what there is to save. "
    "Ready: into memory that was there before."
)
NOT_ON_CPU = ""

KIB = 1 << 10
CALLS = 50


def _rows(tensors: list[torch.Tensor], on_gpu: bool) -> list[Row]:
    return [
        Row("copy_ each, ready", lambda: CopyEach(tensors, pinned=on_gpu)),
        Row("_foreach_copy_, ready", lambda: ForeachCopy(tensors, pinned=on_gpu)),
        Row(".to(non_blocking) each", lambda: EachNonBlocking(tensors))
        if on_gpu
        else Row(".to(copy=True) each", lambda: EachToCpu(tensors)),
        Row("torch.cat, one copy, ready", lambda: CatThenCopy(tensors, pinned=on_gpu)),
        Row("to_cpu(list)", lambda: ToCpu(tensors), "ours"),
    ]


def _call_rows(tensor: torch.Tensor, on_gpu: bool) -> list[Row]:
    """What the host spends before it can go on; the copy itself is not timed."""
    return [
        Row(".to(non_blocking)", lambda: CallNonBlocking(tensor))
        if on_gpu
        else Row(".to(copy=True)", lambda: EachToCpu([tensor])),
        Row("to_cpu", lambda: CallToCpu(tensor), "ours"),
    ]


def plan(setting: Setting) -> list[Planned]:
    count = 100 if setting.quick else 2000

    def build(each: int) -> Table:
        sources = Sources(setting.device, count, each)
        return Table(
            _rows(sources.tensors, setting.on_gpu),
            [setting.device],
            sources.change,
            sources.expected,
            nbytes=count * each,
            count=count,
            settings={"tensors": count, "bytes_each": each},
        )

    def build_calls() -> Table:
        sources = Sources(setting.device, 1, 64 * KIB)
        return Table(
            _call_rows(sources.tensors[0], setting.on_gpu),
            [setting.device],
            sources.change,
            sources.expected,
            count=1,
            calls=1 if setting.quick else CALLS,
            settings={"tensors": 1, "bytes_each": 64 * KIB},
        )

    return [
        *(
            Planned(f"{count} tensors of {each} KiB", functools.partial(build, each * KIB))
            for each in (4, 16, 64)
        ),
        Planned("the call for one tensor of 64 KiB", build_calls),
    ]
