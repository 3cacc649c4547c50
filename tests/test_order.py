"""No byte is read before it is right, and none is overwritten while it is still being read.

A gate holds a stream; the copy is shown not to happen; the gate opens; the bytes are compared.
Everything is run once before the gate is armed, so that nothing is allocated or loaded behind it.
"""

import ctypes
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from helpers.data import is_poison, poison, random_bits, random_numbers, same_bits, same_tree
from helpers.streams import (
    CopySide,
    engine_of,
    eventually,
    finish_all,
    is_held,
    side,
    stays_false,
)

import streamlap
from streamlap import _native, to_cpu, to_device
from streamlap.devices import place_of

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPE = (64, 48)


class Case:
    """One path of ``to_cpu``: sources, the call, and the result expected of new source values."""

    def __init__(self, where, sources=1, view=None, pick=None, dtype=None, out=None, **options):
        self.bases = [poison(torch.empty(SHAPE, device=where)) for _ in range(sources)]
        self.sources = [view(base) if view else base for base in self.bases]
        self.tree = pick(self.sources) if pick else self.sources[0]
        self.pick = pick or (lambda leaves: leaves[0])
        self.dtype = dtype
        self.out = out(self.sources[0].shape) if out else None
        self.options = options

    def start(self, stream):
        return to_cpu(self.tree, out=self.out, dtype=self.dtype, stream=stream, **self.options)

    def expected(self, values):
        values = [value.cpu() for value in values]
        return self.pick([v.to(self.dtype) if self.dtype else v for v in values])


def strided_out(shape):
    return torch.empty(shape[0], 2 * shape[1])[:, ::2]


CASES = {
    "direct": {},
    "chunks": {"chunk_bytes": 1000},
    "tree": {"sources": 3, "pick": lambda s: [s[0], {"a": s[1], "b": (s[2], 7, "text")}]},
    "pin_false": {"pin": False},
    "out_ordinary": {"out": torch.empty},
    "out_pinned": {"out": streamlap.empty_pinned},
    "out_strided": {"out": strided_out},
    "out_transposed": {"out": lambda shape: torch.empty(tuple(shape)[::-1]).t()},
    "source_transposed": {"view": lambda base: base.t()},
    "source_strided": {"view": lambda base: base[:, ::2]},
    "source_strided_pin_false": {"view": lambda base: base[:, ::2], "pin": False},
    "source_strided_out_strided": {"view": lambda base: base[::2], "out": strided_out},
    "source_offset": {"view": lambda base: base.view(-1)[5:1234]},
    "dtype": {"dtype": torch.float16},
    "dtype_pin_false": {"dtype": torch.float64, "pin": False},
    "dtype_out": {"dtype": torch.float64, "out": lambda shape: torch.empty(shape).double()},
    "dtype_out_strided": {"dtype": torch.float64, "out": lambda shape: strided_out(shape).double()},
}


@pytest.mark.parametrize("name", CASES)
def test_to_cpu_waits_for_the_producer(where, name):
    case = Case(where, **CASES[name])
    producer = side(where, "producer")
    case.start(producer.stream).result()
    values = [random_numbers(source.shape, where=where) for source in case.sources]
    producer.copy(case.sources[0], values[0])
    producer.sync()
    for base in case.bases:
        poison(base)
    if case.out is not None:
        poison(case.out)
    finish_all(where)

    gate = producer.hold()
    for source, value in zip(case.sources, values, strict=True):
        producer.copy(source, value)
    transfer = case.start(producer.stream)
    assert not transfer.done()
    assert is_held(transfer)
    assert case.out is None or is_poison(case.out)
    gate.open()
    result = transfer.result()
    assert same_tree(result, case.expected(values))
    assert case.out is None or result is case.out


