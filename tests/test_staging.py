"""Ordinary memory: what goes there and when, and the ring of pinned slots on its way."""

import gc
import os

import numpy as np
import pytest
import torch
from helpers.data import random_bits, random_numbers, same_bits
from helpers.streams import engine_of, eventually, finish_all, is_held, side

import streamlap
from streamlap import _native, pinned, pipelined_map, pipelined_run, to_cpu, to_device

MIB = 1 << 20
RING = 64 * MIB
ITEM = 16 << 10


@pytest.fixture
def pool(monkeypatch):
    """A pool with room for four items; the warning has not been given yet."""
    monkeypatch.setattr(pinned, "_warned", False)
    return streamlap.PinnedPool(4 * ITEM)


quiet = pytest.mark.filterwarnings("ignore:the pinned pool:RuntimeWarning")


# -- past the pool's limit


def test_results_past_the_limit_go_to_ordinary_memory_with_one_warning(where, pool):
    xs = [random_bits((64, 64), where=where) for _ in range(7)]
    kept = [to_cpu(x, pool=pool) for x in xs[:4]]
    with pytest.warns(RuntimeWarning, match="limit of 65536 bytes") as caught:
        kept += [to_cpu(x, pool=pool) for x in xs[4:]]
    assert len(caught) == 1
    assert all(same_bits(t.result(), x) for t, x in zip(kept, xs, strict=True))
    assert pool.stats()["spilled"] == 3
    assert pool.stats()["live"] == 4 * ITEM
    paths = [t.stats()["paths"] for t in kept]
    usual, past = ("host", "host") if where == "cpu" else ("direct", "staged")
    assert paths == [[usual]] * 4 + [[past]] * 3


def test_who_insists_on_pinned_memory_is_refused(where, pool):
    held = streamlap.empty_pinned(4 * ITEM, torch.uint8, pool)
    x = random_bits((64, 64), where=where)
    for call in (
        lambda: to_cpu(x, pin=True, pool=pool),
        lambda: to_cpu([x, x], pin=True, pool=pool),
        lambda: pipelined_run(random_numbers((64, 64), where=where), n=2, pin=True, pool=pool),
        lambda: streamlap.empty_pinned(1, torch.uint8, pool),
    ):
        with pytest.raises(streamlap.PoolExhausted) as caught:
            call()
        assert caught.value.used == held.nbytes
    assert pool.stats()["spilled"] == 0


@pytest.mark.parametrize("shape", [((1 << 62) - 1,), (1 << 31, 1 << 31)])
@quiet
def test_more_than_any_memory_has(shape):
    source = torch.zeros((1,) * len(shape)).expand(shape)
    for tree in (source, [source] * 2):
        with pytest.raises(streamlap.PoolExhausted):
            streamlap.to_cpu(tree, pin=True)
        for pin in (None, False):
            with pytest.raises(streamlap.OutOfMemory):
                streamlap.to_cpu(tree, pin=pin)
    with pytest.raises(streamlap.InvalidArgument):
        streamlap.TreeCopy(like=source)


@quiet
def test_a_tree_of_small_leaves_past_the_limit(where, pool):
    held = streamlap.empty_pinned(4 * ITEM - 8192, torch.uint8, pool)
    tree = [random_bits((size,), where=where) for size in (1000, 0, 1, 2000, 999)]
    copied = to_cpu(tree, pool=pool).result()
    assert all(same_bits(a, b) for a, b in zip(copied, tree, strict=True))
    assert pool.stats()["spilled"] > 0
    assert pool.stats()["reserved"] <= 4 * ITEM
    del held


@quiet
@pytest.mark.parametrize("fn", [None, lambda x: x + 1])
@pytest.mark.parametrize("wait", [True, False])
def test_a_pipeline_past_the_limit_finishes(where, pool, fn, wait):
    x = random_numbers((64, 64), where=where)
    results = pipelined_run(x, n=9, fn=fn, pool=pool, wait=wait)
    results = results if wait else results.result()
    expected = x.mm(x) if fn is None else fn(x)
    assert len(results) == 9
    assert all(same_bits(result, expected) for result in results)
    assert pool.stats()["spilled"] == 5
    assert pool.stats()["live"] == 4 * ITEM
    del results
    assert eventually(lambda: pool.stats()["live"] == 0)


