"""What a Transfer promises: waiting, callbacks, asyncio, items, chunks, figures, trees."""

import asyncio
import gc
import logging
import threading
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from helpers.data import random_bits, same_bits, same_tree
from helpers.streams import PATIENCE, CopySide, eventually, finish_all, is_held, runtime_of

import streamlap
from streamlap import Transfer, copy_to_cpu, to_cpu, to_device

pytestmark = pytest.mark.usefixtures("nothing_left")

Pair = namedtuple("Pair", "left right")


@pytest.fixture
def held(where):
    """A transfer that does not happen before the gate opens: [transfer, gate, expected]."""
    source = random_bits((50, 20), where=where)
    warm = [to_cpu(source).result() for _ in range(2)]
    del warm
    finish_all(where)
    gate = CopySide(where).hold()
    things = [to_cpu(source, timed=True), gate, source.cpu()]
    yield things
    things.clear()  # pytest itself would keep the transfer alive
    gate.open()
    finish_all(where)


# -- waiting


def test_result_times_out_and_may_be_asked_again(held):
    transfer, gate, expected = held
    with pytest.raises(streamlap.TransferTimeout, match="4000 bytes"):
        transfer.result(timeout=0)
    with pytest.raises(TimeoutError):
        transfer.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        transfer.exception(timeout=0.01)
    assert "in flight" in repr(transfer)
    gate.open()
    assert same_bits(transfer.result(timeout=20), expected)
    assert transfer.result() is transfer.result(0)
    assert transfer.done()
    assert transfer.exception() is None
    assert "4000 bytes, done" in repr(transfer)


@pytest.mark.parametrize("timeout", ["1", True, [1]])
def test_a_timeout_that_is_no_number(held, timeout):
    with pytest.raises(streamlap.InvalidType, match="timeout"):
        held[0].result(timeout)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_makes_no_sense(held, timeout):
    with pytest.raises(ValueError, match="timeout"):
        held[0].result(timeout)


def test_elapsed_needs_a_transfer_that_is_done(held):
    transfer, gate, _ = held
    with pytest.raises(ValueError, match="not done"):
        transfer.elapsed()
    gate.open()
    transfer.result()
    assert 0 <= transfer.elapsed() < 20


def test_timed_is_a_flag(where):
    with pytest.raises(streamlap.InvalidType, match="timed"):
        to_cpu(random_bits((3, 3), where=where), timed="yes")
    for timed in (True, False):
        source = random_bits((3, 3), where=where)
        assert same_bits(to_cpu(source, timed=timed).result(), source.cpu())


def test_stats_and_nbytes(where):
    tree = [random_bits((10, 10), where=where), random_bits(7, torch.float64, where), "text"]
    transfer = to_cpu(tree)
    assert transfer.nbytes == 456
    transfer.result()
    stats = transfer.stats()
    assert stats["nbytes"] == 456
    assert stats["leaves"] == 2
    assert stats["chunks"] == 2
    assert stats["paths"] == (["host"] if where == "cpu" else ["direct"])
    if where == "cpu":
        begin, end = stats["interval"]
        assert begin <= end


def test_the_interval_is_unknown_before_the_copy_is_done(held):
    assert held[0].stats()["interval"] is None


@pytest.mark.gpu
def test_the_path_says_how_it_was_copied():
    x = random_bits((10, 10), where="cuda:0")
    paths = {
        "staged": to_cpu(x, pin=False),
        "unpack": to_cpu(x, out=torch.empty(10, 20)[:, ::2]),
        "direct": to_cpu(x),
        "strided": to_cpu(x[:, ::2]),
    }
    for path, transfer in paths.items():
        transfer.result()
        assert transfer.stats()["paths"] == [path]
    assert to_device(torch.ones(3), "cuda").stats()["paths"] == ["staged"]


def test_wait_of_to_cpu_gives_nothing_and_orders(where):
    x = random_bits((10, 10), where=where)
    transfer = to_cpu(x)
    assert transfer.wait() is None
    assert same_bits(transfer.result(), x)