def test_to_cpu_into_numpy_waits_for_the_producer(where):
    producer = side(where, "producer")
    source = poison(torch.empty(SHAPE, device=where))
    out = np.empty(SHAPE, np.float32)
    to_cpu(source, out=out, stream=producer.stream).result()
    value = random_numbers(SHAPE, where=where)
    producer.copy(source, value)
    producer.sync()
    poison(source)
    out[:] = -1
    finish_all(where)
    gate = producer.hold()
    producer.copy(source, value)
    transfer = to_cpu(source, out=out, stream=producer.stream)
    assert is_held(transfer)
    assert (out == -1).all()
    gate.open()
    assert transfer.result() is out
    assert same_bits(out, value.cpu())


@pytest.mark.gpu
def test_the_producer_is_the_current_stream():
    where = "cuda:0"
    producer = side(where, "producer")
    source = poison(torch.empty(SHAPE, device=where))
    value = random_bits(SHAPE, where=where)
    with producer.current():
        streamlap.copy_to_cpu(source)
        producer.copy(source, value)
        producer.sync()
        poison(source)
        finish_all(where)
        gate = producer.hold()
        producer.copy(source, value)
        transfer = streamlap.copy_to_cpu(source, non_blocking=True)
    assert is_held(transfer)
    gate.open()
    assert same_bits(transfer.result(), value)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["handle", "protocol", "attribute"])
def test_streams_of_other_libraries_are_producers(form):
    class Protocol:
        def __init__(self, handle):
            self.handle_value = handle

        def __cuda_stream__(self):
            return (0, self.handle_value)

    class Attribute:
        def __init__(self, handle):
            self.ptr = handle
            self.device_id = 0

    where = "cuda:0"
    producer = side(where, "producer")
    handle = producer.stream.cuda_stream
    stream = {"handle": handle, "protocol": Protocol(handle), "attribute": Attribute(handle)}[form]
    source = poison(torch.empty(SHAPE, device=where))
    value = random_bits(SHAPE, where=where)
    to_cpu(source, stream=stream).result()
    producer.copy(source, value)
    producer.sync()
    poison(source)
    finish_all(where)
    gate = producer.hold()
    producer.copy(source, value)
    transfer = to_cpu(source, stream=stream)
    assert is_held(transfer)
    gate.open()
    assert same_bits(transfer.result(), value)


def test_copy_to_cpu_blocks_until_the_bytes_are_right(where):
    """On the CPU the calling thread is the producer; here the copy itself is held."""
    source = random_bits(SHAPE, where=where)
    producer = side(where, "producer")
    with producer.current():
        streamlap.copy_to_cpu(source)
    finish_all(where)
    found = []

    def copy():
        with producer.current():
            found.append(streamlap.copy_to_cpu(source))

    gate = producer.hold() if where != "cpu" else CopySide(where).hold()
    thread = threading.Thread(target=copy)
    thread.start()
    assert stays_false(lambda: not thread.is_alive())
    gate.open()
    thread.join(20)
    assert same_bits(found[0], source)


# -- to_device


class ToDevice:
    """One path of ``to_device``: a source, perhaps a destination that its consumer still reads."""

    def __init__(self, where, view=None, pinned=False, dtype=None, out=None, on_device=False):
        base = random_numbers(SHAPE)
        if pinned:
            base = streamlap.empty_pinned(SHAPE).copy_(base)
        if on_device:
            base = base.to(where)
        self.where = where
        self.source = view(base) if view else base
        self.dtype = dtype
        self.out = None
        if out:
            wanted = dtype or torch.float32
            shape = self.source.shape
            self.out = {
                "out": torch.empty(shape, dtype=wanted, device=where),
                "out_strided": torch.empty(shape[0], 2 * shape[1], dtype=wanted, device=where)[
                    :, ::2
                ],
                "out_transposed": torch.empty(tuple(shape)[::-1], dtype=wanted, device=where).t(),
            }[out]

    def start(self, stream):
        return to_device(self.source, self.where, out=self.out, dtype=self.dtype, stream=stream)


