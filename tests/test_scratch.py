"""Gathers to the host by way of device memory: which do, and that nobody can tell by the bytes."""

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.data import random_bits, random_numbers, same_bits, same_tree
from helpers.streams import CopySide, eventually

import streamlap
from streamlap import TreeCopy, scratch, to_cpu
from streamlap.devices import current_stream, place_of

WHERE = "cuda:0"
MIB = 1 << 20

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def where():
    return WHERE


@pytest.fixture
def used(monkeypatch):
    """Which gathers were asked about, and went through scratch memory."""
    seen = []
    real = scratch.scratch_for

    def watched(*args):
        found = real(*args)
        seen.append(found is not None)
        return found

    for module in ("moving", "rows", "tree_copy"):
        monkeypatch.setattr(getattr(streamlap, module), "scratch_for", watched)
    return seen


def landing(view):
    """Return contiguous page-locked memory: else a dense tensor is sent as it lies."""
    return streamlap.empty_pinned(view.shape, view.dtype)


def transposed():
    view = random_numbers((2048, 1024), where=WHERE).t()
    return view, view.cpu()


def apart(dtype):
    """Views of at least 4 MiB whose elements lie apart."""
    base = random_bits((1501, 3001), dtype, WHERE)
    more = torch.cat([base] * 2)
    return {
        "transposed": more.t(),
        "every second": torch.cat([more] * 2)[:, ::2],
        "permuted": more.reshape(2, 1501, 3001).permute(2, 0, 1),
        "three columns": torch.cat([more.reshape(-1)] * 2)[: 3 * 1_500_000].view(3, -1).t(),
        "a row of a window": torch.cat([more] * 2, 1)[:, 1:-1],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_lies_apart_arrives_as_it_is(used, dtype):
    for name, view in apart(dtype).items():
        expected = view.cpu()
        assert same_bits(to_cpu(view, out=landing(view)).result(), expected), name
        with streamlap.configure(scratch_bytes=0):
            assert same_bits(to_cpu(view, out=landing(view)).result(), expected), name
    assert used == [True, False] * 5


@pytest.mark.parametrize("count", [3 * MIB, 3 * MIB + 1, 2_200_001])
def test_a_cast_arrives_as_torch_makes_it(used, count):
    source = random_numbers((count,), where=WHERE)
    for view in (source, source[1:]):
        expected = view.to(torch.bfloat16).cpu()
        assert same_bits(to_cpu(view, dtype=torch.bfloat16).result(), expected)
    assert used == [True, True]


@pytest.mark.parametrize("sizes", [[4096] * 1500, [5000, 3, 70_001] * 90, [9 * MIB // 64] * 64])
def test_trees_arrive_as_they_are(used, sizes):
    tree = [random_bits(size, torch.uint8, WHERE) for size in sizes]
    expected = [leaf.cpu() for leaf in tree]
    assert same_tree(to_cpu(tree).result(), expected)
    plan = TreeCopy(like=tree)
    out = plan(tree).result()
    assert same_tree(out, expected)
    assert used == [True, True]
    for leaf in out:
        leaf.fill_(0xEE)
    assert same_tree(plan(tree, out=out).result(), expected)
    assert same_tree(to_cpu(tree, out=out).result(), expected)


def test_what_lies_between_destinations_is_not_written():
    tree = [random_bits(250, torch.uint8, WHERE) for _ in range(20_000)]
    memory = streamlap.empty_pinned(20_000 * 256, torch.uint8).fill_(0xEE)
    out = [memory[256 * index : 256 * index + 250] for index in range(20_000)]
    expected = [leaf.cpu() for leaf in tree]
    rows = memory.view(20_000, 256)
    assert same_tree(to_cpu(tree, out=out).result(), expected)
    assert bool((rows[:, 250:] == 0xEE).all())
    plan = TreeCopy(like=tree)
    plan(tree).result()
    with contextlib.suppress(streamlap.InvalidArgument):
        plan(tree, out=out).result()
    assert bool((rows[:, 250:] == 0xEE).all())


def test_what_is_small_or_counted_goes_its_own_way(used):
    view = random_numbers((512, 512), where=WHERE).t()
    to_cpu(view, out=landing(view)).result()
    big = random_numbers((2048, 2048), where=WHERE)
    transfer = to_cpu(big, dtype=torch.bfloat16, nonfinite=True)
    assert same_bits(transfer.result(), big.to(torch.bfloat16).cpu())
    assert transfer.nonfinite() == 0
    assert used == [False, False]


def test_transfers_under_way_share_what_the_policy_allows(used):
    view, expected = transposed()
    to_cpu(view, out=landing(view)).result()
    with streamlap.configure(scratch_bytes="12MiB"):
        gate = CopySide(WHERE).hold()
        transfers = [to_cpu(view, out=landing(view)) for _ in range(3)]
        gate.open()
        assert all(same_bits(transfer.result(), expected) for transfer in transfers)
        del transfers
        gc.collect()
        assert same_bits(to_cpu(view, out=landing(view)).result(), expected)
    assert used == [True, True, False, False, True]


def test_without_memory_the_kernel_writes_to_the_host_itself(used, monkeypatch):
    view, expected = transposed()

    def none_left(*_args, **_options):
        raise torch.OutOfMemoryError("as asked")

    monkeypatch.setattr(scratch, "_in_use", {})
    out = landing(view)
    with monkeypatch.context() as patch:
        patch.setattr(scratch.torch, "empty", none_left)
        transfer = to_cpu(view, out=out)
    assert same_bits(transfer.result(), expected)
    assert same_bits(to_cpu(view, out=out).result(), expected)  # not asked again so soon
    assert used == [False, False]


def test_what_the_memory_was_used_for_before_is_over_when_it_is_written(used):
    """With ``stream=`` torch's current stream may still use what its allocator would give there."""
    view, expected = transposed()
    to_cpu(view, out=landing(view)).result()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    other, out = torch.cuda.Stream(), landing(view)
    with torch.cuda.stream(torch.cuda.Stream()):
        numbers = torch.full((view.nbytes // 2,), 7, dtype=torch.uint8, device=WHERE)
        gate = current_stream(place_of(torch.device(WHERE))).gate()
        try:
            read = numbers.clone()
            del numbers  # its memory is the stream's own, to be given again at once
            cast = to_cpu(view, dtype=torch.float16, stream=other).result()
            with_out = to_cpu(view, out=out, stream=other)  # whoever reads it is waited for
        finally:
            gate.open()
        assert bool((read == 7).all())
        assert same_bits(cast, view.to(torch.float16).cpu())
        assert same_bits(with_out.result(), expected)
    assert used == [True, True, True]


def test_a_stream_that_is_given_is_the_only_one_that_is_waited_for(used):
    source = random_numbers((3 << 20,), where=WHERE)
    expected = source.to(torch.bfloat16).cpu()
    plan = TreeCopy(like=[source], dtype=torch.bfloat16)
    for start in (
        lambda stream: to_cpu([source], dtype=torch.bfloat16, stream=stream),
        lambda stream: plan([source], stream=stream),
    ):
        start(None).result()
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        with torch.cuda.stream(torch.cuda.Stream()):
            gate = current_stream(place_of(torch.device(WHERE))).gate()
            try:
                assert same_bits(start(other).result()[0], expected)
            finally:
                gate.open()
    assert used == [True] * 4


def test_a_capture_in_another_thread_is_left_alone(used):
    view, expected = transposed()
    to_cpu(view, out=landing(view)).result()
    out = landing(view)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    number = torch.zeros(1, device=WHERE)
    with torch.cuda.graph(graph):  # in the mode that the whole process is to keep to
        number.add_(1)
        with ThreadPoolExecutor(1) as other:
            result = other.submit(lambda: to_cpu(view, out=out).result()).result()
    assert same_bits(result, expected)
    graph.replay()
    torch.cuda.synchronize()
    assert int(number) == 1
    assert used == [True, True]


def test_the_memory_is_kept_until_its_bytes_have_left(used):
    view, expected = transposed()
    out = landing(view)
    to_cpu(view, out=out).result()
    out.zero_()
    gate = CopySide(WHERE).hold()
    try:
        transfer = to_cpu(view, out=out)
        del transfer
        gc.collect()
        others = [torch.full((2048 * 1024,), 7.0, device=WHERE) for _ in range(4)]
        torch.cuda.synchronize()
    finally:
        gate.open()
    assert eventually(lambda: same_bits(out, expected))
    del others
    assert used == [True, True]


def test_a_source_may_be_written_as_soon_as_it_is_packed(used):
    view, expected = transposed()
    to_cpu(view, out=landing(view)).result()
    gate = CopySide(WHERE).hold()
    try:
        transfer = to_cpu(view, out=landing(view), protect=True)
        view.zero_()
        torch.cuda.current_stream().synchronize()  # although nothing has been sent
        assert not transfer.done()
    finally:
        gate.open()
    assert same_bits(transfer.result(), expected)
    assert used == [True, True]
