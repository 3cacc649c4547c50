"""What kernels do on the way: prepared trees, casts, transposes, and the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

import streamlap

from ..checks import WrongResult, poison
from ..limit import synchronize
from ..ours import ToCpu
from ..peers.ready_copies import CatThenCopy, CopyEach
from ..rows import Planned, Row, Setting, Table, Tensors, Way

TITLE = "On the way"
ABOUT = (
    "Moves by a kernel: of ragged trees, with a cast, of what lies apart, and back to a device. "
    "Ready: into memory that was there before. Device time: from the start of the first copy or "
    "kernel to the end of the last, beside one copy of as many bytes."
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


class Ragged(Values):
    """Leaves of 1 byte to 1 MiB, as many of each power of two, one after the other."""

    def __init__(self, device: torch.device, count: int) -> None:
        powers = 20
        sizes = [
            min(1 << 20, (1 << index % (powers + 1)) + 37 * index % 31) for index in range(count)
        ]
        self.base = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.tensors = list(self.base.split(sizes))  # most of them at odd addresses
        self._device = device
        self.change(0)

    def change(self, index: int) -> None:
        self.base.random_(generator=torch.Generator(self._device).manual_seed(index))


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


class OnDevice(Way):
    """What the device takes for one transfer: ``start`` begins it."""

    def __init__(
        self,
        start: Callable[[], streamlap.Transfer],
        prepare: Callable[[], object] = lambda: None,
        results: Callable[[], Tensors] | None = None,
    ) -> None:
        self.start, self.prepare, self.own = start, prepare, results

    def before(self) -> None:
        self.prepare()

    def timed(self, devices: Sequence[torch.device]) -> tuple[float, Tensors]:
        synchronize(devices)
        transfer = self.start()
        found = transfer.result()
        value = self.own() if self.own else found if isinstance(found, list) else [found]
        return transfer.elapsed(), value


def one_copy(tensors: Sequence[torch.Tensor], to: torch.device | None = None) -> OnDevice:
    """Of the same bytes in one tensor, to the host or to a device."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sizes = [tensor.numel() for tensor in tensors]
    source = flat if to is None else streamlap.empty_pinned(flat.shape, flat.dtype)
    out = streamlap.empty_pinned(flat.shape, flat.dtype) if to is None else flat.to(to)
    return OnDevice(
        lambda: (
            streamlap.to_cpu(source, out=out)
            if to is None
            else streamlap.to_device(source, to, out=out)
        ),
        lambda: source.copy_(torch.cat([tensor.flatten() for tensor in tensors])),
        lambda: list(out.split(sizes)),
    )


class Products(Way):
    """Products on the current stream, and a tree that is copied again and again meanwhile."""

    def __init__(
        self, device: torch.device, size: int, copies: Callable[[], object] | None
    ) -> None:
        self.x = torch.rand(size, size, device=device)
        self.out = torch.empty_like(self.x)
        self.copies = copies
        self.stream = torch.cuda.Stream(device)

    def timed(self, devices: Sequence[torch.device]) -> tuple[float, Tensors]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize(devices)
        with torch.cuda.stream(self.stream):  # not the current one: copies come after that
            begin.record()
            for _ in range(20):
                torch.mm(self.x, self.x, out=self.out)
            end.record()
        done = 0
        while self.copies is not None and not end.query():
            self.copies()
            done += 1
        end.synchronize()
        if self.copies is not None and done < 2:
            raise WrongResult(f"{done} copies ran beside the products")
        return begin.elapsed_time(end) / 1e3, [self.out]


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


def _trees(setting: Setting, make: Callable[[], Values]) -> Table:
    values, on_gpu = make(), setting.on_gpu
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


def _on_device(values: Values, setting: Setting, rows: list[Row], tensors: Tensors) -> Table:
    table = _table(setting, values, rows, lambda: tensors)
    table.against = "limit"
    return table


def _tree_on_device(setting: Setting, make: Callable[[], Values]) -> Table:
    values = make()
    tensors = values.tensors
    copy = streamlap.TreeCopy(like=tensors)
    out = copy(tensors).result()
    rows = [
        Row("one copy of as many bytes", lambda: one_copy(tensors), "limit"),
        Row("TreeCopy, ready", lambda: OnDevice(lambda: copy(tensors, out=out)), "ours"),
    ]
    return _on_device(values, setting, rows, tensors)