def test_wait_of_to_device_gives_the_destination(where):
    x = random_bits((10, 10))
    transfer = to_device([x, 5], where)
    tensor, five = transfer.wait()
    assert five == 5
    assert tensor.device.type == torch.device(where).type
    assert same_bits(tensor, x)


def test_a_released_gil_lets_others_work_while_result_waits(held):
    transfer, gate, expected = held
    results = []
    thread = threading.Thread(target=lambda: results.append(transfer.result()))
    thread.start()
    gate.open()  # would never run if result() kept the lock
    thread.join(20)
    assert same_bits(results[0], expected)


def test_many_threads_wait_for_one_transfer(held):
    transfer, gate, expected = held
    results, errors = [], []

    def ask(number):
        try:
            if number % 4 == 0:
                transfer.wait()
            elif number % 4 == 1:
                eventually(transfer.done)
            elif number % 4 == 2:
                transfer.exception()
            results.append(transfer.result())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert len(results) == 16
    assert all(result is results[0] for result in results)
    assert same_bits(results[0], expected)


# -- callbacks


def test_a_callback_comes_once_when_done_from_the_library_s_thread(held):
    transfer, gate, _ = held
    calls, called = [], threading.Event()

    def callback(done):
        calls.append((done, done.done(), threading.current_thread().name))
        called.set()

    transfer.add_done_callback(callback)
    assert not calls
    gate.open()
    assert called.wait(20)
    assert calls == [(transfer, True, "streamlap-callbacks")]


def test_a_callback_of_a_transfer_that_is_done_comes_now(where):
    transfer = to_cpu(random_bits(10, where=where))
    transfer.result()
    calls = []
    transfer.add_done_callback(lambda done: calls.append(threading.current_thread()))
    assert calls == [threading.current_thread()]


def test_callbacks_share_one_thread_and_each_comes(where):
    names, left = set(), threading.Semaphore(0)

    def callback(done):
        names.add(threading.current_thread().name)
        left.release()

    x = random_bits(1000, where=where)
    to_cpu(x).result()
    finish_all(where)
    gate = CopySide(where).hold()
    transfers = [to_cpu(x) for _ in range(20)]
    for transfer in transfers:
        transfer.add_done_callback(callback)
    gate.open()
    for _ in transfers:
        assert left.acquire(timeout=20)
    assert names == {"streamlap-callbacks"}


def test_what_a_callback_raises_is_logged_and_others_come(held, caplog):
    transfer, gate, _ = held
    called = threading.Event()

    def faulty(done):
        raise ArithmeticError("a faulty callback")

    transfer.add_done_callback(faulty)
    transfer.add_done_callback(lambda done: called.set())
    with caplog.at_level(logging.ERROR, logger="streamlap"):
        gate.open()
        assert called.wait(20)
        assert eventually(lambda: bool(caplog.records))
    assert caplog.records[0].name == "streamlap"
    assert isinstance(caplog.records[0].exc_info[1], ArithmeticError)
    caplog.clear()  # its tracebacks keep the transfer alive


def test_what_a_callback_raises_is_logged_when_it_comes_now(where, caplog):
    """The one who adds a callback is not to blame for what it does, now or later."""
    transfer = to_cpu(random_bits(10, where=where))
    transfer.result()

    def faulty(done):
        raise ArithmeticError("a faulty callback")

    with caplog.at_level(logging.ERROR, logger="streamlap"):
        transfer.add_done_callback(faulty)
    assert isinstance(caplog.records[0].exc_info[1], ArithmeticError)
    caplog.clear()


def test_a_callback_keeps_the_transfer_alive(held):
    transfer, gate, expected = held
    found = []
    called = threading.Event()

    def callback(done):
        found.append(done.result())
        called.set()

    transfer.add_done_callback(callback)
    del transfer
    gc.collect()
    gate.open()
    assert called.wait(20)
    assert same_bits(found.pop(), expected)


