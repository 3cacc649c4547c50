"""The exceptions: one tree, each also a built-in; what the core throws becomes one of them."""

import contextlib
import copy
import gc
import inspect
import pickle

import pytest
import torch
from helpers.streams import eventually, runtime_of

import streamlap
from streamlap import _native, errors

BUILTIN = {
    "InvalidArgument": ValueError,
    "InvalidType": TypeError,
    "UnsupportedTensor": TypeError,
    "DeviceError": RuntimeError,
    "DeviceLost": RuntimeError,
    "OutOfMemory": MemoryError,
    "PoolExhausted": MemoryError,
    "SourceModified": RuntimeError,
    "TransferTimeout": TimeoutError,
    "CaptureError": RuntimeError,
    "ForkedProcess": RuntimeError,
    "OrderError": RuntimeError,
    "GradientsIncomplete": RuntimeError,
}


def test_every_class_is_listed_here():
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.StreamlapError)
    }
    assert classes == {*BUILTIN, "StreamlapError"}


@pytest.mark.parametrize("name", BUILTIN)
def test_each_class_is_also_a_built_in_and_public(name):
    cls = getattr(streamlap, name)
    assert issubclass(cls, streamlap.StreamlapError)
    assert issubclass(cls, BUILTIN[name])
    assert cls.__doc__


def test_errors_survive_pickling_and_copying():
    error = streamlap.PoolExhausted("no room", 5, 7)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (str(other), other.used, other.limit) == ("no room", 5, 7)
    for name in BUILTIN:
        if name != "PoolExhausted":
            other = pickle.loads(pickle.dumps(getattr(errors, name)("text")))
            assert str(other) == "text"
            assert type(other).__name__ == name


def test_errors_of_the_core_come_as_these_classes():
    runtime = runtime_of("cpu")
    with pytest.raises(streamlap.InvalidArgument, match="kind of stream"):
        runtime.stream(0, "nonsense")
    with pytest.raises(streamlap.InvalidArgument, match="-1"):
        runtime.stream(-1, "copy")
    with pytest.raises(streamlap.InvalidArgument, match="smallest block"):
        _native.Pool(runtime, 1)
    with pytest.raises(streamlap.InvalidArgument, match="chunk_bytes"):
        _native.plan_chunks([(8, 4)], 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_reason_is_given():
    with pytest.raises(streamlap.DeviceError, match=r"no GPU can be used: ."):
        streamlap.to_device(torch.ones(3), "cuda")
    with pytest.raises(RuntimeError, match="no GPU"):
        streamlap.pool_stats("cuda:0")
    with pytest.raises(streamlap.DeviceError):
        streamlap.synchronize("cuda:0")


def test_an_error_on_a_stream_is_kept_and_told_once_per_asker():
    """A failed task poisons its stream; events carry the error on; the stream recovers."""
    stream = runtime_of("cpu").stream(0, "compute")
    other = runtime_of("cpu").stream(0, "compute")
    ran = []

    def fail():
        raise ArithmeticError("poison")

    stream.launch(fail)
    stream.launch(lambda: ran.append("skipped"))
    event = stream.record()
    other.wait(event)
    other.launch(lambda: ran.append("skipped too"))
    with pytest.raises(ArithmeticError, match="poison"):
        event.synchronize()
    with pytest.raises(ArithmeticError):
        other.synchronize()
    with pytest.raises(ArithmeticError):
        stream.synchronize()
    assert ran == []
    stream.launch(lambda: ran.append("again"))
    stream.synchronize()
    assert ran == ["again"]


def test_a_producer_s_error_comes_out_of_the_transfer_and_stops_there():
    """What made the source failed: result() raises that; the next transfer is not to blame."""
    stream = runtime_of("cpu").stream(0, "compute")
    x = torch.ones(10)

    def fail():
        raise ArithmeticError("the producer failed")

    stream.launch(fail)
    transfer = streamlap.to_cpu(x, stream=stream)
    with pytest.raises(ArithmeticError, match="the producer failed"):
        transfer.result()
    assert isinstance(transfer.exception(), ArithmeticError)
    assert transfer.done()
    with pytest.raises(ArithmeticError):
        stream.synchronize()
    assert bool((streamlap.to_cpu(x, stream=stream).result() == 1).all())


def test_a_failed_transfer_gives_its_memory_back():
    """Also while its error is remembered by the events that carried it."""
    gc.collect()
    before = streamlap.pool_stats("cpu")["live"]
    stream = runtime_of("cpu").stream(0, "compute")

    def fail():
        raise ArithmeticError("the producer failed")

    stream.launch(fail)
    transfer = streamlap.to_cpu(torch.ones(10), stream=stream)
    with contextlib.suppress(ArithmeticError):
        transfer.result()
    with pytest.raises(ArithmeticError):
        stream.synchronize()
    del transfer
    gc.collect()
    assert eventually(lambda: streamlap.pool_stats("cpu")["live"] <= before)