@quiet
def test_a_map_past_the_limit_goes_on(where, pool):
    xs = [random_numbers((64, 64), where=where) for _ in range(9)]
    kept = list(pipelined_map(lambda x: x * 2, xs, pool=pool))
    assert all(same_bits(a, x * 2) for a, x in zip(kept, xs, strict=True))
    assert pool.stats()["spilled"] == 5


# -- memory of its own mapping


def test_a_mapping_lives_as_long_as_its_views():
    flat = torch.frombuffer(_native.Pages(8 * MIB), dtype=torch.float32)
    assert flat.numel() == 2 * MIB
    assert int(flat.count_nonzero()) == 0
    view = flat.view(1024, 2048)[5:, 7]
    view.fill_(3)
    del flat
    gc.collect()
    assert bool((view == 3).all())
    with pytest.raises(MemoryError):
        _native.Pages(1 << 62)


def test_a_forked_child_has_a_copy_of_a_mapping():
    flat = torch.frombuffer(_native.Pages(8 * MIB), dtype=torch.uint8)
    flat[-1] = 9
    child = os.fork()
    if child == 0:
        right = flat.numpy()[-1] == 9
        flat.numpy()[-1] = 1
        del flat
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(flat[-1]) == 9


# -- the ring, by hand where no device needs it


def staged_by_hand(engine, dst, src, to_device, fresh=()):
    return engine.submit(
        device=0,
        to_device=to_device,
        items=[(dst.data_ptr(), src.data_ptr(), src.nbytes, src.itemsize, None)],
        after=[],
        chunk_bytes=16 * MIB,
        staged=True,
        fresh=list(fresh),
        keep_source=src,
        keep_destination=dst,
    )


@pytest.mark.parametrize("to_device", [False, True])
def test_the_ring_is_bounded_and_given_back(to_device):
    engine = _native.engine(_native.checked(_native.new_host_runtime()))
    src = random_bits((90 * MIB + 3,), torch.uint8)
    pages = _native.Pages(src.nbytes)
    dst = torch.frombuffer(pages, dtype=torch.uint8)
    native = staged_by_hand(engine, dst, src, to_device, [] if to_device else [0])
    native.sync()
    assert torch.equal(dst, src)
    assert max(nbytes for _leaf, _offset, nbytes in native.chunks()) <= 4 * MIB
    assert 0 < engine.staging_bytes() <= RING
    assert eventually(lambda: engine.trim_staging() >= 0 and engine.staging_bytes() == 0)


def test_the_ring_is_configured():
    engine = _native.engine(_native.checked(_native.new_host_runtime()))
    src = random_bits((3 * MIB + 3,), torch.uint8)
    dst = torch.zeros_like(src)
    engine.configure_staging(slots=3, slot_bytes=MIB // 2, threads=2, populate_threads=1)
    native = staged_by_hand(engine, dst, src, False)
    native.sync()
    assert torch.equal(dst, src)
    assert max(nbytes for _leaf, _offset, nbytes in native.chunks()) <= MIB // 2
    assert 0 < engine.staging_bytes() <= 3 * MIB // 2
    for wrong in (
        (33, 2 * MIB, 1, 1),
        (0, MIB, 1, 1),
        (1, 0, 1, 1),
        (1, MIB, 0, 1),
        (1, MIB, 1, 0),
    ):
        with pytest.raises(streamlap.InvalidArgument):
            engine.configure_staging(*wrong)


def test_the_ring_is_the_policy_s():
    src = random_bits((3 * MIB + 3,), torch.uint8)

    def longest(place) -> int:
        place.shape_ring()
        native = staged_by_hand(place.engine, torch.zeros_like(src), src, False)
        native.sync()
        return max(nbytes for _leaf, _offset, nbytes in native.chunks())

    with streamlap.checking() as serving:
        place = serving.place(0)
        with streamlap.configure(stage_slots=3, stage_slot_bytes="64KiB", stage_threads=2):
            assert longest(place) <= 64 << 10
            assert 0 < place.engine.staging_bytes() <= 3 * (64 << 10)
        assert longest(place) > 64 << 10


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 1000, 4 * MIB, 4 * MIB + 1, 65 * MIB + 13])
@pytest.mark.parametrize("kind", ["fresh", "tensor", "numpy"])
def test_every_byte_to_ordinary_memory(count, kind):
    x = random_bits((count,), torch.uint8, where="cuda:0")
    if kind == "fresh":
        transfer = to_cpu(x, pin=False)
    else:
        out = torch.full((count,), 0xEE, dtype=torch.uint8)
        transfer = to_cpu(x, out=out if kind == "tensor" else out.numpy())
    result = transfer.result()
    assert transfer.stats()["paths"] == ["staged"]
    assert isinstance(result, np.ndarray if kind == "numpy" else torch.Tensor)
    assert np.array_equal(np.asarray(result), x.cpu().numpy())
    assert transfer.elapsed() > 0
    assert streamlap.pool_stats("cuda:0")["staging"] <= 2 * RING


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4 * MIB + 1, 65 * MIB + 13])
def test_every_byte_from_ordinary_memory(count):
    x = random_bits((count,), torch.uint8)
    original = x.clone()
    transfer = to_device(x, "cuda:0")
    transfer.wait_source()
    x.fill_(0xEE)
    assert torch.equal(transfer.result().cpu(), original)
    assert transfer.stats()["paths"] == ["staged"]


