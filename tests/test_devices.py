"""Which runtime serves what, logical devices, streams of others, synchronize."""

import threading

import pytest
import torch
from helpers.streams import PATIENCE, eventually, side

import streamlap
from streamlap import _native
from streamlap.devices import as_stream, parse_device, place_of


def cpu(index=0):
    return place_of(torch.device("cpu", index))


def test_logical_devices_of_cpu_tensors():
    assert place_of(torch.device("cpu")).index == 0
    assert place_of(torch.device("cpu"), 3).index == 3
    assert place_of(torch.device("cpu", 2), 3).index == 2
    assert str(cpu(1)) == "cpu:1"
    with streamlap.use_runtime("host", devices=2):
        assert [place_of(torch.device("cpu"), i).index for i in range(5)] == [0, 1, 0, 1, 0]


def test_use_runtime_is_undone_also_after_an_error():
    with pytest.raises(ZeroDivisionError), streamlap.use_runtime("host", devices=1):
        raise ZeroDivisionError
    assert place_of(torch.device("cpu"), 1).index == 1
    with streamlap.use_runtime("host", devices=["cpu:0", "cpu:1", "cpu:2"]):
        with streamlap.use_runtime("host", devices=1):
            assert place_of(torch.device("cpu"), 1).index == 0
        assert place_of(torch.device("cpu"), 4).index == 1


@pytest.mark.unchecked("checked tests hand their context to the threads that they start")
def test_use_runtime_belongs_to_its_thread():
    seen = []
    with streamlap.use_runtime("host", devices=1):
        thread = threading.Thread(
            target=lambda: seen.append(place_of(torch.device("cpu"), 1).index)
        )
        thread.start()
        thread.join()
    assert seen == [1]


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (("nonsense",), ValueError),
        (("cuda",), ValueError),
        (("host", 0), ValueError),
        (("host", -1), ValueError),
        (("host", 1000), ValueError),
        (("host", 1.5), TypeError),
        (("host", True), TypeError),
        (("host", "cpu:0"), TypeError),
        (("host", []), ValueError),
        (("host", ["cpu:1"]), ValueError),
        (("host", ["cpu:0", "cpu:0"]), ValueError),
        (("host", ["cuda:0"]), ValueError),
        (("host", ["nonsense"]), ValueError),
        (("host", [7.5]), (ValueError, TypeError)),
    ],
)
def test_use_runtime_refuses(args, kind):
    with pytest.raises(kind) as caught, streamlap.use_runtime(*args):
        pass
    assert isinstance(caught.value, streamlap.StreamlapError)


def test_devices_of_this_machine():
    found = streamlap.devices()
    assert found[-1].name == "cpu:0"
    assert found[-1].runtime == "host"
    assert found[-1].memory > 0
    with streamlap.use_runtime("host", devices=3):
        names = [device.name for device in streamlap.devices() if device.runtime == "host"]
    assert names == ["cpu:0", "cpu:1", "cpu:2"]


@pytest.mark.gpu
def test_gpus_of_this_machine():
    gpus = [device for device in streamlap.devices() if device.runtime == "cuda"]
    assert len(gpus) == torch.cuda.device_count()
    assert gpus[0].description == torch.cuda.get_device_name(0)
    assert gpus[0].memory > 1 << 30


@pytest.mark.parametrize("device", [True, object(), "nonsense", "cpu:-1", "", 1.5])
def test_devices_that_are_none(device):
    with pytest.raises((ValueError, TypeError)) as caught:
        parse_device(device)
    assert isinstance(caught.value, streamlap.StreamlapError)


@pytest.mark.parametrize("device", ["mps", "meta", "xpu:0"])
def test_kinds_of_device_that_are_not_served(device):
    with pytest.raises(streamlap.InvalidArgument, match=device.split(":")[0]):
        streamlap.synchronize(device)


def test_synchronize_waits_for_the_workers():
    stream = cpu().compute_stream()
    gate = stream.gate()
    done = []
    for device in (None, "cpu", "cpu:0"):
        thread = threading.Thread(target=lambda d=device: done.append(streamlap.synchronize(d)))
        thread.start()
    assert not eventually(lambda: bool(done), 0.02)
    streamlap.synchronize("cpu:1")
    gate.open()
    assert eventually(lambda: len(done) == 3, PATIENCE)