TO_DEVICE = {
    "ordinary": {},
    "pinned": {"pinned": True},
    "strided": {"view": lambda base: base[:, ::2]},
    "pinned_strided": {"view": lambda base: base[:, ::2], "pinned": True},
    "transposed": {"view": lambda base: base.t()},
    "dtype": {"dtype": torch.float64},
    "pinned_dtype": {"dtype": torch.float16, "pinned": True},
    "out": {"out": "out"},
    "pinned_out": {"out": "out", "pinned": True},
    "out_strided": {"out": "out_strided"},
    "pinned_out_strided": {"out": "out_strided", "pinned": True},
    "pinned_out_transposed": {"out": "out_transposed", "pinned": True},
    "dtype_out": {"out": "out", "dtype": torch.float64},
    "on_device": {"on_device": True},
    "on_device_out": {"on_device": True, "out": "out"},
    "on_device_strided": {"on_device": True, "view": lambda base: base[:, ::2]},
}


@pytest.mark.parametrize("name", TO_DEVICE)
def test_to_device_comes_after_the_consumer_s_earlier_work(where, name):
    case = ToDevice(where, **TO_DEVICE[name])
    consumer = side(where, "consumer")
    case.start(consumer.stream).result()
    seen = old = None
    if case.out is not None:
        old = random_numbers(case.out.shape, case.out.dtype, where)
        seen = poison(torch.empty_like(old))
        consumer.copy(seen, case.out)
        consumer.sync()
        case.out.copy_(old)
    finish_all(where)

    gate = consumer.hold()
    if case.out is not None:
        consumer.copy(seen, case.out)
    transfer = case.start(consumer.stream)
    assert not transfer.done()
    assert is_held(transfer)
    gate.open()
    result = transfer.result()
    assert result.device.type == torch.device(where).type
    expected = case.source.to(case.dtype) if case.dtype else case.source
    assert same_bits(result, expected)
    consumer.sync()
    if case.out is not None:
        assert result is case.out
        assert same_bits(seen, old)


@pytest.mark.gpu
def test_a_device_source_of_to_device_waits_for_its_producer():
    where = "cuda:0"
    producer = side(where, "producer")
    consumer = side(where, "consumer")
    source = poison(torch.empty(SHAPE, device=where))
    value = random_bits(SHAPE, where=where)
    with producer.current():
        to_device(source, where, stream=consumer.stream).result()
        producer.copy(source, value)
        producer.sync()
        poison(source)
        finish_all(where)
        gate = producer.hold()
        producer.copy(source, value)
        transfer = to_device(source, where, stream=consumer.stream)
    assert is_held(transfer)
    gate.open()
    assert same_bits(transfer.result(), value)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_consumer_s_stream_waits_for_the_destination(where, pinned):
    consumer = side(where, "consumer")
    source = random_bits(SHAPE)
    if pinned:
        source = streamlap.empty_pinned(SHAPE).copy_(source)
    out = torch.empty(SHAPE, device=where)
    seen = torch.empty(SHAPE, device=where)
    to_device(source, where, out=out, stream=consumer.stream).wait(consumer.stream)
    consumer.copy(seen, out)
    finish_all(where)
    poison(out)
    poison(seen)
    finish_all(where)
    copies = CopySide(where, to_device=True)
    if where != "cpu" and not pinned:
        # Copies of ordinary memory are issued by a thread: until then, wait() blocks the caller.
        transfer = to_device(source, where, out=out, stream=consumer.stream)
        assert transfer.wait(consumer.stream) is out
        consumer.copy(seen, out)
        consumer.sync()
    else:
        gate = copies.hold()
        transfer = to_device(source, where, out=out, stream=consumer.stream)
        assert transfer.wait(consumer.stream) is out
        consumer.copy(seen, out)
        passed = consumer.passed()
        assert stays_false(passed)
        gate.open()
        consumer.sync()
    assert same_bits(seen, source)
    transfer.result()


# -- the other direction: what a copy still reads or somebody still uses


