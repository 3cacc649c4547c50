"""A small GPT learns the Zen of Python, with its gradients on the host at the end of each step.

    python examples/gpt_gradients.py [--device cuda:0] [--steps 20]

It trains twice from the same start: by a plain loop, and with ``stream_gradients``, whose two lines
are marked. Losses and parameters are the same, bit for bit. The host's gradients are put to use:
while backward still runs, a second thread measures how large each of them is.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import streamlap

LENGTH = 48


def text() -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, characters: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.characters(ids) + self.positions)
        return self.norm(x) @ self.characters.weight.T  # tied


def largest(arrivals) -> tuple[float, str]:
    """Return the largest norm of a gradient, from gradients as they arrive."""
    return max((float(grad.norm()), name) for name, grad in arrivals)


def train(device: torch.device, steps: int, stream: bool) -> tuple[list[float], nn.Module]:
    letters = sorted(set(text()))
    ids = torch.tensor([letters.index(letter) for letter in text()], device=device)
    torch.manual_seed(0)
    model = GPT(len(letters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    grads = streamlap.stream_gradients(model) if stream else None  # the first line
    losses = []
    with ThreadPoolExecutor(1) as thread:
        for _ in range(steps):
            starts = torch.randint(len(ids) - LENGTH - 1, (8,)).tolist()
            batch = torch.stack([ids[start : start + LENGTH + 1] for start in starts])
            logits = model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            if grads is not None:
                measured = thread.submit(largest, grads.completed())  # the second line
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if grads is not None:
                norm, name = measured.result()
                print(f"loss {losses[-1]:.4f}, largest gradient {norm:.4f} of {name}")
    return losses, model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    with sdpa_kernel(SDPBackend.MATH):  # the faster ones add in another order each time
        plain, first = train(device, given.steps, stream=False)
        ours, second = train(device, given.steps, stream=True)
    if plain != ours:
        raise SystemExit("the losses differ")
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise SystemExit("the parameters differ")
    print(f"{given.steps} steps: losses and parameters are those of the plain loop")


if __name__ == "__main__":
    main()