@pytest.mark.gpu
def test_strides_and_dtypes_to_ordinary_memory():
    x = random_numbers((3000, 2000), where="cuda:0")
    assert torch.equal(to_cpu(x.t(), pin=False).result(), x.cpu().t())
    assert to_cpu(x.t(), pin=False).result().stride() == x.t().stride()
    half = to_cpu(x, pin=False, dtype=torch.bfloat16).result()
    assert torch.equal(half, x.to(torch.bfloat16).cpu())
    pieces = {offset: view.clone() for _leaf, offset, view in to_cpu(x, pin=False).chunks()}
    assert torch.equal(torch.cat([pieces[key] for key in sorted(pieces)]), x.cpu().view(-1))


@pytest.mark.gpu
def test_the_caller_is_not_blocked_and_nothing_overtakes_the_producer():
    producer = side("cuda:0", "producer")
    x = torch.zeros(9 * MIB, dtype=torch.uint8, device="cuda:0")
    values = random_bits((9 * MIB,), torch.uint8, where="cuda:0")
    out = torch.full((9 * MIB,), 0xEE, dtype=torch.uint8)
    to_cpu(x, out=out).result()
    out.fill_(0xEE)
    finish_all("cuda:0")
    gate = producer.hold()
    producer.copy(x, values)
    transfer = to_cpu(x, out=out, stream=producer.stream)
    assert is_held(transfer)
    assert int(out.min()) == 0xEE
    gate.open()
    assert torch.equal(transfer.result(), values.cpu())


@pytest.mark.gpu
def test_a_pipeline_holds_no_more_results_than_its_depth_on_the_device():
    side_length = 2048  # results of 16 MiB: torch rounds others up
    x = random_numbers((side_length, side_length), where="cuda:0")
    expected = x.mm(x)
    nbytes = expected.nbytes
    out = torch.empty(12, side_length, side_length)
    for way in ({"pin": False}, {"out": out}):
        pipelined_run(x, n=12, depth=2, **way)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = pipelined_run(x, n=12, depth=2, **way)
        assert torch.cuda.max_memory_allocated() - before <= 2 * nbytes + MIB
        assert all(same_bits(result, expected) for result in results)


@pytest.mark.gpu
def test_trim_gives_the_ring_back():
    x = random_bits((9 * MIB,), torch.uint8, where="cuda:0")
    to_cpu(x, pin=False).result()
    finish_all("cuda:0")
    assert streamlap.pool_stats("cuda:0")["staging"] > 0
    assert engine_of("cuda:0").trim_staging() > 0
    assert streamlap.pool_stats("cuda:0")["staging"] == 0
    assert torch.equal(to_cpu(x, pin=False).result(), x.cpu())