def test_a_callback_may_start_a_transfer_and_add_another(where):
    x = random_bits(100, where=where)
    called = threading.Event()
    found = []

    def second(done):
        found.append(done.result())
        called.set()

    to_cpu(x).add_done_callback(lambda done: to_cpu(x).add_done_callback(second))
    assert called.wait(20)
    assert same_bits(found.pop(), x)


def test_a_callback_must_be_callable(where):
    with pytest.raises(TypeError, match="callback"):
        to_cpu(random_bits(3, where=where)).add_done_callback(5)


def test_the_callback_of_an_empty_tree_comes(where):
    calls = []
    to_cpu([]).add_done_callback(calls.append)
    to_cpu(torch.empty(0, device=where)).add_done_callback(calls.append)
    assert len(calls) == 2


# -- asyncio


def test_await_gives_the_result(held):
    transfer, gate, expected = held

    async def main():
        asyncio.get_running_loop().call_later(0.01, gate.open)
        return await asyncio.wait_for(_awaited(transfer), 20)

    assert same_bits(asyncio.run(main()), expected)


async def _awaited(transfer):
    return await transfer


def test_cancelling_an_await_does_not_cancel_the_copy(held):
    transfer, gate, expected = held

    async def main():
        task = asyncio.create_task(_awaited(transfer))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not transfer.done()
        gate.open()
        return await transfer

    assert same_bits(asyncio.run(main()), expected)


def test_a_loop_that_is_closed_meanwhile_is_no_harm(held, caplog):
    transfer, gate, expected = held

    async def main():
        task = asyncio.create_task(_awaited(transfer))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    gate.open()
    assert same_bits(transfer.result(), expected)
    called = threading.Event()
    transfer.add_done_callback(lambda done: called.set())
    assert called.wait(20)
    assert not caplog.records


def test_await_of_many_at_once(where):
    xs = [random_bits(100, where=where) for _ in range(10)]

    async def main():
        return await asyncio.gather(*[_awaited(to_cpu(x)) for x in xs])

    assert same_tree(asyncio.run(main()), [x.cpu() for x in xs])


def test_await_raises_what_result_would(where):
    x = random_bits(100, where=where)
    to_cpu(x).result()
    x.add_(0)
    finish_all(where)
    gate = CopySide(where).hold()
    transfer = to_cpu(x)
    x.add_(1)

    async def main():
        asyncio.get_running_loop().call_later(0.01, gate.open)
        await transfer

    with pytest.raises(streamlap.SourceModified):
        asyncio.run(main())


# -- items


def test_items_of_a_list(where):
    xs = [random_bits((n, 3), where=where) for n in range(1, 6)]
    transfer = to_cpu(xs)
    assert len(transfer) == 5
    assert same_bits(transfer[0], xs[0])
    assert same_bits(transfer[-1], xs[4])
    assert same_tree(transfer[1:4], [x.cpu() for x in xs[1:4]])
    assert same_tree(transfer[::-2], [x.cpu() for x in xs[::-2]])
    assert same_tree(list(transfer), [x.cpu() for x in xs])
    assert transfer[2] is transfer.result()[2]
    with pytest.raises(IndexError):
        transfer[5]
    with pytest.raises(TypeError):
        transfer["a"]


def test_items_of_very_different_sizes(where):
    big = random_bits(1 << 20, torch.float32, where)
    last = random_bits(1 << 10, torch.float32, where)
    transfer = to_cpu([big, last])
    assert same_bits(transfer[0], big)
    assert same_bits(transfer[1], last)


def test_items_of_a_dict(where):
    tree = {"b": random_bits(3, where=where), "a": [random_bits(4, where=where), None]}
    transfer = to_cpu(tree)
    assert len(transfer) == 2
    assert list(transfer) == ["b", "a"]
    assert same_bits(transfer["b"], tree["b"])
    assert same_bits(transfer["a"][0], tree["a"][0])
    with pytest.raises(KeyError):
        transfer["c"]


def test_items_of_a_defaultdict(where):
    tree = defaultdict(list, {"a": random_bits(3, where=where), "b": random_bits(4, where=where)})
    transfer = to_cpu(tree)
    assert same_bits(transfer["b"], tree["b"])
    result = transfer.result()
    assert isinstance(result, defaultdict)
    assert result.default_factory is list


