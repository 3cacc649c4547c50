"""Batches of 64 MB brought to the device beside about 8 ms of products each, in several ways.

    python -m benches.prefetch [--quick] [--device cuda:0] [--rounds 9] [--json]

All rows do the same products and add up each batch, which is what is compared. The first row has
its batches on the device already: the others cannot be faster than it, nor than the wire.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils.data import DataLoader

import streamlap

from .turns import Turn, arguments, report, take_turns


class Loop:
    """The consumer: some products for each batch, and the sum of the batch."""

    def __init__(self, device: torch.device, size: int, products: int) -> None:
        self.weight = torch.rand(size, size, device=device)
        self.products = products

    def run(self, batches: Iterable[torch.Tensor]) -> list[int]:
        sums = []
        for batch in batches:
            for _ in range(self.products):
                self.weight @ self.weight
            sums.append(batch.sum(dtype=torch.int64))
        return torch.stack(sums).tolist()


def main(given: Sequence[str] | None = None) -> int:
    asked = arguments(__doc__ or "", given)
    device, quick = asked.device, asked.quick
    each, size, products, count = (1 << 20, 128, 2, 6) if quick else (64 << 20, 4096, 3, 24)
    loop = Loop(device, size, products)
    ordinary = [torch.randint(0, 255, (each,), dtype=torch.uint8) for _ in range(4)]
    pinned = [streamlap.empty_pinned(each, torch.uint8).copy_(batch) for batch in ordinary]
    ready = [batch.to(device) for batch in ordinary]

    def turns(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        return (batches[index % 4] for index in range(count))

    def loader(pin: bool) -> DataLoader[torch.Tensor]:
        data = [ordinary[index % 4] for index in range(count)]
        return DataLoader(data, batch_size=None, pin_memory=pin)  # type: ignore[arg-type]

    def row(name: str, batches: Callable[[], Iterable[torch.Tensor]]) -> Turn:
        return Turn(name, lambda: loop.run(batches()), moved=lambda: count * each)

    pin = device.type == "cuda"
    rows = [
        Turn("compute alone, batches on the device", lambda: loop.run(turns(ready))),
        row(
            "stock .to, ordinary memory", lambda: (b.to(device, copy=True) for b in turns(ordinary))
        ),
        row(
            "stock non_blocking, pinned, ready",
            lambda: (b.to(device, non_blocking=True, copy=True) for b in turns(pinned)),
        ),
        row(
            "DataLoader pin_memory, non_blocking",
            lambda: (b.to(device, non_blocking=True, copy=True) for b in loader(pin)),
        ),
        row("Prefetcher, ordinary memory", lambda: streamlap.Prefetcher(turns(ordinary), device)),
        row("Prefetcher, pinned, ready", lambda: streamlap.Prefetcher(turns(pinned), device)),
        row("Prefetcher, DataLoader pin_memory", lambda: streamlap.Prefetcher(loader(pin), device)),
    ]
    take_turns(rows, device, asked.rounds)
    if not asked.json:
        print(
            f"{count} batches of {each / 1e6:.1f} MB on {device}, medians of {asked.rounds} passes"
        )
    return report(rows, asked.json)


if __name__ == "__main__":
    sys.exit(main())
