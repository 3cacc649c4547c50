"""Small graphs whose saved tensors are offloaded, and windows that make each step of it forced."""

import torch

from streamlap.training import offloaded


def narrow(monkeypatch, count=1):
    monkeypatch.setattr(offloaded, "COUNT", count)
    monkeypatch.setattr(offloaded, "BYTES", 0)


def batch_of(where, step=0):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, 16, generator=generator).to(where)


def chain(x, length=6):
    h = x * 2
    for _ in range(length):
        h = h.sin()
    return h.sum()
