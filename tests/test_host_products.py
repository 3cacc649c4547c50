"""Default products of CPU tensors, which are computed where their results are wanted."""

import gc
import threading

import pytest
import torch
from helpers.data import random_bits, random_numbers, same_bits
from helpers.streams import eventually

import streamlap
from streamlap import host_products, pipelined_run
from streamlap.devices import host_place
from streamlap.host_products import MULTIPLIED

pytestmark = pytest.mark.usefixtures("nothing_left")

TINY = 4096
"""With items of 16x16 float32 groups are of eight."""


@pytest.fixture
def groups_of_eight():
    with streamlap.configure(tiny_item_bytes=TINY, depth=4):
        yield


@pytest.fixture
def short(monkeypatch):
    """Count the calls that take the short way."""
    calls = []
    real = host_products._Lane

    def made(*args):
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(host_products, "_Lane", made)
    return calls


def distinct(monkeypatch, fail_at=None):
    """Every product is another one, and one of them may fail."""
    made = []

    def multiply(x, out):
        if len(made) == fail_at:
            raise ArithmeticError("as it should be")
        torch.mm(x, x, out=out)
        out += len(made)
        made.append(out.clone())

    monkeypatch.setattr(host_products, "multiply", multiply)
    return made


def matrix(dtype, rows):
    if dtype.is_floating_point or dtype.is_complex:
        return random_numbers((rows, rows)).to(dtype)
    return random_bits((rows, rows), dtype)


@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
def test_the_bits_are_those_of_mm(dtype, rows, short):
    x = matrix(dtype, rows)
    expected = x.mm(x)
    results = pipelined_run(x, n=20)
    assert len(short) == 1
    assert len(results) == 20
    for result in results:
        assert result.dtype == dtype
        assert same_bits(result, expected)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17, 40])
def test_results_are_in_order(n, groups_of_eight, monkeypatch):
    made = distinct(monkeypatch)
    results = pipelined_run(random_numbers((16, 16)), n=n)
    assert len(results) == len(made) == n
    assert all(map(same_bits, results, made))


def test_results_are_tensors_of_their_own():
    x = random_numbers((8, 8))
    results = pipelined_run(x, n=3)
    before = results[0].clone()
    results[1].zero_()
    assert same_bits(results[0], before)
    assert all(result.untyped_storage().nbytes() == x.nbytes for result in results)
    assert streamlap.pool_stats("cpu")["live"] > 0
    del results
    gc.collect()
    assert eventually(lambda: streamlap.pool_stats("cpu")["live"] == 0)


def test_inputs_that_are_strided(short):
    for x in (random_numbers((16, 16)).t(), random_numbers((32, 32))[::2, ::2]):
        assert same_bits(pipelined_run(x, n=2)[1], x.mm(x))
    assert len(short) == 2


def test_inference(short):
    x = random_numbers((16, 16))
    with torch.inference_mode():
        results = pipelined_run(x, n=20)
        assert all(same_bits(result, x.mm(x)) and result.is_inference() for result in results)
        made = random_numbers((16, 16))
    assert same_bits(pipelined_run(made, n=2)[1], made.mm(made))
    assert len(short) == 2


def test_results_that_fit_one_by_one_only(short, monkeypatch):
    """A group's block is rounded up, too."""

    def refused(*_args):
        raise streamlap.PoolExhausted("no room for a group", 0, 0)

    monkeypatch.setattr(host_products, "_computed", refused)
    x = random_numbers((16, 16))
    for pin in (None, True):
        assert same_bits(pipelined_run(x, n=3, pin=pin)[2], x.mm(x))
    assert len(short) == 2


@pytest.mark.parametrize("n", [1 << 56, 1 << 60, 1 << 62])
def test_more_than_there_can_be(n):
    x = random_numbers((16, 16))
    with pytest.raises(streamlap.PoolExhausted):
        pipelined_run(x, n=n, pin=True)
    with pytest.raises(streamlap.PoolExhausted):
        streamlap.Pipeline(like=x, n=n)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_torch_has_no_product_for_on_a_cpu():
    x = torch.zeros(4, 4, dtype=torch.complex32)
    for call in (pipelined_run, streamlap.run, lambda x: streamlap.Pipeline(like=x)):
        with pytest.raises(streamlap.UnsupportedTensor, match="complex32"):
            call(x)