@pytest.mark.parametrize("name", ["direct", "chunks", "tree", "source_transposed"])
@pytest.mark.parametrize("how", ["wait_source", "protect"])
def test_a_source_may_be_overwritten_after_its_readers(where, name, how):
    case = Case(where, **CASES[name])
    writer = side(where, "producer")
    if how == "protect":
        case.options["protect"] = True
    case.start(writer.stream).result()
    writer.sync()
    old = [random_bits(source.shape, where=where) for source in case.sources]
    new = [random_bits(source.shape, where=where) for source in case.sources]
    writer.copy(case.sources[0], new[0])
    writer.sync()
    for source, value in zip(case.sources, old, strict=True):
        source.copy_(value)
    finish_all(where)

    gate = CopySide(where).hold()
    transfer = case.start(writer.stream)
    if how == "wait_source":
        transfer.wait_source(writer.stream)
    for source, value in zip(case.sources, new, strict=True):
        writer.copy(source, value)
    passed = writer.passed()
    assert stays_false(passed)
    assert where != "cpu" or same_bits(case.sources[0], old[0])
    assert not transfer.done()
    gate.open()
    assert same_tree(transfer.result(), case.expected(old))
    writer.sync()
    assert same_bits(case.sources[0], new[0])


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["wait_source", "protect"])
def test_the_writer_is_the_current_stream(how):
    where = "cuda:0"
    writer = side(where, "producer")
    old, new = random_bits(SHAPE, where=where), random_bits(SHAPE, where=where)
    source = old.clone()
    with writer.current():
        to_cpu(source, protect=True).result()
        writer.copy(source, old)
        finish_all(where)
        gate = CopySide(where).hold()
        transfer = to_cpu(source, protect=how == "protect")
        if how == "wait_source":
            transfer.wait_source()
        source.copy_(new)
        assert stays_false(writer.passed())
    gate.open()
    assert same_bits(transfer.result(), old)
    finish_all(where)
    assert same_bits(source, new)


def test_a_source_in_host_memory_is_overwritten_after_blocking(where):
    """The writer is the calling thread, so wait_source() and protect=True block it."""
    source = streamlap.empty_pinned(SHAPE)
    old, new = random_bits(SHAPE), random_bits(SHAPE)
    to_device(source.copy_(old), where).result()
    for how in ("wait_source", "protect"):
        source.copy_(old)
        finish_all(where)
        found = []

        def write(how=how, found=found):
            transfer = to_device(source, where, protect=how == "protect")
            if how == "wait_source":
                transfer.wait_source()
            source.copy_(new)
            found.append(transfer)

        gate = CopySide(where, to_device=True).hold()
        thread = threading.Thread(target=write)
        thread.start()
        assert stays_false(lambda found=found: bool(found))
        assert same_bits(source, old)
        gate.open()
        thread.join(20)
        assert same_bits(found[0].result(), old)


