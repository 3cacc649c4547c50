"""Gradients that several processes have reduced: what arrives is what DDP or FSDP2 leaves."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.data import same_bits
from helpers.streams import MOMENT, PATIENCE, eventually
from helpers.threads import spawn
from torch.nn.parallel import DistributedDataParallel

import streamlap
from streamlap import GradientsIncomplete, stream_gradients
from streamlap.training import DDPGradients, ddp_comm_hook

PROGRAM = Path(__file__).parent / "programs" / "reduced_gradients.py"


def run_processes(count, kind, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), str(PROGRAM), kind]
    paths = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | environment,
    )
    right = [line for line in done.stdout.splitlines() if line.startswith("right ")]
    assert sorted(right) == [f"right {rank}" for rank in range(count)], done
    assert done.returncode == 0


@pytest.mark.parametrize("count", [2, 3])
def test_processes_on_cpus(count):
    run_processes(count, "cpu")


@pytest.mark.gpu
def test_a_process_on_a_gpu():
    run_processes(1, "cuda")


@pytest.mark.gpu
def test_processes_that_share_a_gpu():
    """NCCL with more than one process where there is one GPU: as if each had a host of its own.

    NCCL refuses two processes of one host on one GPU; with host names that differ it goes by
    way of the network, here the loopback device.
    """
    network = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    run_processes(2, "cuda-shared", **network)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_processes_on_two_gpus():
    run_processes(2, "cuda")


# -- in this process, alone in its group


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attached(inner=None, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(6, 4), **options)
    grads = DDPGradients(model, inner)
    model.register_comm_hook(grads, ddp_comm_hook)
    return model, grads


def lose(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return model(torch.rand(3, 6, generator=generator)).square().sum()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("schedule", ["lazy", "eager", "random(1)"])
def test_a_reduced_gradient_may_be_written_after_backward(group, schedule, view):
    with streamlap.use_runtime("sim", schedule=schedule):
        model, grads = attached(gradient_as_bucket_view=view)
        for seed in range(3):
            lose(model, seed).backward()
            expected = {name: p.grad.clone() for name, p in model.module.named_parameters()}
            for parameter in model.parameters():
                parameter.grad.numpy().fill(-7)  # without a trace
            result = grads.result()
            assert list(result) == ["weight", "bias"]
            assert all(same_bits(result[name], grad) for name, grad in expected.items())
            model.zero_grad()
        del model, grads, result
        gc.collect()


def test_a_gradient_is_sent_when_it_is_reduced_and_not_before(group):
    pending = []

    def inner(_state, bucket):
        pending.append((torch.futures.Future(), bucket.buffer()))
        return pending[-1][0]

    model, grads = attached(inner)
    arrivals = grads.completed(timeout=PATIENCE)

    def reduce():
        assert eventually(lambda: bool(pending))
        future, buffer = pending.pop()
        with pytest.raises(streamlap.TransferTimeout):
            next(grads.completed(timeout=MOMENT))
        buffer.mul_(3)  # as if others had a part in it
        future.set_result(buffer)

    errors = []
    other = spawn(reduce, errors)
    lose(model).backward()  # DDP waits for the future
    other.join()
    assert not errors
    plain = torch.nn.Linear(6, 4)
    plain.load_state_dict(model.module.state_dict())
    lose(plain).backward()
    got = dict(arrivals)
    assert got.keys() == {"weight", "bias"}
    for name, grad in got.items():
        assert same_bits(grad, plain.get_parameter(name).grad * 3)
        assert same_bits(grad, model.module.get_parameter(name).grad)


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_reduction_that_fails(group, when):
    def inner(_state, _bucket):
        if when == "at once":
            raise ArithmeticError("as planned")
        future = torch.futures.Future()
        future.set_exception(ArithmeticError("as planned"))
        return future

    model, grads = attached(inner)
    arrivals = grads.completed(timeout=PATIENCE)
    with pytest.raises((ArithmeticError, RuntimeError), match="as planned"):
        lose(model).backward()
    with pytest.raises((GradientsIncomplete, ArithmeticError), match=r"failed|as planned"):
        list(arrivals)
    with pytest.raises(GradientsIncomplete, match="failed"):
        grads.result(PATIENCE)


def test_passes_without_synchronisation_send_nothing(group):
    model, grads = attached()
    with model.no_sync():
        lose(model, 1).backward()
    with pytest.raises(GradientsIncomplete):
        grads.result()
    lose(model, 2).backward()
    for name, parameter in model.module.named_parameters():
        assert same_bits(grads.result()[name], parameter.grad)


def test_another_dtype(group):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(6, 4))
    grads = DDPGradients(model, dtype=torch.bfloat16)
    model.register_comm_hook(grads, ddp_comm_hook)
    lose(model).backward()
    for name, parameter in model.module.named_parameters():
        assert same_bits(grads.result()[name], parameter.grad.bfloat16())


def test_stream_gradients_of_ddp_is_refused_and_says_what_to_use(group):
    model = DistributedDataParallel(torch.nn.Linear(6, 4))
    for given in (model, torch.nn.Sequential(model)):
        with pytest.raises(streamlap.InvalidType, match="ddp_comm_hook"):
            stream_gradients(given)
    assert not model.module.weight._post_accumulate_grad_hooks


def test_states_that_are_refused(group):
    with pytest.raises(streamlap.InvalidType, match="Linear"):
        DDPGradients(torch.nn.Linear(2, 2))
    model = DistributedDataParallel(torch.nn.Linear(6, 4))
    with pytest.raises(streamlap.InvalidType, match="inner"):
        DDPGradients(model, "allreduce")
    with pytest.raises(streamlap.InvalidType, match="dtype"):
        DDPGradients(model, dtype="bfloat16")
