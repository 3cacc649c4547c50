"""A small model with the odd kinds of parameters, and the gradients that torch gives it."""

import torch

from .data import same_bits


class Net(torch.nn.Module):
    """Small and large parameters, a tied one, a frozen one, one that nothing uses, a scalar."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 24)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.head = torch.nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(24), requires_grad=False)

    def forward(self, ids, through=lambda layer, x: layer(x)):
        x = self.embedding(ids) + self.nothing.sum()
        for layer in self.layers:
            x = through(layer, x).tanh() * self.frozen
        return self.head(x * self.scale)


def net(where, seed=0):
    torch.manual_seed(seed)
    return Net().to(where)


def batch(where, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 40, (6, 5), generator=generator).to(where)


def loss_of(model, ids, **options):
    return torch.nn.functional.cross_entropy(model(ids, **options).flatten(0, 1), ids.flatten())


def plain(where, *seeds, **options):
    """The gradients that torch accumulates over these batches."""
    model = net(where)
    for seed in seeds:
        loss_of(model, batch(where, seed), **options).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_grads(result, expected):
    assert list(result) == list(expected)
    assert all(grad.device.type == "cpu" for grad in result.values())
    return all(same_bits(grad, expected[name].cpu()) for name, grad in result.items())