def _cast_on_device(setting: Setting, counts: Sequence[int]) -> Table:
    values, wanted = Values(setting.device, counts), torch.bfloat16
    tensors = values.tensors
    plain, copy = streamlap.TreeCopy(like=tensors), streamlap.TreeCopy(like=tensors, dtype=wanted)
    first, out = plain(tensors).result(), copy(tensors).result()
    rows = [
        Row(
            "in fp32, by a TreeCopy",
            lambda: OnDevice(
                lambda: plain(tensors, out=first),
                results=lambda: [leaf.to(wanted) for leaf in first],
            ),
            "limit",
        ),
        Row("as bf16", lambda: OnDevice(lambda: copy(tensors, out=out)), "ours"),
    ]
    table = _on_device(values, setting, rows, tensors)
    table.expected = lambda: [leaf.to(wanted) for leaf in tensors]
    return table


def _transpose_on_device(setting: Setting, size: int) -> Table:
    values = Values(setting.device, [size * size])
    (flat,) = values.tensors
    source = flat.view(size, size).t()
    out = streamlap.empty_pinned(source.shape, source.dtype)
    rows = [
        Row(
            "one copy of as many bytes",
            lambda: OnDevice(
                lambda: streamlap.to_cpu(flat, out=out.view(-1)),
                results=lambda: [out.view(size, size).t()],
            ),
            "limit",
        ),
        Row(
            "a transpose",
            lambda: OnDevice(lambda: streamlap.to_cpu(source, out=out), results=lambda: [out]),
            "ours",
        ),
    ]
    return _on_device(values, setting, rows, [source])


def _back_on_device(setting: Setting, counts: Sequence[int]) -> Table:
    values = Values(torch.device("cpu"), counts)
    leaves, device = values.tensors, setting.device
    out = [torch.zeros_like(leaf, device=device) for leaf in leaves]
    copy = streamlap.TreeCopy(like=out)
    block = copy(out).result()

    def fill() -> None:
        for own, leaf in zip(block, leaves, strict=True):
            own.copy_(leaf)

    rows = [
        Row("one copy of as many bytes", lambda: one_copy(leaves, device), "limit"),
        Row(
            "to_device(out=)",
            lambda: OnDevice(lambda: streamlap.to_device(block, device, out=out), fill),
            "ours",
        ),
    ]
    return _on_device(values, setting, rows, leaves)


def _require_finite(results: Tensors) -> None:
    if not all(bool(result.isfinite().all()) for result in results):
        raise WrongResult("not finite")


def _beside_products(setting: Setting, counts: Sequence[int], size: int) -> Table:
    values = Values(setting.device, counts)
    tensors, device = values.tensors, setting.device
    copy = streamlap.TreeCopy(like=tensors)
    out = copy(tensors).result()
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    whole = streamlap.empty_pinned(flat.shape, flat.dtype)
    rows = [
        Row("products alone", lambda: Products(device, size, None), "limit"),
        Row(
            "beside copies of one tensor",
            lambda: Products(device, size, lambda: streamlap.to_cpu(flat, out=whole).result()),
            "bound",
        ),
        Row(
            "beside a TreeCopy, ready",
            lambda: Products(device, size, lambda: copy(tensors, out=out).result()),
            "ours",
        ),
    ]
    return Table(
        rows,
        [device],
        check=_require_finite,
        against="limit",
        settings={"products": 20, "size": size},
    )


def plan(setting: Setting) -> list[Planned]:
    count, many, size = (50, 200, 200) if setting.quick else (2000, 10_000, 4000)
    if not setting.on_gpu and not setting.quick:
        many, size = 2000, 2000
    device = setting.device
    ragged = functools.partial(Ragged, device, many)

    def even(kib: int) -> Callable[[], Values]:
        return functools.partial(Values, device, [kib * 256] * count)

    beside = [
        Planned(
            f"20 products of 4096x4096 beside {count} leaves of 16 KiB",
            functools.partial(_beside_products, setting, [4096] * count, 4096),
        )
    ]
    on_device = [
        *(
            Planned(
                f"{count} leaves of {each} KiB, device time",
                functools.partial(_tree_on_device, setting, even(each)),
            )
            for each in (4, 16, 64)
        ),
        Planned(
            f"{many} leaves of 1 B to 1 MiB, device time",
            functools.partial(_tree_on_device, setting, ragged),
        ),
        Planned(
            f"{count} leaves of 64 KiB in fp32, as bf16, device time",
            functools.partial(_cast_on_device, setting, [16_384] * count),
        ),
        Planned(
            f"a transpose of {size}x{size}, device time",
            functools.partial(_transpose_on_device, setting, size),
        ),
        Planned(
            f"{count} leaves of 16 KiB back to the device, device time",
            functools.partial(_back_on_device, setting, [4096] * count),
        ),
    ]
    return [
        *on_device,
        *(beside if setting.on_gpu else []),
        *(
            Planned(
                f"{count} leaves of a tree of {each} KiB",
                functools.partial(_trees, setting, even(each)),
            )
            for each in (4, 16, 64)
        ),
        Planned(f"{many} leaves of 1 B to 1 MiB", functools.partial(_trees, setting, ragged)),
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
