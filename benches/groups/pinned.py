"""The memory of the results: how fast it grows, and what it costs to use it again."""

from __future__ import annotations

import torch

from ..checks import require_usable
from ..ours import PoolGrowth, PoolReuse
from ..peers.cupy_pinned import CuPyReuse
from ..peers.host_alloc import HostAlloc
from ..peers.torch_memory import TorchGrowth, TorchReuse, touch
from ..rows import Planned, Row, Setting, Table

TITLE = "Memory of the results"
ABOUT = (
    "New page-locked memory has to be found, cleared and locked; a pool saves that from the second "
    "time on. Growth is one new block with nothing cached, reuse the time of one block taken and "
    "let go of. On a CPU no memory is locked: there, taking a block includes a write to each page."
)
NOT_ON_CPU = ""

MIB = 1 << 20


def plan(setting: Setting) -> list[Planned]:
    device, on_gpu = setting.device, setting.on_gpu
    large = (4 if setting.quick else 1024 if on_gpu else 256) * MIB
    block = (1 if setting.quick else 64 if on_gpu else 16) * MIB
    times = 5 if setting.quick else 200 if on_gpu else 10
    count = 4 if setting.quick else 64 if on_gpu else 16
    kind = "pinned" if on_gpu else "ordinary"

    def growth() -> Table:
        peers = [Row("torch.empty", lambda: TorchGrowth(large, on_gpu))]
        if on_gpu:
            peers = [
                Row("cudaHostAlloc", lambda: HostAlloc(large)),
                Row("torch pin_memory=True", lambda: TorchGrowth(large, on_gpu)),
            ]
        ours = Row("empty_pinned", lambda: PoolGrowth(large, device), "ours")
        return Table(
            [*peers, ours],
            [device],
            check=lambda blocks: require_usable(blocks, on_gpu),
            nbytes=large,
            settings={"bytes": large},
        )

    def many() -> Table:
        # Memory that a virtual machine has never used comes slowly, whoever asks for it.
        touch(torch.empty(count * block, dtype=torch.uint8))
        peers = [Row("torch.empty", lambda: TorchGrowth(block, on_gpu, count))]
        if on_gpu:
            peers = [
                Row("cudaHostAlloc", lambda: HostAlloc(block, count)),
                Row("torch pin_memory=True", lambda: TorchGrowth(block, on_gpu, count)),
            ]
        ours = [
            Row("empty_pinned", lambda: PoolGrowth(block, device, count), "ours"),
            Row("prewarm", lambda: PoolGrowth(block, device, count, ahead=True), "ours"),
        ]
        return Table(
            [*peers, *ours],
            [device],
            check=lambda blocks: require_usable(blocks, on_gpu),
            nbytes=count * block,
            settings={"bytes": count * block, "block": block},
        )

    def reuse() -> Table:
        peers = [Row("torch.empty", lambda: TorchReuse(block, on_gpu, times))]
        if on_gpu:
            peers = [
                Row("torch's pinned cache", lambda: TorchReuse(block, on_gpu, times)),
                Row("CuPy's pinned pool", lambda: CuPyReuse(block, times)),
            ]
        ours = Row("empty_pinned", lambda: PoolReuse(block, device, times), "ours")
        return Table(
            [*peers, ours],
            [device],
            check=lambda blocks: require_usable(blocks, on_gpu),
            count=times,
            settings={"bytes": block, "times": times},
        )

    return [
        Planned(f"growth: {large // MIB} MiB of {kind} memory", growth),
        Planned(f"growth: {count} blocks of {block // MIB} MiB", many),
        Planned(f"reuse: a block of {block // MIB} MiB", reuse),
    ]