@pytest.mark.gpu
def test_out_is_written_after_the_current_stream_s_earlier_reads():
    where = "cuda:0"
    producer, reader = side(where, "producer"), side(where, "consumer")
    source = random_bits(SHAPE, where=where)
    old = random_bits(SHAPE)
    out = streamlap.empty_pinned(SHAPE).copy_(old)
    seen = torch.empty(SHAPE, device=where)
    with reader.current():
        seen.copy_(out, non_blocking=True)
        to_cpu(source, out=out, stream=producer.stream).result()
        out.copy_(old)
        poison(seen)
        finish_all(where)
        gate = reader.hold()
        seen.copy_(out, non_blocking=True)
        transfer = to_cpu(source, out=out, stream=producer.stream)
        assert is_held(transfer)
        assert same_bits(out, old)
        gate.open()
        assert same_bits(transfer.result(), source)
    finish_all(where)
    assert same_bits(seen, old)


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("cpu", "record_use"),
        pytest.param("cuda:0", "record_use", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "current_stream", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "leaf", marks=pytest.mark.gpu),
    ],
)
def test_a_dead_result_is_not_reused_while_a_consumer_reads_it(where, how):
    consumer = side(where, "consumer")
    source = random_bits(SHAPE, where=where)
    pool = streamlap.PinnedPool("1MiB") if where == "cpu" else None
    seen = poison(torch.empty(SHAPE, device=where))

    def fetch():
        if how == "leaf":
            return to_cpu([source, *source[:9]]).result()[0]
        return to_cpu(source, pool=pool).result()

    warm = [fetch(), fetch()]  # two blocks, so that none is made behind the gate
    consumer.copy(seen, warm[0])
    consumer.sync()
    poison(seen)
    for result in warm:
        poison(result)
    finish_all(where)
    del warm, result
    finish_all(where)

    result = fetch()
    address = result.data_ptr()
    gate = consumer.hold()
    if where == "cpu":
        target, values = (
            seen.numpy(),
            np.frombuffer(memoryview(_bytes_at(address, result.nbytes)), np.float32).reshape(SHAPE),
        )
        consumer.native.launch(lambda: np.copyto(target, values))
    else:
        consumer.copy(seen, result)
    if how == "record_use":
        streamlap.record_use(result, consumer.stream)
        del result
    else:
        with consumer.current():
            del result
    stats = pool.stats if pool else lambda: streamlap.pool_stats(where)
    assert stats()["in_flight"] >= seen.nbytes
    other = streamlap.empty_pinned(SHAPE, torch.float32, pool)
    assert other.data_ptr() != address
    poison(other)
    assert stays_false(consumer.passed())
    assert stats()["in_flight"] >= seen.nbytes
    gate.open()
    consumer.sync()
    assert same_bits(seen, source)
    assert eventually(lambda: stats()["in_flight"] == 0)
    if how != "leaf":  # that one's block is larger
        again = streamlap.empty_pinned(SHAPE, torch.float32, pool)
        assert again.data_ptr() == address


def _bytes_at(address, count):
    return (ctypes.c_char * count).from_address(address)


# -- borrowed sources


def test_a_borrowed_source_that_changed_is_noticed(where):
    source = random_bits(SHAPE, where=where)
    to_cpu(source).result()
    source.add_(0)
    finish_all(where)
    gate = CopySide(where).hold()
    transfer = to_cpu(source)
    source.add_(1)
    gate.open()
    with pytest.raises(streamlap.SourceModified, match="64, 48"):
        transfer.result()
    with pytest.raises(streamlap.SourceModified):
        transfer.result()
    assert isinstance(transfer.exception(), RuntimeError)


def test_a_change_is_not_forgotten_by_asking(where):
    source = random_bits(SHAPE, where=where)
    to_cpu(source).result()
    source.add_(0)
    finish_all(where)
    gate = CopySide(where).hold()
    transfer = to_cpu(source)
    source.add_(1)
    gate.open()
    assert eventually(transfer.done)
    transfer.wait_source()
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


@pytest.mark.parametrize("how", ["done", "result", "wait_source"])
def test_a_source_that_was_read_may_change(where, how):
    source = random_bits(SHAPE, where=where)
    old = source.clone()
    transfer = to_cpu(source)
    if how == "done":
        assert eventually(transfer.done)
    elif how == "result":
        transfer.result()
    else:
        transfer.wait_source()
    source.add_(1)
    assert transfer.exception() is None
    assert same_bits(transfer.result(), old)


@pytest.mark.gpu
def test_a_packed_source_is_not_borrowed():
    """What was packed on the producer's stream may be written by that stream at once."""
    source = random_bits(SHAPE, where="cuda:0")
    old = source.double()
    transfer = to_cpu(source, dtype=torch.float64)
    source.add_(1)
    assert same_bits(transfer.result(), old)


def test_a_borrowed_host_source_that_changed_is_noticed(where):
    source = streamlap.empty_pinned(SHAPE).copy_(random_bits(SHAPE))
    to_device(source, where).result()
    finish_all(where)
    gate = CopySide(where, to_device=True).hold()
    transfer = to_device(source, where)
    source.add_(1)
    gate.open()
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


def test_inference_tensors_have_no_version_and_are_copied(where):
    with torch.inference_mode():
        source = random_bits(SHAPE, where=where)
        value = source.clone()
        assert same_bits(to_cpu(source).result(), value)
    assert same_bits(to_cpu(source).result(), value)


# -- pipelines


