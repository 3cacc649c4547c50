"""CuPy arrays as input: ordered on CuPy's current stream of their own device, NumPy arrays out.

Where a machine has a GPU and no CuPy these tests fail. What needs no GPU is tested with stand-ins.
"""

import contextlib
import gc
import itertools
import sys
import types

import numpy as np
import pytest
import torch
from helpers.data import same_bits
from helpers.streams import eventually, finish_all, is_held, side, stays_false

import streamlap
from streamlap import _native, arrays, foreign, lanes, pipeline, to_cpu, to_device
from streamlap.batch import Part
from streamlap.transfer import Transfer

SHAPE = (64, 48)
devices = sys.modules["streamlap.devices"]  # streamlap.devices is the function
_seeds = itertools.count(1)

# -- stand-ins, on any machine


class Standin:
    """An array of a library that is not imported; NumPy's memory behind DLPack."""

    def __init__(self, array, kind=1, index=0):
        self.array, self.kind, self.index = array, kind, index
        self.asked = []
        self.copies = 0

    strides = property(lambda self: self.array.strides)
    itemsize = property(lambda self: self.array.itemsize)

    def __dlpack_device__(self):
        return self.kind, self.index

    def __dlpack__(self, **options):
        self.asked.append(options)
        return self.array.__dlpack__()

    def copy(self):
        copied = type(self)(self.array.copy(), self.kind, self.index)
        copied.copies = self.copies + 1
        copied.asked = self.asked
        return copied


class CupyStandin(Standin):
    pass


class Derived(CupyStandin):
    pass


class Streams:
    """CuPy's current streams: the one of device i has the handle 1000 + i."""

    def __init__(self):
        self.asked = []

    def get_current_stream(self, device_id=-1):
        self.asked.append(device_id)
        return types.SimpleNamespace(ptr=1000 + device_id)


@pytest.fixture
def streams(monkeypatch):
    found = Streams()
    fake = types.SimpleNamespace(ndarray=CupyStandin, cuda=found)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(foreign, "_torch_captures", lambda: False)
    return found


@pytest.fixture
def current_devices(monkeypatch):
    """What was made the current device, in order; None where it ended."""
    log = []

    @contextlib.contextmanager
    def device(index):
        log.append(index)
        yield
        log.append(None)

    monkeypatch.setattr(torch.cuda, "device", device)
    return log


@pytest.mark.parametrize("kind", [CupyStandin, Derived])
def test_cupy_arrays_give_numpy_arrays(kind, streams):
    del streams
    values = np.arange(12.0).reshape(3, 4)
    x = kind(values)
    result = to_cpu(x).result()
    assert isinstance(result, np.ndarray)
    assert same_bits(result, values)
    assert x.asked == [{"stream": -1}]
    square = kind(np.arange(9.0).reshape(3, 3))
    results = streamlap.pipelined_run(square, n=2)
    assert all(isinstance(result, np.ndarray) for result in results)
    assert all(np.array_equal(result, square.array @ square.array) for result in results)


def test_other_libraries_arrays_give_tensors(streams):
    result = to_cpu(Standin(np.arange(3.0))).result()
    assert isinstance(result, torch.Tensor)
    assert streams.asked == []


@pytest.mark.parametrize("view", [lambda x: x[::-1], lambda x: x[:, ::-2], lambda x: x[::-1].T])
def test_negative_strides_of_cupy_are_copied_first(view, streams):
    """torch ends the process when it imports them."""
    del streams
    x = CupyStandin(view(np.arange(24.0).reshape(4, 6)))
    assert same_bits(to_cpu(x).result(), np.ascontiguousarray(x.array))
    assert x.asked == [{"stream": -1}]
    plain = CupyStandin(np.arange(24.0).reshape(4, 6).T)
    assert arrays.as_source(plain).tensor.data_ptr() == plain.array.ctypes.data


def test_strides_that_are_no_multiple_of_an_element_are_copied_first(streams):
    del streams
    packed = np.zeros(5, np.dtype([("a", "i1"), ("b", "<i4")]))
    packed["b"] = [1, -2, 3, -4, 5]
    x = CupyStandin(packed["b"])
    assert x.strides == (5,)
    assert same_bits(to_cpu(x).result(), np.array([1, -2, 3, -4, 5], np.int32))


