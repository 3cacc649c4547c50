"""Every public object from many threads at once: each gets its own bytes."""

import threading

import pytest
import torch
from helpers.data import random_bits, random_numbers, same_bits, same_tree
from helpers.streams import side

import streamlap
from streamlap import pipelined_map, pipelined_run, to_cpu, to_device

pytestmark = pytest.mark.usefixtures("nothing_left")

THREADS = 8


def on_threads(work, count=THREADS):
    errors = []
    start = threading.Barrier(count)

    def body(number):
        try:
            start.wait(20)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_transfers_of_many_threads(where):
    sources = [[random_bits((50, 50), where=where) for _ in range(20)] for _ in range(THREADS)]

    def work(number):
        mine = sources[number]
        transfers = [to_cpu(x, pin=[None, False][i % 2]) for i, x in enumerate(mine)]
        for transfer, x in zip(transfers, mine, strict=True):
            assert same_bits(transfer.result(), x)
        assert same_tree(to_cpu(mine).result(), [x.cpu() for x in mine])
        back = to_device([x.cpu() for x in mine], where).result()
        assert same_tree([x.cpu() for x in back], [x.cpu() for x in mine])

    on_threads(work)


def test_pipelines_of_many_threads(where):
    xs = [random_numbers((24, 24), where=where) for _ in range(THREADS)]
    expected = [x.mm(x).cpu() for x in xs]

    def work(number):
        x = xs[number]
        if number % 2:
            results = pipelined_run(x, n=15)
        else:
            results = list(pipelined_map(lambda y: y.mm(y), [x] * 15))
        assert same_tree(results, [expected[number]] * 15)

    on_threads(work)


@pytest.mark.gpu
def test_each_thread_s_current_stream_counts():
    where = "cuda:0"
    sides = [side(where, f"thread{number}") for number in range(THREADS)]
    xs = [random_numbers((64, 64), where=where) for _ in range(THREADS)]
    expected = [x.mm(x).cpu() for x in xs]
    torch.cuda.synchronize()

    def work(number):
        with sides[number].current():
            for _ in range(10):
                y = xs[number].mm(xs[number])
                assert same_bits(to_cpu(y).result(), expected[number])
            assert same_tree(pipelined_run(xs[number], n=5), [expected[number]] * 5)

    on_threads(work)


def test_errors_reach_the_thread_they_belong_to(where):
    class Boom(Exception):
        pass

    x = random_numbers((8, 8), where=where)
    expected = x.mm(x).cpu()

    def work(number):
        def fn(y):
            if number % 2:
                raise Boom(number)
            return y.mm(y)

        for _ in range(10):
            if number % 2:
                with pytest.raises(Boom) as caught:
                    pipelined_run(x, n=3, fn=fn)
                assert caught.value.args == (number,)
            else:
                assert same_tree(pipelined_run(x, n=3, fn=fn), [expected] * 3)

    on_threads(work)


def test_one_source_of_many_threads(where):
    x = random_bits((100, 100), where=where)

    def work(number):
        for _ in range(10):
            assert same_bits(to_cpu(x).result(), x)

    on_threads(work)


def test_one_pipeline_s_transfer_of_many_threads(where):
    x = random_numbers((24, 24), where=where)
    transfer = pipelined_run(x, n=20, wait=False)
    expected = x.mm(x).cpu()

    def work(number):
        assert same_bits(transfer[number], expected)
        assert same_tree(transfer.result(), [expected] * 20)
        assert transfer.done()

    on_threads(work)


def test_threads_that_end_leave_nothing(where):
    before = streamlap.pool_stats(where)["live"]

    def work(number):
        to_cpu(random_bits((50, 50), where=where))  # dropped at once

    on_threads(work)
    on_threads(work)
    assert streamlap.pool_stats(where)["live"] - before <= 2 * THREADS * 12288