def test_pipelined_run_waits_for_the_producer(where):
    """On a GPU the current stream makes x; on the CPU the worker that computes is held."""
    producer = side(where, "producer")
    x = poison(torch.empty(32, 32, device=where))
    value = random_numbers((32, 32), where=where)
    out = torch.empty(3, 32, 32)
    with producer.current():
        streamlap.pipelined_run(x, n=3, out=out)
        expected = value.mm(value).cpu()
        producer.copy(x, value)
        producer.sync()
        poison(x)
        poison(out)
        finish_all(where)
        gate = (
            place_of(torch.device("cpu")).compute_stream().gate()
            if where == "cpu"
            else producer.hold()
        )
        if where == "cpu":
            np.copyto(x.numpy(), value.numpy())
        else:
            producer.copy(x, value)
        transfer = streamlap.pipelined_run(x, n=3, out=out, wait=False)
        assert not transfer.done()
        assert stays_false(transfer.done)
        assert is_poison(out)
        gate.open()
        transfer.result()
    assert all(same_bits(item, expected) for item in out)


@pytest.mark.gpu
def test_pipelined_run_with_pinned_results_waits_for_the_producer():
    where = "cuda:0"
    producer = side(where, "producer")
    x = poison(torch.empty(32, 32, device=where))
    value = random_numbers((32, 32), where=where)
    with producer.current():
        streamlap.pipelined_run(x, n=4)
        expected = value.mm(value).cpu()
        producer.copy(x, value)
        producer.sync()
        poison(x)
        finish_all(where)
        gate = producer.hold()
        producer.copy(x, value)
        transfer = streamlap.pipelined_run(x, n=4, wait=False)
        assert stays_false(transfer.done)
        gate.open()
        results = transfer.result()
    assert all(same_bits(item, expected) for item in results)


def test_pipelined_map_waits_for_the_producer(where):
    producer = side(where, "producer")
    xs = [poison(torch.empty(32, 32, device=where)) for _ in range(3)]
    values = [random_numbers((32, 32), where=where) for _ in xs]

    def square(x):
        return x.mm(x)

    found = []

    def consume():
        with producer.current():
            found.extend(streamlap.pipelined_map(square, xs))

    with producer.current():
        list(streamlap.pipelined_map(square, xs))
        expected = [square(value).cpu() for value in values]
        for x, value in zip(xs, values, strict=True):
            producer.copy(x, value)
        producer.sync()
        for x in xs:
            poison(x)
        finish_all(where)
        gate = (
            place_of(torch.device("cpu")).compute_stream().gate()
            if where == "cpu"
            else producer.hold()
        )
        for x, value in zip(xs, values, strict=True):
            if where == "cpu":
                np.copyto(x.numpy(), value.numpy())
            else:
                producer.copy(x, value)
    thread = threading.Thread(target=consume)
    thread.start()
    assert stays_false(lambda: bool(found))
    gate.open()
    thread.join(20)
    assert same_tree(found, expected)


@pytest.mark.gpu
def test_x_may_be_written_after_wait_source_of_a_pipeline():
    where = "cuda:0"
    producer, writer = side(where, "producer"), side(where, "consumer")
    x = random_numbers((32, 32), where=where)
    new = random_numbers((32, 32), where=where)
    with producer.current():
        streamlap.pipelined_run(x, n=3)
        expected = x.mm(x).cpu()
        writer.copy(torch.empty_like(x), new)
        finish_all(where)
        gate = producer.hold()
        transfer = streamlap.pipelined_run(x, n=3, wait=False)
        transfer.wait_source(writer.stream)
        writer.copy(x, new)
        assert stays_false(writer.passed())
        gate.open()
    assert all(same_bits(item, expected) for item in transfer.result())