@pytest.mark.parametrize("call", [to_cpu, lambda x: to_device(x, "cpu"), streamlap.pipelined_run])
def test_negative_strides_of_others_are_refused(call):
    x = Standin(np.arange(9.0).reshape(3, 3)[::-1])
    with pytest.raises(streamlap.UnsupportedTensor, match="Standin with negative strides"):
        call(x)
    assert x.asked == []


def test_the_stream_is_that_of_the_array_s_device(streams, current_devices, monkeypatch):
    monkeypatch.setattr(foreign, "_device", lambda kind, index: pytest.fail("nothing is copied"))
    source = arrays.as_source(CupyStandin(np.arange(3.0), kind=2, index=3))
    assert streams.asked == [3]
    assert source.stream == 1003
    assert source.as_numpy
    assert current_devices == []


def test_a_copy_is_made_on_the_array_s_device(streams, current_devices, monkeypatch):
    capturing = types.SimpleNamespace(capturing=lambda: False)
    asked = []
    runtime = types.SimpleNamespace(adopt=lambda *a: asked.append(a) or capturing)
    monkeypatch.setattr(foreign._native, "cuda_runtime", lambda: runtime)
    x = CupyStandin(np.arange(3.0)[::-1], kind=2, index=3)
    made = []
    monkeypatch.setattr(
        CupyStandin, "copy", lambda self: made.append(list(current_devices)) or Standin.copy(self)
    )
    assert arrays.as_source(x).tensor.tolist() == [2.0, 1.0, 0.0]
    assert made == [[3]]
    assert current_devices == [3, None]
    assert asked == [(3, 1003)]
    capturing.capturing = lambda: True
    with pytest.raises(streamlap.CaptureError):
        arrays.as_source(x)
    assert len(made) == 1


def test_managed_memory_goes_around_dlpack(streams, monkeypatch):
    """torch refuses DLPack's name for it."""
    asked = []
    monkeypatch.setattr(
        torch, "as_tensor", lambda array, device: asked.append((array, device)) or torch.ones(2)
    )
    x = CupyStandin(np.arange(2.0), kind=13, index=1)
    source = arrays.as_source(x)
    assert asked == [(x, torch.device("cuda", 1))]
    assert source.stream == 1001
    assert x.asked == []
    assert streams.asked == [1]


def test_other_exporters_are_asked_on_their_own_device(current_devices, monkeypatch):
    """They order the stream that is current on the current device."""
    seen = []

    def from_dlpack(leaf):
        seen.append((leaf, list(current_devices)))
        return torch.ones(2)

    monkeypatch.setattr(foreign.torch.utils.dlpack, "from_dlpack", from_dlpack)
    monkeypatch.setattr(foreign, "_torch_captures", lambda: False)
    x = Standin(np.ones(2), kind=2, index=5)
    assert arrays.as_source(x).stream is None
    assert seen == [(x, [5])]
    assert current_devices == [5, None]


def test_an_array_during_capture_is_refused(streams, monkeypatch):
    del streams
    monkeypatch.setattr(foreign, "_torch_captures", lambda: True)
    x = CupyStandin(np.arange(2.0))
    with pytest.raises(streamlap.CaptureError):
        to_cpu(x)
    assert x.asked == []