def test_items_of_an_ordered_dict_and_a_namedtuple(where):
    x, y = random_bits(3, where=where), random_bits(4, where=where)
    transfer = to_cpu(OrderedDict([("z", x), ("a", y)]))
    assert list(transfer) == ["z", "a"]
    assert same_bits(transfer["z"], x)
    transfer = to_cpu(Pair(x, y))
    assert len(transfer) == 2
    assert same_bits(transfer[1], y)
    result = transfer.result()
    assert isinstance(result, Pair)
    assert same_bits(result.left, x)


def test_a_single_tensor_has_no_items(where):
    transfer = to_cpu(random_bits((3, 3), where=where))
    for ask in (len, iter, lambda t: t[0]):
        with pytest.raises(TypeError, match="single tensor"):
            ask(transfer)


# -- trees


@pytest.mark.parametrize("tree", [[], {}, (), None, "text", 5, [None, {"a": ()}]])
def test_trees_without_tensors_pass_through(where, tree):
    transfer = to_cpu(tree)
    assert transfer.done()
    assert transfer.result() == tree
    assert transfer.nbytes == 0
    assert transfer.elapsed() == 0
    assert list(transfer.chunks()) == []
    assert to_device(tree, where).result() == tree


def test_leaves_that_are_no_tensors_pass_through(where):
    marker = object()
    x = random_bits((3, 4), where=where)
    tree = {"x": x, "n": 7, "f": [1.5, marker, "text", (x, None)], "g": np.float32(2)}
    for result in (to_cpu(tree).result(), to_device(tree, where).result()):
        assert result["f"][1] is marker
        assert result["n"] == 7
        assert result["g"] == np.float32(2)
        assert result["f"][3][1] is None
        assert same_bits(result["x"], x)
        assert same_bits(result["f"][3][0], x)


def test_a_tree_of_many_small_leaves(where):
    tree = {f"key{i}": random_bits((i % 5, 3), where=where) for i in range(60)}
    before = streamlap.pool_stats(where)["live_blocks"]
    with streamlap.use_runtime("host", devices=1):
        result = to_cpu(tree).result()
    assert streamlap.pool_stats(where)["live_blocks"] - before == 1  # carved out of one block
    assert same_tree(result, {name: x.cpu() for name, x in tree.items()})
    last = result["key59"]
    expected = last.clone()
    del result
    gc.collect()
    with streamlap.use_runtime("host", devices=1):
        again = [to_cpu(tree).result() for _ in range(3)]
    assert same_bits(last, expected)
    del again


def test_a_tree_of_big_and_small_leaves_into_outs(where):
    tree = [random_bits((300, 300), where=where), random_bits((), where=where)]
    out = [torch.empty(300, 300), torch.empty(())]
    result = to_cpu(tree, out=out).result()
    assert result[0] is out[0]
    assert result[1] is out[1]
    assert same_tree(result, [x.cpu() for x in tree])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)])
def test_shapes_at_the_edge(where, shape):
    x = random_bits(shape, where=where)
    assert same_bits(to_cpu(x).result(), x)
    assert same_bits(to_cpu(x, pin=False).result(), x)
    assert same_bits(to_cpu(x, dtype=torch.float64).result(), x.double())
    assert same_bits(to_cpu(x, out=torch.empty(shape)).result(), x)
    assert same_bits(to_device(x.cpu(), where).result(), x)
    assert same_bits(to_device(x, where).result(), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.complex64])
def test_dtype_converts_as_torch_does(where, dtype):
    x = torch.randn(20, 30, device=where)
    assert same_bits(to_cpu(x, dtype=dtype).result(), x.to(dtype))
    assert same_bits(to_cpu(x[:, ::3], dtype=dtype, pin=False).result(), x[:, ::3].to(dtype))
    assert same_bits(to_device(x.cpu(), where, dtype=dtype).result(), x.to(dtype))