def test_inputs_of_several_devices_and_of_any_size(short):
    inputs = [random_numbers((rows, rows)) for rows in (600, 3, 40)]
    expected = [x.mm(x) for x in inputs]
    with streamlap.use_runtime("host", devices=2):
        results = pipelined_run(inputs, n=5)
        assert streamlap.pool_stats("cpu:0")["live"] > 0
    assert len(short) == 3
    assert [len(one) for one in results] == [5] * 3
    for one, product in zip(results, expected, strict=True):
        assert all(same_bits(result, product) for result in one)


def test_what_is_unusual_goes_the_general_way(short):
    x = random_numbers((8, 8))
    expected = x.mm(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert pipelined_run(x, n=1)[0].dtype == torch.bfloat16
    trained = x.clone().requires_grad_()
    for results in (
        *(pipelined_run(x, n=2, depth=1), pipelined_run(x, n=2, pin=False)),
        *(pipelined_run(x, n=2, pool=streamlap.PinnedPool(1 << 20)), pipelined_run(x.numpy(), n=2)),
        *(pipelined_run([x.numpy()], n=2)[0], pipelined_run(x, n=2, wait=False).result()),
        *(pipelined_run(trained, n=2), pipelined_run(x, n=2, fn=lambda y: y.mm(y))),
    ):
        assert all(same_bits(torch.as_tensor(result).detach(), expected) for result in results)
    with streamlap.timeline():
        pipelined_run(x, n=2)
    assert pipelined_run(x, n=0) == []
    assert not short


@pytest.mark.parametrize("at", [0, 5, 8, 20, 39])
def test_an_error_has_its_index_and_leaves_nothing(at, groups_of_eight, monkeypatch):
    distinct(monkeypatch, fail_at=at)
    x = random_numbers((16, 16))
    with pytest.raises(ArithmeticError, match="as it should be") as caught:
        pipelined_run(x, n=40)
    assert caught.value.streamlap_index == at
    del caught
    gc.collect()
    assert eventually(lambda: streamlap.pool_stats("cpu")["live"] == 0)
    monkeypatch.undo()
    assert same_bits(pipelined_run(x, n=1)[0], x.mm(x))


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random(3)", "starve(0)"])
def test_an_error_comes_when_the_worker_has_done_with_the_input(
    schedule, groups_of_eight, monkeypatch
):
    distinct(monkeypatch, fail_at=3)
    with streamlap.use_runtime("sim", schedule=schedule) as serving:
        with pytest.raises(ArithmeticError):
            pipelined_run(random_numbers((16, 16)), n=40)
        assert serving.place(0).compute_stream().idle()


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random(3)", "starve(0)"])
def test_results_are_there(schedule, groups_of_eight):
    x = random_numbers((16, 16))
    expected = x.mm(x)
    with streamlap.use_runtime("sim", schedule=schedule):
        for n in (3, 12, 30):
            assert all(same_bits(result, expected) for result in pipelined_run(x, n=n))


def test_two_tasks_at_most_wait_for_the_worker(groups_of_eight):
    def live():
        return streamlap.pool_stats("cpu")["live"]

    x = random_numbers((16, 16))
    pipelined_run(x, n=1)
    assert eventually(lambda: live() == 0)  # the worker still holds its last task for a moment
    gate = host_place(0).compute_stream().gate()
    results = []
    thread = threading.Thread(target=lambda: results.extend(pipelined_run(x, n=80)))
    thread.start()
    try:
        two = (8 + 16) * x.nbytes  # each has twice as many items as the one before
        assert eventually(lambda: live() >= two)
        assert not eventually(lambda: live() > two, 0.2)
    finally:
        gate.open()
        thread.join()
        done = len(results)
        results.clear()
    assert done == 80
