"""Steps of a 737 M-parameter GPT whose activations wait on the host, in several ways.

    python -m benches.activations [--quick] [--device cuda:0] [--rounds 9] [--json]

A step is forward under bfloat16 autocast, and backward. The losses of all rows are compared bit for
bit; gradients are not, because kernels of a GPU's backward may add in any order.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import streamlap

from .turns import Turn, arguments, missing, report, take_turns

Context = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(count, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, words: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Step:
    """Forward and backward of one batch; the same every time."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        words, width, layers, heads, length, count = (
            (100, 64, 2, 4, 32, 2) if quick else (32000, 2048, 12, 16, 1024, 8)
        )
        torch.manual_seed(0)
        self.device = device
        self.model = GPT(words, width, layers, heads, length).to(device)
        self.ids = torch.randint(words, (count, length + 1), device=device)

    def run(self, context: Context) -> float:
        with torch.autocast(self.device.type, torch.bfloat16), context():
            scores = self.model(self.ids[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(scores, self.ids[:, 1:].flatten())
            del scores
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.item()


class Moved:
    """The bytes that one of ours moves in a step, out and back."""

    def __init__(self, offload: streamlap.ActivationOffload) -> None:
        self.offload = offload
        self.steps = 0

    def context(self) -> streamlap.ActivationOffload:
        self.steps += 1
        return self.offload

    def nbytes(self) -> int:
        return 2 * self.offload.stats()["moved_bytes"] // max(1, self.steps)


class SaveOnCpu:
    """torch's own, counting what it copies."""

    def __init__(self) -> None:
        self.last = 0

    def context(self) -> AbstractContextManager[Any]:
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=True)
        self.last, pack = 0, hooks.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            self.last += 2 * tensor.nbytes
            return pack(tensor)

        hooks.pack_hook = counted
        return hooks


def torchtune_row(step: Step) -> Turn:
    name = "torchtune OffloadActivations"
    try:
        from torchtune.training import OffloadActivations
    except ImportError as error:
        return missing(name, str(error))
    return Turn(name, lambda: step.run(lambda: OffloadActivations(use_streams=True)))


def main(given: Sequence[str] | None = None) -> int:
    asked = arguments(__doc__ or "", given)
    step = Step(asked.device, asked.quick)
    least = 1 if asked.quick else 1 << 20

    def ours(name: str, budget: int | str | None) -> Turn:
        moved = Moved(streamlap.offload_activations(budget, least))
        return Turn(name, lambda: step.run(moved.context), moved=moved.nbytes)

    stock = SaveOnCpu()
    some = "100KB" if asked.quick else "1GiB"
    rows = [
        Turn("plain", lambda: step.run(contextlib.nullcontext), moved=lambda: 0),
        Turn(
            "save_on_cpu(pin_memory=True)",
            lambda: step.run(stock.context),
            moved=lambda: stock.last,
        ),
        torchtune_row(step),
        ours("offload_activations()", None),
        ours(f"offload_activations(budget={some!r})", some),
        ours("offload_activations(budget='hide')", "hide"),
    ]
    take_turns(rows, asked.device, asked.rounds)
    if not asked.json:
        print(f"one step on {asked.device}, medians of {asked.rounds}")
    return report(rows, asked.json)


if __name__ == "__main__":
    sys.exit(main())