def test_strides_in_elements_are_no_reason_to_refuse():
    """Other libraries need not count in bytes."""

    class InElements(Standin):
        strides = property(lambda self: [step // self.itemsize for step in self.array.strides])

    x = InElements(np.arange(6.0).reshape(2, 3))
    assert x.strides == [3, 1]
    assert np.array_equal(to_cpu(x).result().numpy(), x.array)


def test_an_exporter_that_fails_is_named():
    class Failing(Standin):
        def __dlpack__(self, **options):
            raise BufferError("no such dtype")

    with pytest.raises(streamlap.UnsupportedTensor, match="Failing gives torch no data: no such"):
        to_cpu(Failing(np.ones(2)))


@pytest.mark.parametrize("of_cupy", [False, True])
def test_wait_source_orders_cupy_s_stream_too(of_cupy, streams, monkeypatch):
    waited = []
    native = types.SimpleNamespace(wait_source_on_stream=waited.append)
    adopted = types.SimpleNamespace
    runtime = types.SimpleNamespace(
        adopt=lambda index, handle: adopted(index=index, handle=handle, capturing=lambda: False)
    )
    place = types.SimpleNamespace(is_cuda=True, index=2, runtime=runtime)
    monkeypatch.setattr(devices, "current_handle", lambda index: 7)
    part = Part(native, place, "direct", [0], True, place, of_cupy)
    Transfer([], None, [part], [], False).wait_source()
    assert [(s.index, s.handle) for s in waited] == [(2, 7), *([(2, 1002)] if of_cupy else [])]
    assert streams.asked == ([2] if of_cupy else [])
    waited.clear()
    Transfer([], None, [part], [], False).wait_source(55)
    assert [s.handle for s in waited] == [55]


def test_a_pipeline_orders_every_stream_that_may_read_or_write_x(streams, monkeypatch):
    log = []

    def adopt(index, handle):
        return types.SimpleNamespace(
            handle=handle,
            capturing=lambda: False,
            record=lambda: f"event of {handle}",
            wait=lambda event: log.append((handle, event)),
        )

    runtime = types.SimpleNamespace(adopt=adopt)
    place = types.SimpleNamespace(is_cuda=True, index=2, runtime=runtime)
    monkeypatch.setattr(devices, "current_handle", lambda index: 7)
    job = lanes.Job(None, None, False, True, 4, None, None, None, place, None, True)
    lane = lanes.InlineLane(job, None, lanes.Control())
    lane.all_issued()
    lane.read_source(None)
    events = ["event of 7", "event of 1002"]
    assert log == [(handle, event) for handle in (7, 1002) for event in events]
    log.clear()
    lane.read_source(55)
    assert log == [(55, event) for event in events]


@pytest.mark.parametrize(("handle", "own"), [(1002, True), (0, True), (2, False)])
def test_products_are_never_allocated_on_the_per_thread_stream(handle, own, monkeypatch):
    """It has one handle in all threads, and torch's allocator goes by handles."""
    log = []
    current = types.SimpleNamespace(capturing=lambda: False, wait=log.append)
    monkeypatch.setattr(pipeline, "current_stream", lambda place: current)
    stream = types.SimpleNamespace(handle=handle, capturing=lambda: False, record=lambda: "event")
    given = pipeline._Input(None, True, None, stream)
    assert pipeline._own_stream(given) is (stream if own else None)
    assert log == ([] if own else ["event"])


def test_out_is_written_after_what_the_caller_s_streams_still_read(monkeypatch):
    log = []

    def adopt(index, handle):
        return types.SimpleNamespace(capturing=lambda: False, record=lambda: (index, handle))

    place = types.SimpleNamespace(is_cuda=True, index=0, runtime=types.SimpleNamespace(adopt=adopt))
    monkeypatch.setattr(lanes, "streams_in_use", lambda: [(0, 7), (1, 8)])
    for stream in (types.SimpleNamespace(wait=log.append), None):
        job = lanes.Job(None, None, True, True, 4, None, None, None, place, stream, True)
        lanes.InlineLane(job, None, lanes.Control()).start()
        assert log == []
        lanes.InlineLane(job, [np.empty(3)], lanes.Control()).start()
        assert log == ([] if stream is None else [(0, 7), (1, 8)])
        log.clear()


def test_the_streams_in_use_are_torch_s_and_cupy_s(streams, monkeypatch):
    runtime = types.SimpleNamespace(active_devices=lambda: [0, 3])
    monkeypatch.setattr(devices, "cuda_in_use", lambda: True)
    monkeypatch.setattr(devices, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(devices, "current_handle", lambda index: {0: 1000, 3: 5}[index])
    assert devices.streams_in_use() == [(0, 1000), (3, 5), (3, 1003)]
    assert streams.asked == [0, 3]
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace())  # half imported
    assert devices.streams_in_use() == [(0, 1000), (3, 5)]

    def fails(index):
        raise RuntimeError("no driver that CuPy could use")

    monkeypatch.setitem(
        sys.modules,
        "cupy",
        types.SimpleNamespace(cuda=types.SimpleNamespace(get_current_stream=fails)),
    )
    assert devices.streams_in_use() == [(0, 1000), (3, 5)]
    monkeypatch.delitem(sys.modules, "cupy")
    assert devices.streams_in_use() == [(0, 1000), (3, 5)]


# -- CuPy itself


class CupySide:
    """One of CuPy's streams, held by a gate."""

    def __init__(self, stream, index=0):
        self.stream = stream
        self.native = _native.cuda_runtime().adopt(index, stream.ptr)
        self.native.gate().open()  # loads the kernel
        self.native.synchronize()

    def hold(self):
        return self.native.gate()

    def passed(self):
        return self.native.record().done


@pytest.fixture
def cupy():
    import cupy

    cupy.cuda.Stream.null.use()
    torch.zeros(1, device="cuda:0")
    return cupy


STREAMS = {
    "non_blocking": lambda cupy: cupy.cuda.Stream(non_blocking=True),
    "per_thread": lambda cupy: cupy.cuda.Stream.ptds,
    "null": lambda cupy: cupy.cuda.Stream.null,
}
CALLS = {
    "whole": (lambda x: x, {}),
    "fortran": (lambda x: x.T, {}),
    "strided": (lambda x: x[:, ::2], {}),
    "reversed": (lambda x: x[::-1], {}),
    "offset": (lambda x: x.reshape(-1)[5:], {}),
    "ordinary": (lambda x: x, {"pin": False}),
    "converted": (lambda x: x, {"dtype": torch.float64}),
    "chunks": (lambda x: x, {"chunk_bytes": 1000}),
    "out": (lambda x: x, {"out": SHAPE}),
}


def options_of(name):
    options = dict(CALLS[name][1])
    if "out" in options:
        options["out"] = np.empty(options["out"], np.float32)
    return options


def two_arrays(cupy):
    """An array that holds -1 and one of new values; as NumPy, too."""
    values = np.random.default_rng(next(_seeds)).standard_normal(SHAPE).astype(np.float32)
    return cupy.full(SHAPE, -1, cupy.float32), cupy.asarray(values), values


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", STREAMS)
def test_to_cpu_waits_for_cupy_s_current_stream(kind, name, cupy):
    """torch's current stream is another one, and idle."""
    held = CupySide(STREAMS[kind](cupy))
    other = side("cuda:0", "consumer")
    view = CALLS[name][0]
    with held.stream, other.current():
        x, new, values = two_arrays(cupy)
        for _ in range(2):
            cupy.copyto(x, new)
            to_cpu(view(x), **options_of(name)).result()
        x.fill(-1)
        finish_all("cuda:0")
        options = options_of(name)
        gate = held.hold()
        cupy.copyto(x, new)
        transfer = to_cpu(view(x), **options)
        assert is_held(transfer)
        gate.open()
        result = transfer.result()
    assert not gate.timed_out
    assert isinstance(result, np.ndarray)
    assert np.array_equal(result, view(values))


@pytest.mark.gpu
def test_to_device_waits_for_cupy_s_current_stream(cupy):
    held = CupySide(cupy.cuda.Stream(non_blocking=True))
    other = side("cuda:0", "consumer")
    for view in (lambda x: x, lambda x: x[:, ::2]):
        with held.stream, other.current():
            x, new, values = two_arrays(cupy)
            for _ in range(2):
                cupy.copyto(x, new)
                to_device(view(x), "cuda:0").result()
            x.fill(-1)
            finish_all("cuda:0")
            gate = held.hold()
            cupy.copyto(x, new)
            transfer = to_device(view(x), "cuda:0")
            assert is_held(transfer)
            gate.open()
            result = transfer.result()
        assert torch.equal(result.cpu(), torch.from_numpy(view(values).copy()))


@pytest.mark.gpu
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, ::2]])
def test_torch_s_current_stream_has_no_part_in_it(view, cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    held = side("cuda:0", "producer")
    with stream, held.current():
        x, new, values = two_arrays(cupy)
        square = cupy.ones((32, 32), cupy.float32)
        for _ in range(2):
            cupy.copyto(x, new)
            to_cpu(view(x)).result()
            streamlap.pipelined_run(square, n=3, wait=False).result()
        finish_all("cuda:0")
        gate = held.hold()
        try:
            assert np.array_equal(to_cpu(view(x)).result(timeout=4), view(values))
            results = streamlap.pipelined_run(square, n=3, wait=False).result(timeout=4)
            assert all((result == 32).all() for result in results)
            assert not gate.timed_out
        finally:
            gate.open()


@pytest.mark.gpu
def test_torch_s_current_stream_is_not_made_to_wait(cupy):
    held = CupySide(cupy.cuda.Stream(non_blocking=True))
    free = side("cuda:0", "consumer")
    with held.stream, free.current():
        x, _new, _values = two_arrays(cupy)
        for _ in range(2):
            to_cpu(x).result()
        finish_all("cuda:0")
        gate = held.hold()
        transfer = to_cpu(x)
        assert eventually(free.passed())
        assert not transfer.done()
        gate.open()
        transfer.result()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["whole", "strided", "converted", "ordinary"])