def test_results_are_pinned_unless_told_otherwise(where):
    x = random_bits((100, 100), where=where)
    before = streamlap.pool_stats(where)["live_blocks"]
    kept = [to_cpu(x).result(), to_cpu(x, pin=True).result()]
    assert streamlap.pool_stats(where)["live_blocks"] - before == 2
    kept.append(to_cpu(x, pin=False).result())
    assert streamlap.pool_stats(where)["live_blocks"] - before == 2
    if where != "cpu":
        assert kept[0].is_pinned()
        assert not kept[2].is_pinned()


def test_to_cpu_of_a_cpu_tensor_copies():
    x = random_bits((10, 10))
    result = to_cpu(x).result()
    old = x.clone()
    assert result.data_ptr() != x.data_ptr()
    result.zero_()
    assert same_bits(x, old)


def test_copy_to_cpu_is_d2l_s(where):
    ys = [random_bits((5, 5), where=where) for _ in range(3)]
    result = copy_to_cpu(ys)
    assert type(result) is list
    assert same_tree(result, [y.cpu() for y in ys])
    transfer = copy_to_cpu(ys, non_blocking=True)
    assert isinstance(transfer, Transfer)
    assert same_tree([y for y in transfer], [y.cpu() for y in ys])  # noqa: C416


def test_to_device_of_a_logical_device():
    x = random_bits((5, 5))
    for device in ("cpu", "cpu:0", "cpu:3", torch.device("cpu")):
        result = to_device(x, device).result()
        assert same_bits(result, x)
        assert result.data_ptr() != x.data_ptr()


@pytest.mark.gpu
def test_devices_may_be_named_in_every_way():
    x = random_bits((5, 5))
    for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
        result = to_device(x, device).result()
        assert result.device == torch.device("cuda", 0)
        assert same_bits(result, x)


@pytest.mark.gpu
def test_a_tree_of_cpu_and_gpu_tensors():
    tree = [random_bits((5, 5), where="cuda:0"), random_bits((5, 5)), 3]
    assert same_tree(to_cpu(tree).result(), [tree[0].cpu(), tree[1], 3])
    assert same_tree(to_device(tree, "cuda:0").result(), [tree[0], tree[1].cuda(), 3])
    stream = torch.cuda.Stream()
    assert same_tree(to_cpu(tree, stream=stream).result(), [tree[0].cpu(), tree[1], 3])


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_copies_between_and_from_two_gpus():
    xs = [random_bits((50, 50), where=f"cuda:{index}") for index in range(2)]
    assert same_tree(to_cpu(xs).result(), [x.cpu() for x in xs])
    moved = to_device(xs, "cuda:1").result()
    assert all(x.device.index == 1 for x in moved)
    assert same_tree(moved, [x.to("cuda:1") for x in xs])
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_one_pinned_buffer_used_on_one_gpu_then_on_the_other():
    pinned = streamlap.empty_pinned((50, 50))
    value = random_bits((50, 50), where="cuda:0")
    to_cpu(value, out=pinned).result()
    moved = to_device(pinned, "cuda:1").result()
    assert same_bits(moved, value)
    assert torch.cuda.current_device() == 0


# -- chunks


def test_chunks_cover_everything_in_order_at_element_boundaries(where):
    tree = [
        random_bits((1000, 3), torch.float64, where),
        random_bits(5, torch.uint8, where),
        "text",
        random_bits((300,), torch.complex64, where),
        random_bits((0, 4), where=where),
    ]
    transfer = to_cpu(tree, chunk_bytes=1001)
    seen: dict[int, int] = {}
    order = []
    for leaf, offset, view in transfer.chunks():
        order.append(leaf)
        source = tree[leaf].reshape(-1)
        assert offset == seen.get(leaf, 0)
        assert view.ndim == 1
        assert 0 < view.numel() * view.itemsize <= 1001
        assert same_bits(view, source[offset : offset + view.numel()])
        seen[leaf] = offset + view.numel()
    assert order == sorted(order)
    assert seen == {0: 3000, 1: 5, 3: 300}
    assert transfer.stats()["chunks"] == len(order)