# -- lifetime


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("drop", ["source", "transfer_later"])
def test_a_source_dropped_early_is_copied_right(where, name, drop):
    case = Case(where, **CASES[name])
    producer = side(where, "producer")
    case.start(producer.stream).result()
    values = [random_numbers(source.shape, where=where) for source in case.sources]
    for source, value in zip(case.sources, values, strict=True):
        source.copy_(value)
    shapes = [base.shape for base in case.bases]
    others = [_filled(shape, where) for shape in shapes * 2]
    finish_all(where)
    del others
    gate = producer.hold()
    transfer = case.start(producer.stream)
    case.sources = case.bases = case.tree = source = None
    assert not transfer.done()
    # What the allocator gives out now must not be what is still to be read.
    others = [_filled(shape, where) for shape in shapes * 3]
    assert is_held(transfer)
    gate.open()
    result = transfer.result()
    if drop == "transfer_later":
        del transfer
        gc.collect()
    assert same_tree(result, case.expected(values))
    del others


def _filled(shape, where):
    return torch.empty(shape, device=where).fill_(-7)


def test_a_dropped_transfer_still_writes_its_destination(where):
    producer = side(where, "producer")
    out = torch.empty(SHAPE)
    source = random_bits(SHAPE, where=where)
    value = source.cpu()
    to_cpu(source, out=out, stream=producer.stream).result()
    poison(out)
    finish_all(where)
    others = [_filled(SHAPE, where) for _ in range(2)]
    finish_all(where)
    del others
    gate = producer.hold()
    transfer = to_cpu(source, out=out, stream=producer.stream)
    del transfer, source
    gc.collect()
    assert engine_of(where).abandoned() == 1
    kept = [_filled(SHAPE, where) for _ in range(3)]
    assert is_poison(out)
    gate.open()
    assert eventually(lambda: engine_of(where).abandoned() == 0)
    assert same_bits(out, value)
    finish_all(where)
    assert all(bool((other == -7).all()) for other in kept)


def test_an_abandoned_transfer_keeps_both_ends(where):
    """Everything is dropped behind a closed gate; then its pinned block must not be given out."""
    producer = side(where, "producer")
    source = random_bits(SHAPE, where=where)
    pool = streamlap.PinnedPool("1MiB")
    with producer.current():
        warm = [to_cpu(source, stream=producer.stream, pool=pool).result() for _ in range(2)]
        del warm
        finish_all(where)
        gate = producer.hold()
        transfer = to_cpu(source, stream=producer.stream, pool=pool)
        live = pool.stats()["live"]
        assert live >= source.nbytes
        del transfer
        gc.collect()
        assert stays_false(lambda: pool.stats()["cached"] > live)  # of two blocks one is cached
        other = streamlap.empty_pinned(SHAPE, torch.float32, pool)
        mine = random_bits(SHAPE)
        other.copy_(mine)
        del source
        gate.open()
        assert eventually(lambda: engine_of(where).abandoned() == 0)
    finish_all(where)
    assert same_bits(other, mine)
    del other
    assert eventually(lambda: pool.stats()["live"] == 0 and pool.stats()["in_flight"] == 0)


def test_memory_is_let_go_of_when_done_and_not_before():
    """A NumPy array can be watched through every view that torch makes of it."""
    array = np.arange(3000, dtype=np.float32)
    out = np.empty_like(array)
    watched, watched_out = weakref.ref(array), weakref.ref(out)
    gate = CopySide("cpu").hold()
    transfer = to_cpu(torch.from_numpy(array), out=torch.from_numpy(out))
    del array, out
    gc.collect()
    assert watched() is not None
    assert watched_out() is not None
    gate.open()
    result = transfer.result()
    assert eventually(lambda: watched() is None)
    assert watched_out() is not None
    assert float(result[-1]) == 2999
    del transfer, result
    assert eventually(lambda: watched_out() is None)


def test_an_abandoned_transfer_lets_go_of_everything():
    array = np.arange(3000, dtype=np.float32)
    watched = weakref.ref(array)
    gate = CopySide("cpu").hold()
    transfer = to_cpu(torch.from_numpy(array))
    del array, transfer
    gc.collect()
    assert watched() is not None
    gate.open()
    assert eventually(lambda: watched() is None)