def test_synchronize_inside_fn_does_not_wait_for_itself():
    """See also test_exit: run in a process of its own there, so that a hang is only a failure."""
    assert cpu().compute_stream().idle()


@pytest.mark.gpu
def test_synchronize_waits_for_a_gpu_s_streams():
    consumer = side("cuda:0", "consumer")
    gate = consumer.hold()
    done = []
    threads = [
        threading.Thread(target=lambda d=device: done.append(streamlap.synchronize(d)))
        for device in (None, "cuda", "cuda:0", 0)
    ]
    for thread in threads:
        thread.start()
    assert not eventually(lambda: bool(done), 0.02)
    gate.open()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(done) == 4


@pytest.mark.parametrize("stream", ["text", 1.5, True, object(), [1]])
def test_what_is_no_stream(stream):
    with pytest.raises(streamlap.InvalidType, match="stream"):
        streamlap.to_cpu(torch.ones(3), stream=stream)


@pytest.mark.parametrize("stream", [0, 5, 1 << 40])
def test_a_cuda_handle_cannot_order_host_work(stream):
    with pytest.raises(streamlap.InvalidArgument, match="cpu:0"):
        streamlap.to_cpu(torch.ones(3), stream=stream)


@pytest.mark.gpu
def test_streams_of_the_wrong_runtime_and_bad_handles():
    x = torch.ones(3, device="cuda:0")
    host = _native.host_runtime().stream(0, "compute")
    with pytest.raises(streamlap.InvalidArgument, match="host"):
        streamlap.to_cpu(x, stream=host)
    with pytest.raises(streamlap.InvalidArgument):
        streamlap.to_cpu(x, stream=-5)
    with pytest.raises(streamlap.InvalidArgument):
        streamlap.to_cpu(torch.ones(3), stream=torch.cuda.Stream())


@pytest.mark.gpu
def test_every_library_s_stream_is_understood():
    place = place_of(torch.device("cuda:0"))
    stream = torch.cuda.Stream()
    assert as_stream(stream, place).handle == stream.cuda_stream
    assert as_stream(stream.cuda_stream, place).handle == stream.cuda_stream
    with torch.cuda.stream(stream):
        assert as_stream(None, place).handle == stream.cuda_stream
    assert as_stream(torch.cuda.default_stream(), place).handle == 0


@pytest.mark.gpu
def test_cupy_s_and_numba_s_streams_are_understood():
    cupy = pytest.importorskip("cupy")
    cuda = pytest.importorskip("numba.cuda")
    place = place_of(torch.device("cuda:0"))
    stream = cupy.cuda.Stream(non_blocking=True)
    assert as_stream(stream, place).handle == stream.ptr
    other = cuda.external_stream(stream.ptr)
    assert as_stream(other, place).handle == stream.ptr
    assert as_stream(cuda.default_stream(), place).handle == 0


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_the_current_device_is_as_before():
    x = torch.ones(100, 100, device="cuda:1")
    for index in (0, 1):
        with torch.cuda.device(index):
            streamlap.pipelined_run(x, n=3)
            streamlap.copy_to_cpu(x)
            streamlap.to_device(torch.ones(3), "cuda:1").result()
            streamlap.synchronize()
            assert torch.cuda.current_device() == index


def test_the_right_worker_computes():
    names = {}

    def fn(x):
        names.setdefault(int(x[0, 0]), set()).add(threading.get_ident())
        return x.clone()

    xs = [torch.full((2, 2), float(i)) for i in range(2)]
    streamlap.pipelined_run(xs, n=4, fn=fn)
    assert all(len(threads) == 1 for threads in names.values())
    assert not names[0] & names[1]
    with streamlap.use_runtime("host", devices=1):
        names.clear()
        streamlap.pipelined_run(xs, n=4, fn=fn)
    assert names[0] == names[1]
    assert threading.get_ident() not in names[0]