def test_wait_source_orders_cupy_s_current_stream(name, cupy):
    held = CupySide(cupy.cuda.Stream(non_blocking=True))
    writer = CupySide(cupy.cuda.Stream(non_blocking=True))
    view = CALLS[name][0]
    with held.stream:
        x, new, values = two_arrays(cupy)
        for _ in range(2):
            cupy.copyto(x, new)
            to_cpu(view(x), **options_of(name)).result()
        finish_all("cuda:0")
        gate = held.hold()
        transfer = to_cpu(view(x), **options_of(name))
        if name == "ordinary":  # issued late: wait_source() has to block until it is
            gate.open()
        with writer.stream:
            transfer.wait_source()
            x.fill(-2)
            passed = writer.passed()
        assert name == "ordinary" or stays_false(passed)
        gate.open()
        result = transfer.result()
        writer.stream.synchronize()
    assert np.array_equal(result, view(values))
    assert (cupy.asnumpy(x) == -2).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("how", ["default", "cupy", "torch", "dtype"])
def test_pipelined_run_of_a_cupy_array_is_ordered(how, kind, cupy):
    """After the write before it, and before the one that comes after wait_source."""
    functions = {"cupy": lambda x: x @ x, "torch": lambda x: torch.from_dlpack(x) * 2}
    options = {"dtype": torch.float64} if how == "dtype" else {"fn": functions.get(how)}
    options["depth"] = 6  # or fn of one's own has to wait for room, behind the gate
    held = CupySide(STREAMS[kind](cupy))
    other = side("cuda:0", "consumer")
    with held.stream, other.current():
        new = cupy.asarray(np.random.default_rng(1).integers(-9, 9, (32, 32)).astype(np.float32))
        x = cupy.zeros_like(new)
        for _ in range(2):
            cupy.copyto(x, new)
            streamlap.pipelined_run(x, n=6, wait=False, **options).result()
        x.fill(0)
        finish_all("cuda:0")
        gate = held.hold()
        cupy.copyto(x, new)
        transfer = streamlap.pipelined_run(x, n=6, wait=False, **options)
        assert stays_false(transfer.done)
        transfer.wait_source()
        x.fill(0)
        gate.open()
        results = transfer.result()
        held.stream.synchronize()
        assert not gate.timed_out
        values = cupy.asnumpy(new)
    expected = values * 2 if how == "torch" else values @ values  # small integers: exact
    for result in results:
        assert isinstance(result, torch.Tensor if how == "torch" else np.ndarray)
        assert np.array_equal(np.asarray(result), expected)
    assert (cupy.asnumpy(x) == 0).all()