def test_chunks_come_before_the_whole_is_there(where):
    """Two transfers share the copy stream; the chunks of the first need not wait for the second."""
    x = random_bits((1000,), where=where)
    to_cpu([x]).result()
    finish_all(where)
    first = to_cpu(x, chunk_bytes=400)
    gate = CopySide(where).hold()
    second = to_cpu(x, chunk_bytes=400)
    assert sum(view.numel() for _, _, view in first.chunks()) == 1000
    assert is_held(second)
    gate.open()
    assert sum(view.numel() for _, _, view in second.chunks()) == 1000


def test_chunks_wait_for_their_bytes(held):
    transfer, gate, expected = held
    pieces = []
    thread = threading.Thread(target=lambda: pieces.extend(transfer.chunks()))
    thread.start()
    assert not eventually(lambda: bool(pieces), 0.02)
    gate.open()
    thread.join(20)
    assert same_bits(torch.cat([view for _, _, view in pieces]), expected.view(-1))


@pytest.mark.parametrize("chunk_bytes", [1, 7, 8, 1 << 40])
def test_any_chunk_size_gives_the_same(where, chunk_bytes):
    x = random_bits((9, 11), torch.float64, where)
    assert same_bits(to_cpu(x, chunk_bytes=chunk_bytes).result(), x)
    assert same_bits(to_device(x.cpu(), where, chunk_bytes=chunk_bytes).result(), x)


def test_a_destination_that_is_not_contiguous_comes_whole(where):
    x = random_bits((20, 30), where=where)
    out = torch.empty(20, 60)[:, ::2]
    pieces = list(to_cpu(x, out=out, chunk_bytes=100).chunks())
    assert {(leaf, offset) for leaf, offset, _ in pieces} == {(0, 0)}
    assert same_bits(pieces[-1][2], x)


# -- arguments


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"dtype": "float32"}, TypeError, "dtype"),
        ({"pin": 1}, TypeError, "pin"),
        ({"pool": 5}, TypeError, "pool"),
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes"),
        ({"chunk_bytes": "1"}, TypeError, "chunk_bytes"),
        ({"chunk_bytes": True}, TypeError, "chunk_bytes"),
        ({"stream": "a stream"}, TypeError, "stream"),
        ({"stream": 1.5}, TypeError, "stream"),
        ({"out": 5}, TypeError, "out"),
        ({"out": [1, 2]}, ValueError, "tree"),
    ],
)
def test_arguments_that_make_no_sense(where, options, kind, match):
    before = streamlap.pool_stats(where)
    with pytest.raises(kind, match=match) as caught:
        to_cpu(random_bits(3, where=where), **options)
    assert isinstance(caught.value, streamlap.StreamlapError)
    assert streamlap.pool_stats(where) == before


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", 1.5, None, object()])
def test_a_device_that_is_none(where, device):
    with pytest.raises((ValueError, TypeError)) as caught:
        to_device(random_bits(3), device)
    assert isinstance(caught.value, streamlap.StreamlapError)


@pytest.mark.parametrize("device", ["mps", "meta", "xpu", "cuda:77", "cpu:64", "cpu:1000", -1])
def test_a_device_that_is_not_here(device):
    """ValueError where the kind or number is unknown, RuntimeError where the device is missing."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        to_device(random_bits(3), device)
    assert isinstance(caught.value, streamlap.StreamlapError)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_no_callback_ends_the_callback_thread(error, caplog):
    first, second = threading.Event(), threading.Event()

    def raises(transfer):
        first.set()
        raise error

    stream = runtime_of("cpu").stream(0, "compute")
    for callback, event in ((raises, first), (lambda transfer: second.set(), second)):
        gate = stream.gate()
        transfer = to_cpu(torch.ones(3), stream=stream)
        transfer.add_done_callback(callback)
        gate.open()
        assert event.wait(PATIENCE)
        transfer.result()
    caplog.clear()  # its records keep the traceback, and that the transfer
