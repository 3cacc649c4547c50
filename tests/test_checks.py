"""What makes no sense is refused: our error, also the built-in that fits, and nothing lost."""

import numpy as np
import pytest
import torch

import streamlap
from streamlap import InvalidArgument, InvalidType, UnsupportedTensor

X = torch.ones(4, 4)


class BrokenExporter:
    def __dlpack__(self, **options):
        raise ValueError("no capsule")

    def __dlpack_device__(self):
        return (1, 0)


REFUSED = {
    "quantized dtype": (lambda: streamlap.to_cpu(X, dtype=torch.qint8), UnsupportedTensor),
    "quantized result": (lambda: streamlap.pipelined_run(X, dtype=torch.quint8), UnsupportedTensor),
    "quantized memory": (lambda: streamlap.empty_pinned(4, torch.qint32), UnsupportedTensor),
    "bits": (lambda: streamlap.to_cpu(X, dtype=torch.bits8), UnsupportedTensor),
    "packed ints": (lambda: streamlap.to_device(X, "cpu", dtype=torch.int1), UnsupportedTensor),
    "dtype name": (lambda: streamlap.to_cpu(X, dtype="float16"), InvalidType),
    "huge shape": (lambda: streamlap.empty_pinned((2**40, 2**40)), InvalidArgument),
    "huge size": (lambda: streamlap.empty_pinned((0, 2**80)), InvalidArgument),
    "bool shape": (lambda: streamlap.empty_pinned(True), InvalidType),
    "text shape": (lambda: streamlap.empty_pinned(""), InvalidType),
    "set shape": (lambda: streamlap.empty_pinned({2, 3}), InvalidType),
    "huge limit": (lambda: streamlap.PinnedPool(2**70), InvalidArgument),
    "huge limit text": (lambda: streamlap.PinnedPool("99999999999999TiB"), InvalidArgument),
    "foreign digits": (lambda: streamlap.PinnedPool("\u0663GiB"), InvalidArgument),
    "huge chunk": (lambda: streamlap.to_cpu(X, chunk_bytes=2**70), InvalidArgument),
    "no chunk": (lambda: streamlap.to_device(X, "cpu", chunk_bytes=0), InvalidArgument),
    "bool product": (lambda: streamlap.pipelined_run(X.bool()), UnsupportedTensor),
    "unsigned product": (lambda: streamlap.run(X.to(torch.uint16)), UnsupportedTensor),
    "device number": (lambda: streamlap.synchronize("cpu:256"), InvalidArgument),
    "pool of no device": (lambda: streamlap.pool_stats("cpu:64"), InvalidArgument),
    "device type": (lambda: streamlap.to_device(X, 2.5), InvalidType),
    "wait for a word": (lambda: streamlap.to_cpu(X).wait("s"), InvalidType),
    "wait for a bool": (lambda: streamlap.to_cpu(X).wait(True), InvalidType),
    "wait for an object": (lambda: streamlap.to_cpu(X).wait_source(object()), InvalidType),
    "wait for a handle": (lambda: streamlap.to_cpu(X).wait(-1), InvalidArgument),
    "timeout text": (lambda: streamlap.to_cpu(X).exception("1"), InvalidType),
    "timeout": (lambda: streamlap.to_cpu(X).exception(-1), InvalidArgument),
    "timeout nan": (lambda: streamlap.to_cpu(X).result(float("nan")), InvalidArgument),
    "protect": (lambda: streamlap.to_cpu(X, protect="yes"), InvalidType),
    "non_blocking": (lambda: streamlap.copy_to_cpu(X, "yes"), InvalidType),
    "panels": (lambda: streamlap.pipelined_run(X, panels=7), InvalidArgument),
    "panels zero": (lambda: streamlap.pipelined_run(X, panels=0), InvalidArgument),
    "panels of fn": (lambda: streamlap.pipelined_run(X, fn=abs, panels=2), InvalidArgument),
    "panels text": (lambda: streamlap.pipelined_run(X, panels="1"), InvalidType),
    "panels float": (lambda: streamlap.pipelined_run(X, panels=1.0), InvalidType),
    "n tensor": (lambda: streamlap.pipelined_run(X, n=torch.tensor(2)), InvalidType),
    "runtime": (lambda: streamlap.use_runtime("nope"), InvalidArgument),
    "masked array": (lambda: streamlap.to_cpu(np.ma.array([1.0], mask=[1])), UnsupportedTensor),
    "broken exporter": (lambda: streamlap.to_cpu(BrokenExporter()), UnsupportedTensor),
}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, kind = REFUSED[name]
    with pytest.raises(kind) as caught:
        call()
    built_in = ValueError if kind is InvalidArgument else TypeError
    assert isinstance(caught.value, built_in)


def test_a_pipelines_handle_is_checked_as_a_transfer_is():
    handle = streamlap.pipelined_run(X, n=2, wait=False)
    with pytest.raises(InvalidType):
        handle.add_done_callback(5)
    with pytest.raises(InvalidArgument):
        handle.result(-1)
    with pytest.raises(InvalidType):
        handle.exception("x")
    with pytest.raises(InvalidType):
        handle.wait("s")
    assert len(handle.result()) == 2


def test_numpy_integers_are_integers():
    two = np.int64(2)
    assert len(streamlap.pipelined_run(X, n=two, depth=two)) == 2
    assert streamlap.empty_pinned(two).shape == (2,)
    assert streamlap.to_cpu(X, chunk_bytes=two).result(np.float32(9.0)).shape == X.shape
    with streamlap.use_runtime("host", devices=two):
        assert len(streamlap.devices()) >= 2


def test_a_handle_is_true_whatever_is_in_it():
    assert streamlap.to_cpu(X)
    assert streamlap.to_cpu([])


def test_stop_iteration_from_fn_does_not_end_the_loop():
    def fn(x):
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        list(streamlap.pipelined_map(fn, [X]))
    assert caught.value.streamlap_index == 0
    assert isinstance(caught.value.__cause__, StopIteration)


def test_run_says_which_item_raised():
    calls = []

    def fn(x):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("three")
        return x

    with pytest.raises(KeyError) as caught:
        streamlap.run(X, n=5, fn=fn)
    assert caught.value.streamlap_index == 2
