"""What kernels do on the way: prepared trees, casts, transposes, and the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

import streamlap

from ..checks import poison
from ..limit import synchronize
from ..ours import ToCpu
from ..peers.ready_copies import CatThenCopy, CopyEach
from ..rows import Planned, Row, Setting, Table, Tensors, Way

TITLE = "On the way"
ABOUT = (
    "Moves by a kernel: of ragged trees, with a cast, of what lies apart, and back to a device. "
    "Ready: into memory that was there before."
)
NOT_ON_CPU = ""


class Values:
    """Float tensors of the given numbers of elements; new content every round, all finite."""

    def __init__(self, device: torch.device, counts: Sequence[int], pinned: bool = False) -> None:
        self.tensors = [
            torch.empty(count, device=device, pin_memory=pinned and device.type == "cpu")
            for count in counts
        ]
        self._device = device
        self.change(0)

    def change(self, index: int) -> None:
        generator = torch.Generator(self._device).manual_seed(index)
        for tensor in self.tensors:
            tensor.uniform_(generator=generator)


class Prepared(Way):
    """A ``TreeCopy``, into new memory or into that of the call before."""

    def __init__(
        self, sources: Sequence[torch.Tensor], ready: bool, dtype: torch.dtype | None = None
    ) -> None:
        self.sources = list(sources)
        self.copy = streamlap.TreeCopy(like=self.sources, dtype=dtype)
        self.ready: Tensors | None = self.copy(self.sources).result() if ready else None

    def poison(self) -> None:
        if self.ready is not None:
            poison(self.ready)

    def go(self) -> Tensors:
        return self.copy(self.sources, out=self.ready).result()


class CastEach(CopyEach):
    """``to(dtype)`` on the device, then ``copy_``, of each."""

    def __init__(self, sources: Sequence[torch.Tensor], pinned: bool, dtype: torch.dtype) -> None:
        super().__init__([source.to(dtype) for source in sources], pinned)
        self.sources, self.dtype = list(sources), dtype

    def go(self) -> Tensors:
        for result, source in zip(self.ready, self.sources, strict=True):
            result.copy_(source.to(self.dtype), non_blocking=True)
        synchronize([self.sources[0].device])
        return self.ready


class CastToCpu(ToCpu):
    """``to_cpu(dtype=)`` of a list."""

    def __init__(self, sources: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(sources)
        self.dtype = dtype

    def go(self) -> Tensors:
        return streamlap.to_cpu(self.sources, dtype=self.dtype).result()


class OutTransposed(Way):
    """Of a transpose into contiguous memory: ours, or torch's ``contiguous`` and a copy."""

    def __init__(self, source: torch.Tensor, ours: bool) -> None:
        self.source, self.ours = source, ours
        self.out = streamlap.empty_pinned(source.shape, source.dtype)
        self.out.zero_()

    def poison(self) -> None:
        poison([self.out])

    def go(self) -> Tensors:
        if self.ours:
            return [streamlap.to_cpu(self.source, out=self.out).result()]
        self.out.copy_(self.source.contiguous(), non_blocking=True)
        synchronize([self.source.device])
        return [self.out]


class Back(Way):
    """Leaves of one pinned block into tensors that are there."""

    def __init__(self, device: torch.device, host: Values, ours: bool) -> None:
        self.device, self.ours = device, ours
        self.host = host
        self.out = [torch.zeros_like(tensor, device=device) for tensor in host.tensors]
        self.block = streamlap.TreeCopy(like=self.out)(self.out).result()  # of that device's pool

    def before(self) -> None:
        for mine, theirs in zip(self.block, self.host.tensors, strict=True):
            mine.copy_(theirs)

    def poison(self) -> None:
        poison(self.out)

    def go(self) -> Tensors:
        if self.ours:
            return streamlap.to_device(self.block, self.device, out=self.out).result()
        for result, source in zip(self.out, self.block, strict=True):
            result.copy_(source, non_blocking=True)
        synchronize([self.device])
        return self.out


def _table(
    setting: Setting, values: Values, rows: list[Row], expected: Callable[[], Tensors]
) -> Table:
    tensors = values.tensors
    return Table(
        rows,
        [setting.device],
        values.change,
        expected,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        count=len(tensors),
        settings={"tensors": len(tensors)},
    )


def _trees(setting: Setting, counts: Sequence[int]) -> Table:
    values, on_gpu = Values(setting.device, counts), setting.on_gpu
    tensors = values.tensors
    rows = [
        Row("copy_ each, ready", lambda: CopyEach(tensors, pinned=on_gpu)),
        Row("torch.cat, one copy, ready", lambda: CatThenCopy(tensors, pinned=on_gpu)),
        Row("to_cpu(list)", lambda: ToCpu(tensors), "ours"),
        Row("TreeCopy", lambda: Prepared(tensors, False), "ours"),
        Row("TreeCopy, ready", lambda: Prepared(tensors, True), "ours"),
    ]
    return _table(setting, values, rows, lambda: tensors)


def _casts(setting: Setting, counts: Sequence[int]) -> Table:
    values, on_gpu, wanted = Values(setting.device, counts), setting.on_gpu, torch.bfloat16
    tensors = values.tensors
    rows = [
        Row("to(dtype), copy_ each, ready", lambda: CastEach(tensors, on_gpu, wanted)),
        Row("to_cpu(dtype=)", lambda: CastToCpu(tensors, wanted), "ours"),
        Row("TreeCopy(dtype=), ready", lambda: Prepared(tensors, True, wanted), "ours"),
    ]
    return _table(setting, values, rows, lambda: [tensor.to(wanted) for tensor in tensors])


def _transposed(setting: Setting, size: int) -> Table:
    values = Values(setting.device, [size * size])
    source = values.tensors[0].view(size, size).t()
    rows = [
        Row("contiguous(), copy_, ready", lambda: OutTransposed(source, False)),
        Row("to_cpu(out=)", lambda: OutTransposed(source, True), "ours"),
    ]
    return _table(setting, values, rows, lambda: [source])


def _back(setting: Setting, counts: Sequence[int]) -> Table:
    values = Values(torch.device("cpu"), counts, pinned=setting.on_gpu)
    rows = [
        Row("copy_ each", lambda: Back(setting.device, values, False)),
        Row("to_device(out=)", lambda: Back(setting.device, values, True), "ours"),
    ]
    return _table(setting, values, rows, lambda: values.tensors)


def plan(setting: Setting) -> list[Planned]:
    count, many, size = (50, 200, 200) if setting.quick else (2000, 10_000, 4000)
    if not setting.on_gpu and not setting.quick:
        many, size = 2000, 2000
    # From 4 bytes to 64 KiB, a few of them large.
    ragged = [1 + (37 * i) % (16_384 if i % 50 == 0 else 512) for i in range(many)]
    return [
        *(
            Planned(
                f"{count} leaves of a tree of {each} KiB",
                functools.partial(_trees, setting, [each * 256] * count),
            )
            for each in (4, 16, 64)
        ),
        Planned(f"{many} ragged leaves", functools.partial(_trees, setting, ragged)),
        Planned(
            f"{count} leaves of 64 KiB in fp32, as bf16",
            functools.partial(_casts, setting, [16_384] * count),
        ),
        Planned(f"a transpose of {size}x{size}", functools.partial(_transposed, setting, size)),
        Planned(
            f"{count} leaves of 16 KiB back to the device",
            functools.partial(_back, setting, [4096] * count),
        ),
    ]