@pytest.mark.gpu
def test_pipelined_run_with_out_waits_for_torch_s_current_stream(cupy):
    """Which may still read the old contents; CuPy's stream is another one."""
    reader = side("cuda:0", "consumer")
    out = streamlap.empty_pinned((3, 32, 32)).fill_(4)
    read = torch.zeros(3, 32, 32, device="cuda:0")
    x = cupy.ones((32, 32), cupy.float32)
    with cupy.cuda.Stream(non_blocking=True), reader.current():
        for _ in range(2):
            streamlap.pipelined_run(x, n=3, out=out, wait=False).result()
            read.copy_(out, non_blocking=True)
        finish_all("cuda:0")
        out.fill_(4)
        gate = reader.hold()
        read.copy_(out, non_blocking=True)
        transfer = streamlap.pipelined_run(x, n=3, out=out, wait=False)
        assert stays_false(transfer.done)
        assert bool((out == 4).all())
        gate.open()
        transfer.result()
        finish_all("cuda:0")
    assert bool((read == 4).all())
    assert bool((out == 32).all())


@pytest.mark.gpu
@pytest.mark.parametrize("many", [False, True])
def test_run_lends_a_cupy_array_to_torch_s_stream(many, cupy):
    held = CupySide(cupy.cuda.Stream(non_blocking=True))
    other = side("cuda:0", "consumer")

    def run(x):
        return streamlap.parallel_run([x], n=3)[0] if many else streamlap.run(x, n=3)

    with held.stream, other.current():
        new = cupy.asarray(np.random.default_rng(2).integers(-9, 9, (32, 32)).astype(np.float32))
        x = cupy.zeros_like(new)
        for _ in range(2):
            cupy.copyto(x, new)
            kept = run(x)
        x.fill(0)
        finish_all("cuda:0")
        del kept
        gate = held.hold()
        cupy.copyto(x, new)
        results = run(x)
        x.fill(0)
        passed = other.passed()
        assert stays_false(passed)
        gate.open()
        finish_all("cuda:0")
    values = cupy.asnumpy(new)
    assert all(np.array_equal(result.cpu().numpy(), values @ values) for result in results)
    assert (cupy.asnumpy(x) == 0).all()


