"""What stream_gradients refuses, before anything is hooked or in the pass that shows it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.nets import batch, loss_of, net, plain, same_grads

import streamlap
from streamlap import GradientsIncomplete, InvalidArgument, InvalidType, stream_gradients

# -- what is refused


def leafless():
    return torch.nn.Parameter(torch.ones(2)) * 2


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: torch.nn.ReLU(), InvalidArgument, "no parameters"),
        (list, InvalidArgument, "no parameters"),
        (lambda: torch.nn.Linear(2, 2).requires_grad_(False), InvalidArgument, "requires grad"),
        (lambda: [torch.ones(2)], InvalidArgument, "requires grad"),
        (lambda: [leafless()], InvalidArgument, "no leaf"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), InvalidArgument, "meta"),
        (lambda: torch.nn.LazyLinear(2), InvalidArgument, "no shape yet"),
        (lambda: 3, InvalidType, "int"),
        (lambda: torch.nn.Parameter(torch.ones(2)), InvalidType, "Parameter"),
        (lambda: [3], InvalidType, "item 0"),
        (lambda: [("a", 3)], InvalidType, "item 0"),
        (
            lambda: [(name, torch.nn.Parameter(torch.ones(2))) for name in "aa"],
            InvalidArgument,
            "two parameters",
        ),
    ],
)
def test_models_that_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        stream_gradients(make())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "bfloat16"}, InvalidType),
        ({"free": 1}, InvalidType),
        ({"min_bytes": "1MiB"}, InvalidType),
        ({"min_bytes": -1}, InvalidArgument),
        ({"dtype": torch.int32}, InvalidArgument),
        ({"dtype": torch.bool}, InvalidArgument),
        ({"bucket_bytes": 1.5}, InvalidType),
        ({"bucket_bytes": True}, InvalidType),
    ],
)
def test_options_that_are_refused(options, error):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(error, match=next(iter(options))):
        stream_gradients(model, **options)
    assert not model.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("backwards", [0, -1, "1", True, 1.5])
def test_numbers_of_passes_that_are_refused(backwards):
    grads = stream_gradients(torch.nn.Linear(2, 2))
    with pytest.raises((InvalidArgument, InvalidType), match="backwards"):
        grads.completed(backwards)
    with pytest.raises((InvalidArgument, InvalidType), match="timeout"):
        grads.result(timeout=-1 if backwards == 0 else "1")


def test_twice_on_one_parameter_is_refused_before_anything_is_hooked():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with stream_gradients(second):
        with pytest.raises(InvalidArgument, match=r"'1\.weight' is sent already"):
            stream_gradients(torch.nn.Sequential(first, second))
        assert not first.weight._post_accumulate_grad_hooks
    stream_gradients(torch.nn.Sequential(first, second)).close()


class NoHooks(torch.nn.Linear):
    def register_forward_hook(self, *_arguments):
        raise RuntimeError("takes no hooks")


def test_what_cannot_be_attached_to_is_left_as_it_was():
    model = NoHooks(2, 2)
    with pytest.raises(RuntimeError, match="takes no hooks"):
        stream_gradients(model)
    assert not model.weight._post_accumulate_grad_hooks
    assert not model.bias._post_accumulate_grad_hooks


def test_a_dtype_that_nothing_can_be_converted_to():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(streamlap.UnsupportedTensor, match="qint8"):
        stream_gradients(model, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
def test_a_scripted_module(where):
    scripted = torch.jit.script(torch.nn.Linear(3, 2).to(where))
    with stream_gradients(scripted) as grads:
        scripted(torch.rand(4, 3, device=where)).square().sum().backward()
        assert same_grads(grads.result(), {n: p.grad for n, p in scripted.named_parameters()})


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
def test_seconds_that_no_lock_can_count(where, timeout):
    model = net(where)
    with stream_gradients(model) as grads, ThreadPoolExecutor(1) as thread:
        arrivals = thread.submit(dict, grads.completed(timeout=timeout))
        loss_of(model, batch(where)).backward()
        arrived = arrivals.result(30)
        result = grads.result(timeout=timeout)
        assert same_grads({name: arrived[name] for name in result}, result)


def test_a_model_that_has_moved(where):
    model = torch.nn.Linear(3, 2).to(where)
    grads = stream_gradients(model)
    for hook in model.bias._post_accumulate_grad_hooks.values():
        hook.device = torch.device("meta")  # where it would have been
    with pytest.raises(InvalidArgument, match=r"'bias' is on .*, but the parameter was on meta"):
        model(torch.ones(2, 3, device=where)).sum().backward()
    with pytest.raises(GradientsIncomplete):
        grads.result()


@pytest.mark.gpu
def test_a_model_that_has_left_its_gpu():
    model = torch.nn.Linear(3, 2).to("cuda:0")
    stream_gradients(model)
    model.to("cpu")
    with pytest.raises(InvalidArgument, match="is on cpu, but the parameter was on cuda:0"):
        model(torch.ones(2, 3)).sum().backward()


def test_parameters_that_were_replaced(where):
    model = torch.nn.Linear(3, 2).to(where)
    grads = stream_gradients(model)
    model.load_state_dict({n: torch.ones_like(p) for n, p in model.named_parameters()}, assign=True)
    model(torch.ones(2, 3, device=where)).sum().backward()
    with pytest.raises(GradientsIncomplete, match="replaced"):
        grads.result()


def test_a_sparse_gradient(where):
    model = torch.nn.Embedding(10, 3, sparse=True).to(where)
    with stream_gradients(model), pytest.raises(streamlap.UnsupportedTensor, match="'weight'"):
        model(torch.tensor([1, 2], device=where)).sum().backward()


def test_a_gradient_that_an_earlier_hook_has_taken(where):
    model = torch.nn.Linear(3, 2).to(where)
    model.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with stream_gradients(model), pytest.raises(InvalidArgument, match="taken by a hook"):
        model(torch.ones(2, 3, device=where)).sum().backward()


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])  # in a hook, and at the end
def test_no_room_for_a_gradient_fails_the_pass(monkeypatch, min_bytes):
    model = net("cpu")
    grads = stream_gradients(model, min_bytes=min_bytes)

    def exhausted(*_arguments, **_options):
        raise streamlap.PoolExhausted("as planned", 1, 1)

    with monkeypatch.context() as patch:
        patch.setattr(streamlap, "to_cpu", exhausted)
        with pytest.raises(streamlap.PoolExhausted, match="as planned"):
            loss_of(model, batch("cpu")).backward()
    with pytest.raises(GradientsIncomplete, match="failed"):
        grads.result()
    grads.reset()
    model.zero_grad()
    loss_of(model, batch("cpu")).backward()
    assert same_grads(grads.result(), plain("cpu", 1))
