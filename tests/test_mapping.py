"""pipelined_map: ordered, bounded, closed cleanly, errors at their item's turn."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from helpers.data import random_bits, random_numbers, same_bits, same_tree
from helpers.streams import PATIENCE, CopySide, engine_of, eventually, finish_all

import streamlap
from streamlap import pipelined_map

pytestmark = pytest.mark.usefixtures("nothing_left")


class Boom(Exception):
    pass


def square(x):
    return x.mm(x)


@pytest.mark.parametrize("depth", [1, 2, 4, 100])
def test_50_distinct_items_in_order_and_bit_for_bit(where, depth):
    xs = [random_numbers((48, 48), where=where) for _ in range(50)]
    calls = []

    def fn(x):
        calls.append(1)
        return x.mm(x)

    results = list(pipelined_map(fn, xs, depth=depth))
    assert len(calls) == 50
    assert same_tree(results, [x.mm(x).cpu() for x in xs])


@pytest.mark.parametrize("options", [{}, {"pin": False}, {"pin": True}, {"dtype": torch.float64}])
def test_options(where, options):
    xs = [random_numbers((5, 7), where=where) for _ in range(9)]
    dtype = options.get("dtype", torch.float32)
    results = list(pipelined_map(lambda x: x * 2, xs, **options))
    assert same_tree(results, [(x * 2).to(dtype).cpu() for x in xs])


def test_nothing_is_computed_before_it_is_asked_for(where):
    calls = []
    generator = pipelined_map(lambda x: calls.append(x), iter([torch.ones(1, device=where)]))
    assert calls == []
    generator.close()
    assert calls == []
    assert list(pipelined_map(square, [])) == []


def test_it_runs_at_most_depth_items_ahead(where):
    taken = []

    def items():
        for index in range(20):
            taken.append(index)
            yield torch.full((2, 2), float(index), device=where)

    for index, result in enumerate(pipelined_map(lambda x: x + 1, items(), depth=3)):
        assert float(result[0, 0]) == index + 1
        assert len(taken) <= index + 3
    assert len(taken) == 20


@pytest.mark.parametrize("depth", [1, 3])
def test_at_most_depth_results_wait(depth):
    alive = set()
    most = 0
    count = iter(range(30))

    def fn(x):
        nonlocal most
        most = max(most, len(alive))
        i = next(count)
        array = np.full(4, float(i), np.float32)
        alive.add(i)
        weakref.finalize(array, alive.discard, i)
        return torch.from_numpy(array)

    for i, result in enumerate(pipelined_map(fn, [torch.ones(1)] * 30, depth=depth)):
        assert float(result[0]) == i
    assert most <= depth
    assert eventually(lambda: not alive)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 4])
def test_device_memory_is_bounded_by_depth(depth):
    x = random_numbers((1024, 1024), where="cuda:0")
    for _ in pipelined_map(square, [x] * 3, depth=depth):
        pass
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in pipelined_map(square, [x] * 30, depth=depth):
        pass
    assert torch.cuda.max_memory_allocated() - before <= (depth + 1) * x.nbytes
    assert eventually(lambda: torch.cuda.memory_allocated() == before)


def test_pinned_memory_is_bounded_by_depth(where):
    x = random_numbers((512, 512), where=where)  # a block of its own, not a part of a slab
    pool = streamlap.PinnedPool(16 << 20)
    for result in pipelined_map(lambda x: x + 1, [x] * 30, depth=3, pool=pool):
        del result
    assert pool.stats()["peak"] <= 5 << 20


def test_items_are_let_go_of(where):
    del where
    refs = []

    def items():
        for _ in range(10):
            array = np.ones(4, np.float32)
            refs.append(weakref.ref(array))
            yield torch.from_numpy(array)

    generator = pipelined_map(lambda x: x + 1, items(), depth=2)
    for _ in range(5):
        next(generator)
    gc.collect()
    assert eventually(lambda: sum(ref() is not None for ref in refs) <= 2)
    generator.close()
    gc.collect()
    assert eventually(lambda: not any(ref() is not None for ref in refs))


# -- ending early


@pytest.mark.parametrize("consumed", [0, 1, 5])
@pytest.mark.parametrize("how", ["close", "break", "drop", "throw"])
def test_a_consumer_that_stops_early_loses_nothing(where, consumed, how):
    x = random_numbers((32, 32), where=where)
    before = streamlap.pool_stats(where)["live"]
    calls = []

    def fn(x):
        calls.append(1)
        return x.mm(x)

    generator = pipelined_map(fn, [x] * 30, depth=4)
    for _ in range(consumed):
        next(generator)
    if how == "close":
        generator.close()
    elif how == "throw":
        with pytest.raises(Boom):
            generator.throw(Boom)
    elif how == "drop":
        del generator
        gc.collect()
    else:
        for result in generator:
            del result
            break
        generator.close()
    made = len(calls)
    assert made <= consumed + 5
    assert eventually(lambda: streamlap.pool_stats(where)["live"] <= before)
    assert engine_of(where).abandoned() == 0
    assert same_tree(list(pipelined_map(square, [x] * 3)), [x.mm(x).cpu()] * 3)
    assert len(calls) == made


def test_close_waits_for_what_is_in_flight_and_starts_nothing_more():
    gate, started = threading.Event(), threading.Event()
    calls = []

    def fn(x):
        calls.append(1)
        if len(calls) == 2:
            started.set()
            assert gate.wait(PATIENCE)
        return x + 1

    generator = pipelined_map(fn, [torch.ones(2)] * 30, depth=4)
    next(generator)
    assert started.wait(PATIENCE)
    closer = threading.Thread(target=generator.close)
    closer.start()
    gate.set()
    closer.join(PATIENCE)
    assert not closer.is_alive()
    assert len(calls) <= 4


# -- errors


@pytest.mark.parametrize("index", [0, 3, 7])
@pytest.mark.parametrize("depth", [1, 4])
def test_what_fn_raises_comes_at_its_turn(where, index, depth):
    error = Boom("deliberate")
    xs = [random_numbers((8, 8), where=where) for _ in range(12)]
    calls = []

    def fn(x):
        calls.append(1)
        if len(calls) == index + 1:
            raise error
        return x.mm(x)

    generator = pipelined_map(fn, xs, depth=depth)
    before = streamlap.pool_stats(where)
    for i in range(index):
        assert same_bits(next(generator), xs[i].mm(xs[i]))
    with pytest.raises(Boom) as caught:
        next(generator)
    assert caught.value is error
    assert error.streamlap_index == index
    assert any(f"item {index}" in note for note in error.__notes__)
    assert len(calls) == index + 1
    assert eventually(lambda: streamlap.pool_stats(where)["live"] == before["live"])
    assert list(generator) == []


@pytest.mark.parametrize("index", [0, 3])
def test_what_the_iterator_raises_comes_at_its_turn(where, index):
    error = Boom("from the items")

    def items():
        for i in range(index):
            yield torch.full((2, 2), float(i), device=where)
        raise error

    generator = pipelined_map(lambda x: x + 1, items(), depth=4)
    for i in range(index):
        assert float(next(generator)[0, 0]) == i + 1
    with pytest.raises(Boom) as caught:
        next(generator)
    assert caught.value is error
    assert error.streamlap_index == index


def test_stop_iteration_from_fn_is_no_end(where):
    """PEP 479: it must not look like the end of the items."""

    def fn(x):
        raise StopIteration

    with pytest.raises(RuntimeError):
        list(pipelined_map(fn, [torch.ones(2, device=where)] * 3))


def test_an_interrupt_in_the_iterator_comes_at_once(where):
    def items():
        yield torch.ones(2, device=where)
        raise KeyboardInterrupt

    generator = pipelined_map(lambda x: x + 1, items(), depth=4)
    with pytest.raises(KeyboardInterrupt):
        next(generator)
    assert eventually(lambda: engine_of(where).abandoned() == 0)


def test_pool_exhausted_underway(where):
    """The consumer keeps everything; the pool is too small for that."""
    pool = streamlap.PinnedPool(64 << 10)
    x = random_numbers((64, 64), where=where)
    kept = []
    generator = pipelined_map(lambda x: x + 1, [x] * 10, depth=1, pin=True, pool=pool)
    with pytest.raises(streamlap.PoolExhausted) as caught:
        kept.extend(generator)
    assert len(kept) == 4
    assert caught.value.streamlap_index == 4
    assert caught.value.used == caught.value.limit == 64 << 10
    assert all(same_bits(item, x + 1) for item in kept)
    del caught
    kept.clear()
    assert eventually(lambda: pool.stats()["live"] == 0)


def test_an_fn_that_writes_what_it_gave_before(where):
    """Noticed when it happens while the copy has still to read; with depth 1 it never does."""
    buffer = torch.zeros(300, 300, device=where)
    count = iter(range(100))

    def fn(x):
        return buffer.fill_(next(count))

    items = [torch.ones(1, device=where)] * 20
    for i, result in enumerate(pipelined_map(fn, items, depth=1)):
        assert bool((result == i).all())
    del result
    list(pipelined_map(lambda x: buffer.clone(), items[:6]))  # nothing new behind a gate
    copies = CopySide(where)
    finish_all(where)
    gate = copies.hold()
    found = []

    def consume():
        with pytest.raises(streamlap.SourceModified):
            next(pipelined_map(fn, items, depth=4))
        found.append(True)

    thread = threading.Thread(target=consume)
    thread.start()
    assert eventually(lambda: float(buffer[0, 0]) >= 22)
    gate.open()
    thread.join(PATIENCE)
    assert found


@pytest.mark.parametrize(
    ("args", "options", "kind", "match"),
    [
        ((5, []), {}, TypeError, "fn"),
        ((square, 5), {}, TypeError, "items"),
        ((square, []), {"depth": 0}, ValueError, "depth"),
        ((square, []), {"depth": 2.5}, TypeError, "depth"),
        ((square, []), {"pin": "yes"}, TypeError, "pin"),
        ((square, []), {"dtype": "f4"}, TypeError, "dtype"),
        ((square, []), {"pool": 1}, TypeError, "pool"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(where, args, options, kind, match):
    del where
    with pytest.raises(kind, match=match) as caught:
        pipelined_map(*args, **options)
    assert isinstance(caught.value, streamlap.StreamlapError)


# -- items of every kind


def test_items_that_are_trees(where):
    xs = [{"a": random_bits(4, where=where), "b": [i, None]} for i in range(8)]
    results = list(pipelined_map(lambda item: (item["a"].clone(), item["b"][0]), xs))
    assert same_tree(results, [(x["a"].cpu(), x["b"][0]) for x in xs])


def test_items_without_tensors(where):
    results = list(pipelined_map(lambda i: torch.full((3,), float(i), device=where), range(8)))
    assert [float(result[0]) for result in results] == list(range(8))


def test_generators_can_be_nested(where):
    x = torch.ones(4, 4, device=where)
    inner = pipelined_map(lambda i: x * i, range(6))
    outer = pipelined_map(lambda y: y.to(where) + 1, inner)
    assert [float(result[0, 0]) for result in outer] == [i + 1 for i in range(6)]


def test_two_generators_side_by_side(where):
    xs = [random_numbers((16, 16), where=where) for _ in range(12)]
    one = pipelined_map(square, xs)
    two = pipelined_map(lambda x: x + 1, xs)
    for x, a, b in zip(xs, one, two, strict=True):
        assert same_bits(a, x.mm(x))
        assert same_bits(b, x + 1)


def test_modes_of_each_call_hold_in_fn():
    seen = []

    def fn(x):
        seen.append(torch.is_grad_enabled())
        return x.clone()

    with torch.no_grad():
        list(pipelined_map(fn, [torch.ones(2)] * 2))
    list(pipelined_map(fn, [torch.ones(2)] * 2))
    assert seen == [False, False, True, True]