@pytest.mark.gpu
def test_pinned_memory_that_cupy_still_reads_is_not_reused(cupy):
    held = CupySide(cupy.cuda.Stream(non_blocking=True))
    pool = streamlap.PinnedPool("1MiB")
    x = cupy.arange(1000, dtype=cupy.float32)
    to_cpu(x, pool=pool).result()
    with held.stream:
        y = cupy.zeros_like(x)
        result = to_cpu(x, pool=pool).result()
        finish_all("cuda:0")
        live = pool.stats()["live"]
        gate = held.hold()
        y.data.copy_from_host_async(result.ctypes.data, result.nbytes, held.stream)
        del result
        gc.collect()
        assert pool.stats()["in_flight"] >= live
        other = streamlap.empty_pinned(1000, torch.float32, pool).fill_(-1)
        gate.open()
        held.stream.synchronize()
        assert np.array_equal(cupy.asnumpy(y), np.arange(1000, dtype=np.float32))
    del other


DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_cupy_in_every_layout(dtype, cupy):
    raw = np.frombuffer(np.random.default_rng(7).bytes(24 * 10 * 16), np.uint8)
    raw = (raw % 2).astype(bool) if dtype == "?" else raw.view(dtype)
    values = raw[:240].reshape(24, 10).copy()
    for order in "CF":
        x = cupy.asarray(values, order=order)
        for view in (
            lambda x: x,
            lambda x: x[3:9, 1::3],
            lambda x: x[::-1],
            lambda x: x[5:5],
            lambda x: x[3, 4],
            lambda x: x[:, :0],
        ):
            result = to_cpu(view(x)).result()
            assert isinstance(result, np.ndarray)
            assert same_bits(result, np.ascontiguousarray(view(values)).reshape(result.shape))
            assert result.shape == view(x).shape


@pytest.mark.gpu
def test_broadcast_managed_and_derived_arrays(cupy):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = cupy.broadcast_to(cupy.asarray(values[:1]), (3, 4))
    assert np.array_equal(to_cpu(x).result(), np.broadcast_to(values[:1], (3, 4)))
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        managed = cupy.asarray(values)
        square = cupy.ones((8, 8), cupy.float32)
    for view in (lambda x: x, lambda x: x[:, ::2], lambda x: x[::-1], lambda x: x[:0]):
        assert np.array_equal(to_cpu(view(managed)).result(), view(values))
    assert all((result == 8).all() for result in streamlap.pipelined_run(square, n=3))

    class Mine(cupy.ndarray):
        pass

    mine = cupy.asarray(values).view(Mine)
    assert isinstance(to_cpu(mine).result(), np.ndarray)
    assert np.array_equal(to_cpu(mine).result(), values)


@pytest.mark.gpu
def test_results_are_in_pinned_memory_and_cupyx_s_pinned_arrays_are_sources(cupy):
    import cupyx

    x = cupy.ones((16, 16), cupy.float32)
    for result in [to_cpu(x).result(), *streamlap.pipelined_run(x, n=2)]:
        assert isinstance(result, np.ndarray)
        assert torch.from_numpy(result).is_pinned()
    pinned = cupyx.zeros_pinned((16, 16), np.float32)
    pinned[:] = 3
    transfer = to_device(pinned, "cuda:0")
    assert transfer.stats()["paths"] == ["direct"]
    assert bool((transfer.result() == 3).all())
    assert np.array_equal(to_cpu(pinned).result(), pinned)
    out = cupyx.empty_pinned((16, 16), np.float32)
    transfer = to_cpu(x, out=out)
    assert transfer.stats()["paths"] == ["direct"]
    assert transfer.result() is out
    assert (out == 1).all()