@pytest.mark.gpu
def test_device_memory_is_let_go_of_when_done():
    where = "cuda:0"
    source = torch.empty(1 << 20, device=where)
    producer = side(where, "producer")
    to_cpu(source, stream=producer.stream).result()
    finish_all(where)
    gc.collect()
    before = torch.cuda.memory_allocated(where)
    gate = producer.hold()
    transfer = to_cpu(source, stream=producer.stream)
    del source
    gc.collect()
    assert torch.cuda.memory_allocated(where) == before
    gate.open()
    result = transfer.result()
    assert eventually(lambda: torch.cuda.memory_allocated(where) == before - (4 << 20))
    del result


@pytest.mark.parametrize("order", ["source", "result", "transfer"])
def test_objects_may_die_in_any_order(where, order):
    before = streamlap.pool_stats(where)["live"]
    things = {"source": random_bits(SHAPE, where=where)}
    value = things["source"].cpu()
    things["transfer"] = to_cpu(things["source"])
    things["result"] = things["transfer"].result()
    view = things["result"][3:]
    for name in [order, *things]:
        things.pop(name, None)
        gc.collect()
    assert same_bits(view, value[3:])
    assert streamlap.pool_stats(where)["live"] > before
    del view
    assert eventually(lambda: streamlap.pool_stats(where)["live"] == before)


def test_the_destination_of_a_dropped_to_device_is_not_reused(where):
    consumer = side(where, "consumer")
    source = streamlap.empty_pinned(SHAPE).copy_(random_bits(SHAPE))
    with consumer.current():
        warm = [to_device(source, where, stream=consumer.stream).result() for _ in range(3)]
        warm.append(_filled(SHAPE, where))
        finish_all(where)
        del warm
        finish_all(where)
        gate = CopySide(where, to_device=True).hold()
        transfer = to_device(source, where, stream=consumer.stream)
        del transfer
        gc.collect()
        other = _filled(SHAPE, where)
        gate.open()
        assert eventually(lambda: engine_of(where).abandoned() == 0)
        finish_all(where)
        assert bool((other == -7).all())


# -- streams and captures that are easy to get wrong


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["source_strided", "dtype", "source_strided_pin_false"])
def test_the_default_stream_is_the_producer_while_another_is_current(name):
    """torch takes the handle 0 for "no stream given"; packing belongs on the default stream."""
    where = "cuda:0"
    case = Case(where, **CASES[name])
    other, default = side(where, "producer"), torch.cuda.default_stream()
    native = _native.cuda_runtime().adopt(0, 0)
    with other.current():
        case.start(default).result()
    value = random_numbers(case.sources[0].shape, where=where)
    case.sources[0].copy_(value)
    poison(case.bases[0])
    finish_all(where)
    gate = native.gate()
    case.sources[0].copy_(value)
    with other.current():
        transfer = case.start(default)
    assert is_held(transfer)
    gate.open()
    assert same_tree(transfer.result(), case.expected([value]))


@pytest.mark.gpu
def test_every_call_refuses_a_capture_and_leaves_it_good():
    where = "cuda:0"
    x = random_numbers((32, 32), where=where)
    y = torch.empty_like(x)
    out = streamlap.empty_pinned((32, 32))
    before = to_cpu(x)
    before.result()
    flying = to_cpu(x)
    other = side(where, "consumer")
    to_cpu(x, out=out, stream=other.stream).result()
    to_device(out, where).result()
    finish_all(where)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x)
        for call in (
            lambda: to_cpu(x),
            lambda: to_cpu(x, out=out, stream=other.stream),
            lambda: to_device(out, where),
            lambda: flying.wait(),
            lambda: flying.wait_source(),
            lambda: streamlap.pipelined_run(x, n=2),
            lambda: next(streamlap.pipelined_map(lambda item: item + 1, [x])),
        ):
            with pytest.raises(streamlap.CaptureError):
                call()
        y.add_(1)
    graph.replay()
    finish_all(where)
    assert torch.equal(y, x + 1)
    assert torch.equal(flying.result(), x.cpu())
    assert torch.equal(to_cpu(x, out=out).result(), x.cpu())
