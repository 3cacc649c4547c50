"""Nothing tears a gradient on its way: each wait is shown where leaving it out must show."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.data import same_bits
from helpers.nets import batch, loss_of, net, plain, same_grads
from helpers.streams import MOMENT, PATIENCE, CopySide, eventually, finish_all, side

import streamlap
from streamlap import stream_gradients

# -- when a copy is ordered, shown on simulations where nothing moves before somebody waits


@pytest.fixture(params=["lazy", "eager", "random(2)", "starve(0)"])
def simulated(request):
    with streamlap.use_runtime("sim", schedule=request.param) as serving:
        yield serving
        gc.collect()


def overwrite(tensor):
    """Write without a trace in torch's version counter."""
    tensor.detach().numpy().fill(-7)


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_after_backward_gradients_may_be_written(simulated, min_bytes):
    model = net("cpu")
    with stream_gradients(model, min_bytes=min_bytes) as grads:
        loss_of(model, batch("cpu")).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                overwrite(parameter.grad)
        assert same_grads(grads.result(), plain("cpu", 1))


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_a_later_hook_of_the_parameter_may_write(simulated, min_bytes):
    """As an optimizer that runs inside backward does."""
    model = net("cpu")
    with stream_gradients(model, min_bytes=min_bytes) as grads:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: overwrite(p.grad))
        loss_of(model, batch("cpu")).backward()
        assert same_grads(grads.result(), plain("cpu", 1))


def test_a_gradient_that_is_given_up_is_kept_until_it_is_read(simulated):
    model = net("cpu")
    with stream_gradients(model, free=True) as grads:
        loss_of(model, batch("cpu")).backward()
        gc.collect()
        litter = [torch.full((40, 24), -7.0) for _ in range(50)]
        assert same_grads(grads.result(), plain("cpu", 1))
        del litter


# -- streams of a GPU


@pytest.mark.gpu
def test_a_gradient_is_copied_after_the_stream_that_makes_it():
    """A kernel that is held writes the gradient just before the hook."""
    where = "cuda:0"
    stream = side(where, "producer")
    torch.manual_seed(0)
    with stream.current():
        model = torch.nn.Linear(256, 256).to(where)
        x = torch.rand(8, 256, device=where)
        grads = stream_gradients(model, min_bytes=0, free=True)
        warm = []
        for _ in range(3):
            model(x).square().sum().backward()
            warm.append(grads.result())
        expected = {name: grad.clone() for name, grad in warm[0].items()}
        for result in warm:
            for grad in result.values():
                grad.fill_(-7)  # what is reused is not right already
        del result, grad
        warm.clear()  # there is memory now that needs no call behind the gate
        finish_all(where)
        gate = stream.hold()
        model(x).square().sum().backward()
        with pytest.raises(streamlap.TransferTimeout):
            grads.result(timeout=MOMENT)
        gate.open()
        assert same_grads(grads.result(), expected)


@pytest.mark.gpu
def test_small_gradients_of_several_streams():
    """Each is copied after its own stream, although one of them is held."""
    where = "cuda:0"
    streams = [side(where, "first"), side(where, "second")]
    torch.manual_seed(0)
    values = [torch.rand(100, device=where) for _ in range(2)]
    parameters = [torch.nn.Parameter(value) for value in values]
    # Full with both: sent in the hook of the last, if it were one bucket.
    grads = stream_gradients(parameters, min_bytes=1 << 20, bucket_bytes=700, free=True)
    finish_all(where)

    class Held(torch.autograd.Function):
        """Its backward runs behind a closed gate on the first stream."""

        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, grad):
            if gates is not None:
                gates.append(streams[0].hold())
            return grad * 2

    warm = []
    for gates in (None, None, None, []):
        if gates is not None:
            result = None
            warm.clear()  # there is memory now that needs no call behind the gate
        with streams[1].current():
            second = parameters[1] * 3
        with streams[0].current():
            first = Held.apply(parameters[0])  # made last, so the first in backward
        torch.cuda.current_stream(where).wait_stream(streams[0].stream)
        torch.cuda.current_stream(where).wait_stream(streams[1].stream)
        loss = (first * 5).sum() + second.sum()
        finish_all(where)
        loss.backward()
        if gates:
            with pytest.raises(streamlap.TransferTimeout):
                grads.result(timeout=MOMENT)
            gates[0].open()
        result = grads.result()
        assert same_bits(result["0"], torch.full((100,), 10.0))
        assert same_bits(result["1"], torch.full((100,), 3.0))
        warm.append({name: grad.fill_(-7) for name, grad in result.items()})


@pytest.mark.gpu
def test_the_caller_s_stream_waits_for_the_copies():
    where = "cuda:0"
    model = net(where)
    grads = stream_gradients(model, min_bytes=0)
    warm = []
    for _ in range(3):
        model.zero_grad()
        loss_of(model, batch(where, 2)).backward()
        warm.append(grads.result())
    warm.clear()  # there is memory now that needs no call behind the gate
    model.zero_grad()
    finish_all(where)
    gate = CopySide(where).hold()
    loss_of(model, batch(where)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(-7)
    written = torch.cuda.current_stream(where).record_event()
    assert not eventually(written.query, MOMENT)
    gate.open()
    assert same_grads(grads.result(), plain(where, 1))


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("free", [False, True])
def test_a_model_on_two_gpus(free):
    torch.manual_seed(0)
    front = torch.nn.Linear(64, 64).to("cuda:0")
    back = torch.nn.Linear(64, 64).to("cuda:1")
    x = torch.rand(8, 64, device="cuda:0")

    def loss():
        return back(front(x).tanh().to("cuda:1")).square().sum()

    loss().backward()
    model = torch.nn.ModuleDict({"front": front, "back": back})
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    for min_bytes in (0, 1 << 20):
        model.zero_grad()
        with stream_gradients(model, free=free, min_bytes=min_bytes) as grads:
            arrivals = grads.completed()
            with ThreadPoolExecutor(1) as thread:
                work = thread.submit(dict, arrivals)
                loss().backward()
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(-7)
                assert work.result(PATIENCE).keys() == expected.keys()
            assert same_grads(grads.result(), expected)


# -- memory of a GPU


@pytest.mark.gpu
def test_device_memory_is_given_up_while_backward_runs():
    where = "cuda:0"
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16))).to(where)
    x = torch.rand(8, 1024, device=where)
    model(x).sum().backward()
    model.zero_grad()
    most = []

    def look(_parameter):
        torch.cuda.synchronize()
        most.append(torch.cuda.memory_allocated())

    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(look)
    before = torch.cuda.memory_allocated()
    with stream_gradients(model, free=True):
        model(x).sum().backward()
    assert len(most) == 16
    # Two gradients and small things at most; all of them would be sixteen.
    assert max(most) - before < 4 * 1024 * 1024 * 4 + (1 << 20)