@pytest.mark.gpu
def test_trees_of_both_libraries_are_ordered_each_by_its_own_stream(cupy):
    held = CupySide(cupy.cuda.Stream(non_blocking=True))
    other = side("cuda:0", "consumer")
    with held.stream, other.current():
        x, new, values = two_arrays(cupy)
        tensor = torch.full(SHAPE, 4.0, device="cuda:0")
        for _ in range(2):
            cupy.copyto(x, new)
            to_cpu({"cupy": [x, x[:, ::2]], "torch": tensor}).result()
        x.fill(-1)
        finish_all("cuda:0")
        gate = held.hold()
        cupy.copyto(x, new)
        transfer = to_cpu({"cupy": [x, x[:, ::2]], "torch": tensor})
        assert is_held(transfer)
        gate.open()
        result = transfer.result()
    assert np.array_equal(result["cupy"][0], values)
    assert np.array_equal(result["cupy"][1], values[:, ::2])
    assert bool((result["torch"] == 4).all())


@pytest.mark.gpu
def test_a_capture_by_cupy_is_refused_and_stays_good(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.ones((16, 16), cupy.float32)
        y = cupy.zeros_like(x)
        cupy.copyto(y, x)
        to_cpu(x).result()
        finish_all("cuda:0")
        stream.begin_capture()
        cupy.copyto(y, x)
        for call in (
            lambda: to_cpu(x),
            lambda: to_cpu(x[:, ::2]),
            lambda: to_cpu(x[::-1]),
            lambda: to_device(x, "cuda:0"),
            lambda: streamlap.pipelined_run(x, n=2),
            lambda: streamlap.pipelined_run(x, n=2, fn=lambda x: x),
            lambda: streamlap.run(x, n=2),
        ):
            with pytest.raises(streamlap.CaptureError):
                call()
        graph = stream.end_capture()
        y.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert (cupy.asnumpy(y) == 1).all()


@pytest.mark.gpu
def test_cupy_s_own_pipeline_and_copy(cupy):
    from streamlap.crosscheck import cupy_pipeline

    values = np.random.default_rng(3).integers(-9, 9, (32, 32)).astype(np.float32)
    for n, depth in ((0, 4), (1, 4), (7, 3), (4, 4)):
        results = cupy_pipeline.pipelined_run(cupy.asarray(values), n, depth)
        assert len(results) == n
        assert all(np.array_equal(result, values @ values) for result in results)
    assert np.array_equal(cupy_pipeline.to_host(cupy.asarray(values)[::-1, ::2]), values[::-1, ::2])


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_an_array_on_another_device_than_the_current_one(cupy):
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        held = CupySide(stream, 1)
        stream.use()
        x, new, values = two_arrays(cupy)
        square = cupy.asarray(np.diag(np.arange(8, dtype=np.float32)))
        for _ in range(2):
            cupy.copyto(x, new)
            for view in (lambda x: x, lambda x: x[:, ::2], lambda x: x[::-1]):
                to_cpu(view(x)).result()
            streamlap.pipelined_run(square, n=3)
    try:
        for view in (lambda x: x, lambda x: x[:, ::2], lambda x: x[::-1]):
            with cupy.cuda.Device(1):
                x.fill(-1)
            finish_all("cuda:1")
            with cupy.cuda.Device(1):
                gate = held.hold()
                cupy.copyto(x, new)
            assert cupy.cuda.runtime.getDevice() == 0
            transfer = to_cpu(view(x))
            assert is_held(transfer)
            gate.open()
            assert np.array_equal(transfer.result(), view(values))
        results = streamlap.pipelined_run(square, n=3)
        expected = np.diag(np.arange(8, dtype=np.float32) ** 2)
        assert all(np.array_equal(result, expected) for result in results)
        assert cupy.cuda.runtime.getDevice() == 0
        assert torch.cuda.current_device() == 0
    finally:
        with cupy.cuda.Device(1):
            cupy.cuda.Stream.null.use()
