"""One process of several: gradients that DDP or FSDP2 has reduced, on the host.

``torchrun --nproc-per-node 2 reduced_gradients.py cpu|cuda|cuda-shared``: on CPUs, each process
on a GPU of its own, or all on the first GPU. Prints "right RANK" at the end; whatever is wrong is
an exception.
"""

import copy
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import streamlap
from streamlap.training import DDPGradients, ddp_comm_hook


def same(first, second):
    return first.dtype == second.dtype and torch.equal(
        first.detach().cpu().reshape(-1).view(torch.uint8),
        second.detach().cpu().reshape(-1).view(torch.uint8),
    )


def tied_model(device):
    """Return a model with a tied weight, a frozen parameter and one that nothing uses."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(30, 16)
            self.hidden = torch.nn.Linear(16, 16)
            self.head = torch.nn.Linear(16, 30, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen = torch.nn.Parameter(torch.ones(16), requires_grad=False)
            self.unused = torch.nn.Parameter(torch.ones(5))

        def forward(self, ids):
            return self.head(self.hidden(self.embedding(ids)).relu() * self.frozen)

    torch.manual_seed(0)
    return Model().to(device)


def batches(device, count=6):
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randint(0, 30, (7,), generator=generator).to(device) for _ in range(count)]


def loss_of(model, ids):
    return torch.nn.functional.cross_entropy(model(ids), ids)


def agreed(grads):
    """Whether every process has the same bits."""
    for grad in grads.values():
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, grad.reshape(-1).view(torch.uint8).tolist())
        assert all(other == seen[0] for other in seen)


def ddp(device):
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}):
        options = {"find_unused_parameters": True, **options}
        plain, ours = (DistributedDataParallel(tied_model(device), **options) for _ in range(2))
        plain.register_comm_hook(plain.process_group, default_hooks.allreduce_hook)
        grads = DDPGradients(ours)
        ours.register_comm_hook(grads, ddp_comm_hook)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, ours)]
        for number, ids in enumerate(batches(device)):
            losses = []
            with ThreadPoolExecutor(1) as thread:
                given = thread.submit(dict, grads.completed())
                for model, optimizer in zip((plain, ours), optimizers, strict=True):
                    optimizer.zero_grad(set_to_none=number % 2 == 0)
                    losses.append(loss_of(model, ids))
                    losses[-1].backward()
                    at_the_end = {n: p.grad for n, p in model.module.named_parameters()}
                    at_the_end = {n: g.clone() for n, g in at_the_end.items() if g is not None}
                    optimizer.step()
                given = given.result(20)
            result = grads.result()
            assert same(*losses)
            assert list(result) == ["unused", "embedding.weight", "hidden.weight", "hidden.bias"]
            assert all(same(result[name], grad) for name, grad in at_the_end.items())
            assert all(
                given[name] is not None and same(given[name], result[name]) for name in given
            )
            assert given.keys() == result.keys()
            agreed(result)
        for first, second in zip(plain.parameters(), ours.parameters(), strict=True):
            assert same(first, second)


def ddp_without_sync(device):
    model = DistributedDataParallel(torch.nn.Linear(4, 3).to(device))
    grads = DDPGradients(model)
    model.register_comm_hook(grads, ddp_comm_hook)
    x = torch.full((2, 4), float(dist.get_rank() + 1), device=device)
    with model.no_sync():
        model(x).sum().backward()
    try:
        grads.result()
    except streamlap.GradientsIncomplete:
        pass
    else:
        raise AssertionError("something was sent under no_sync()")
    model(x).sum().backward()
    result = grads.result()
    mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
    assert torch.allclose(result["weight"], torch.full((3, 4), 2 * 2 * mean))
    assert all(same(result[name], p.grad) for name, p in model.module.named_parameters())


def ddp_compressed(device):
    model = DistributedDataParallel(torch.nn.Linear(40, 30).to(device))
    grads = DDPGradients(model, default_hooks.bf16_compress_hook, dtype=torch.float64)
    model.register_comm_hook(grads, ddp_comm_hook)
    model(torch.rand(2, 40, device=device)).sum().backward()
    for name, parameter in model.module.named_parameters():
        assert same(grads.result()[name], parameter.grad.double())


def fsdp(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for free in (False, True):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).to(device)
        ours = copy.deepcopy(plain)
        for model in (plain, ours):
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        with streamlap.stream_gradients(ours, free=free) as grads:
            for step in range(3):
                x = torch.rand(4, 8, device=device) + dist.get_rank()
                passes = 1 + step
                for model in (plain, ours):
                    model.zero_grad()
                    for turn in range(passes):
                        model(x + turn).square().sum().backward()
                result = grads.result()
                assert list(result) == [name for name, _ in plain.named_parameters()]
                for name, parameter in plain.named_parameters():
                    assert same(result[name], parameter.grad.to_local())
                assert all((p.grad is None) == free for p in ours.parameters())


def main():
    kind = sys.argv[1]
    device = torch.device("cpu")
    if kind == "cuda-shared":
        os.environ["NCCL_HOSTID"] = "host" + os.environ["RANK"]
    if kind != "cpu":
        device = torch.device("cuda", 0 if kind == "cuda-shared" else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl")
    try:
        for program in (ddp, ddp_without_sync, ddp_compressed, fsdp):
            program(device)
    finally:
        dist.destroy_process_group()
    # In one piece: the processes share one pipe.
    os.write(1, f"right {os.environ['RANK']}\n".encode())


if __name__ == "__main__":
    main()
