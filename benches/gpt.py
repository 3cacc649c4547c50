"""A GPT in training, for the groups about training: forward and backward of one batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .checks import WrongResult, require_equal
from .rows import Tensors


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(self.before_attention(x))
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in packed.chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """A model and a batch that changes every round."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        if on_gpu and not quick:
            self.shape = {"vocabulary": 32000, "width": 2048, "layers": 12, "heads": 16}
            self.batch, self.length = 8, 1024
        else:
            width = 32 if quick else 256
            self.shape = {"vocabulary": 256, "width": width, "layers": 2 if quick else 4}
            self.shape["heads"] = 4
            self.batch, self.length = 4, 16 if quick else 64
        torch.manual_seed(0)
        with device:
            self.model = GPT(**self.shape, length=self.length)
        self.parameters = list(self.model.parameters())
        self.change(0)

    def change(self, index: int) -> None:
        generator = torch.Generator(self.device).manual_seed(index)
        size = (self.batch, self.length + 1)
        self.ids = torch.randint(
            0, self.shape["vocabulary"], size, device=self.device, generator=generator
        )

    def forward(self) -> torch.Tensor:
        autocast: Any = contextlib.nullcontext()
        if self.device.type == "cuda":
            autocast = torch.autocast("cuda", torch.bfloat16)
        with autocast:
            logits = self.model(self.ids[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    def settings(self) -> dict[str, Any]:
        count = sum(parameter.numel() for parameter in self.parameters)
        return {**self.shape, "batch": self.batch, "length": self.length, "parameters": count}


@contextlib.contextmanager
def kept(parameters: Tensors) -> Any:
    """Keep what each gradient is when it is final; no two passes give the same bits on a GPU.

    Its hooks come before those of a way, and are gone when the clock runs.
    """
    found: dict[int, torch.Tensor] = {}

    def keep(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        found[id(parameter)] = parameter.grad.clone()

    handles = [parameter.register_post_accumulate_grad_hook(keep) for parameter in parameters]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def require_kept(results: Tensors, found: dict[int, torch.Tensor], parameters: Tensors) -> None:
    """Raise WrongResult where a host gradient is not what was kept."""
    if len(found) != len(parameters):
        raise WrongResult(f"{len(found)} gradients instead of {len(parameters)}")
    require_equal(results, [found[id(parameter)] for parameter in parameters])
