"""Results in ordinary memory, which the copy engine cannot reach by itself."""

from __future__ import annotations

import torch

from ..ours import ToCpu, ToCpuOut
from ..peers.ready_copies import CopyEach
from ..peers.stock_cpu import EachToCpu
from ..rows import Planned, Row, Setting, Table
from ..sources import Sources

TITLE = "Results in ordinary memory"
ABOUT = (
    "Ordinary (pageable) memory as destination. The copy to page-locked memory beside it is the "
    "wire: what any way could reach at most. Fresh memory also pays for its pages."
)
NOT_ON_CPU = "there all memory is ordinary"

MIB = 1 << 20


def _rows(tensors: list[torch.Tensor]) -> list[Row]:
    return [
        Row("pinned copy (the wire)", lambda: CopyEach(tensors, pinned=True), "bound"),
        Row("stock .cpu(), fresh", lambda: EachToCpu(tensors)),
        Row("stock copy_, warm", lambda: CopyEach(tensors, pinned=False)),
        Row("to_cpu(pin=False)", lambda: ToCpu(tensors, pin=False), "ours"),
        Row("to_cpu(out=ordinary), warm", lambda: ToCpuOut(tensors), "ours"),
    ]


def plan(setting: Setting) -> list[Planned]:
    count, each = (4, MIB) if setting.quick else (16, 64 * MIB)

    def build() -> Table:
        sources = Sources(setting.device, count, each)
        return Table(
            _rows(sources.tensors),
            [setting.device],
            sources.change,
            sources.expected,
            nbytes=count * each,
            settings={"tensors": count, "bytes_each": each},
        )

    return [Planned(f"{count} tensors of {each // MIB} MiB", build)]
