"""Trees of many small tensors, looked at in one call: what they take, and what they leave alone."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from helpers.data import poison, random_bits, random_numbers, same_bits, same_tree
from helpers.floats import bits_of, expected_bits
from helpers.streams import MOMENT, CopySide, eventually, is_held

import streamlap
from streamlap import _native, rows, to_cpu, to_device
from streamlap.devices import current_stream, place_of

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def quick(monkeypatch):
    """Count the calls that the short way takes."""
    taken = []

    def watched(name):
        real = getattr(rows, name)

        def call(*args):
            transfer = real(*args)
            taken.append(transfer is not None)
            return transfer

        monkeypatch.setattr(streamlap.copies, name, call)

    watched("tree_to_cpu")
    watched("tree_to_device")
    return taken


def mixed(where="cpu"):
    """Leaves of all kinds of sizes, dtypes and alignments, empty ones and single numbers."""
    base = random_bits(5000, torch.uint8, where)
    return [
        *(
            random_bits(size, dtype, where)
            for size in (1, 3, 64, 1000)
            for dtype in (torch.float32,)
        ),
        *(random_bits((2, 3, 5), dtype, where) for dtype in (torch.float64, torch.bool)),
        *(random_bits((), dtype, where) for dtype in (torch.bfloat16, torch.int8, torch.complex64)),
        *(base[first : first + 7 * first] for first in range(9)),
        torch.empty(0, 3, device=where),
        torch.empty(4, 0, dtype=torch.float64, device=where),
    ]


# -- what they give


def test_each_result_is_a_tensor_of_its_own(where, quick):
    tree = [random_numbers((5, 3), where=where) for _ in range(20)]
    before = streamlap.pool_stats(where)["live_blocks"]
    results = to_cpu(tree).result()
    assert quick == [True]
    assert streamlap.pool_stats(where)["live_blocks"] - before == 1
    for leaf, result in zip(tree, results, strict=True):
        assert same_bits(result, leaf.cpu())
        assert result._base is None
        assert (result.untyped_storage().nbytes(), result.storage_offset()) == (60, 0)
        assert not result.requires_grad
    versions = [result._version for result in results]
    results[0].mul_(torch.ones(3, requires_grad=True))  # as any other tensor
    assert [result._version for result in results[1:]] == versions[1:]
    kept = results[7]
    results.clear()
    gc.collect()
    assert streamlap.pool_stats(where)["live_blocks"] - before == 1
    assert same_bits(kept, tree[7].cpu())
    del kept, result
    assert eventually(lambda: streamlap.pool_stats(where)["live_blocks"] == before)


def test_earlier_results_are_one_range_again(where, quick):
    tree = [random_numbers((5, 3), where=where) for _ in range(20)]
    results = to_cpu(tree).result()
    newer = [leaf + 1 for leaf in tree]
    transfer = to_cpu(newer, out=results)
    assert transfer.stats()["paths"] == ["gather"]
    assert same_tree(transfer.result(), [leaf.cpu() for leaf in newer])
    back = [torch.empty_like(leaf) for leaf in tree]
    transfer = to_device(results, tree[0].device, out=back)
    assert same_tree(transfer.result(), newer)
    # The general way, which counts, knows them, too.
    transfer = to_cpu(newer, out=results, nonfinite=True)
    transfer.result()
    assert (transfer.stats()["paths"], transfer.stats()["chunks"]) == (["gather"], 20)
    assert _native.block_around(torch.ones(3).data_ptr(), place_of(tree[0].device).runtime) is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_leaves_may_lie_in_any_order(where, dtype):
    """As gradients of convolutions do in channels_last: they go with the others."""
    made = [random_numbers((4, 3, 2, 5), where=where) for _ in range(12)]
    tree = [x.contiguous(memory_format=torch.channels_last) for x in made[:4]]
    tree += [*(x.permute(3, 1, 0, 2) for x in made[4:8]), *made[8:]]
    transfer = to_cpu(tree, dtype=dtype)
    assert transfer.stats()["paths"] == ["gather"]
    results = transfer.result()
    assert same_tree(results, [leaf.to("cpu", dtype=dtype) for leaf in tree])
    assert [leaf.stride() for leaf in results] == [leaf.stride() for leaf in tree]
    outs = [torch.empty_like(leaf) for leaf in results]
    assert same_tree(to_cpu(tree, dtype=dtype, out=outs).result(), results)
    outs = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in results]  # of other strides
    assert same_tree(to_cpu(tree, dtype=dtype, out=outs).result(), results)
    if where != "cpu":
        back = to_device(results, where).result()
        assert same_tree([leaf.cpu() for leaf in back], results)
    with_gaps = [*tree, made[0][..., ::2]]
    assert same_tree(to_cpu(with_gaps).result(), [leaf.cpu() for leaf in with_gaps])


# -- what a row knows


def test_a_row_says_what_the_tensors_say():
    tensors = mixed()
    row = _native.TensorRow.of(tensors)
    assert row.device == -1
    assert row.dense
    assert _native.TensorRow.of([torch.ones(2, 3, 4).permute(2, 0, 1), torch.ones(0, 3).t()]).dense
    for gaps in (torch.ones(4)[::2], torch.ones(1).expand(3), torch.ones(3, 4)[:, 1:].t()):
        assert not _native.TensorRow.of([gaps]).dense
    assert row.has_complex
    assert row.has_empty
    assert row.nbytes == sum(tensor.nbytes for tensor in tensors)
    assert row.largest == max(tensor.nbytes for tensor in tensors)
    begins = [tensor.data_ptr() for tensor in tensors if tensor.nbytes]
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors if tensor.nbytes]
    assert row.around() == (min(begins), max(ends) - min(begins))
    assert row.addresses_of(tensors) is not None
    for position, other in (
        (2, torch.empty(65)),
        (2, torch.empty(64, dtype=torch.int32)),
        (2, torch.empty(64, 1)),
        (2, torch.empty(128)[::2]),
        (2, np.zeros(64, np.float32)),
        (2, None),
    ):
        assert row.addresses_of([*tensors[:position], other, *tensors[position + 1 :]]) is None
    assert row.addresses_of(tensors[:-1]) is None
    assert row.lies_as(_native.TensorRow.of([torch.empty_like(tensor) for tensor in tensors]))
    assert not row.lies_as(_native.TensorRow.of(tensors[::-1]))


def mkldnn():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    return torch.ones(4, 4).to_mkldnn()


def batched():
    found = []
    torch.func.vmap(lambda x: found.append(x) or x)(torch.ones(4, 4))
    return found[0]


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4, 4)


ODD = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "with history": lambda: torch.ones(4, requires_grad=True) * 2,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "compressed": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "meta": lambda: torch.empty(4, device="meta"),
    "fake": fake,
    "batched": batched,
    "mkldnn": mkldnn,
    "negative": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "bits": lambda: torch.empty(8, dtype=torch.bits8),
    "array": lambda: np.ones(4, np.float32),
    "nothing": lambda: None,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_what_is_odd_is_no_row(kind):
    assert _native.TensorRow.of([torch.ones(4), ODD[kind]()]) is None


@pytest.mark.parametrize("kind", ["parameter", "with history", "negative", "conjugate", "array"])
def test_odd_leaves_among_many_are_copied(where, kind):
    odd = ODD[kind]()
    tree = [random_bits(9, where=where) for _ in range(20)]
    tree.insert(7, odd.to(where) if isinstance(odd, torch.Tensor) else odd)
    result = to_cpu(tree).result()
    for leaf, got in zip(tree, result, strict=True):
        if isinstance(leaf, np.ndarray):
            assert np.array_equal(got, leaf)
        else:
            assert same_bits(got, leaf.detach().cpu().resolve_neg().resolve_conj())


# -- to the host


def test_many_leaves_of_all_kinds(where, quick):
    tree = mixed(where)
    transfer = to_cpu(tree)
    assert quick == [True]
    assert transfer.stats()["leaves"] == len(tree)
    assert same_tree(transfer.result(), [leaf.cpu() for leaf in tree])
    assert same_bits(transfer[4], tree[4].cpu())
    assert [same_bits(a, b.cpu()) for a, b in zip(transfer[2:5], tree[2:5], strict=True)] == [
        True
    ] * 3
    assert transfer.nbytes == sum(leaf.nbytes for leaf in tree)


def test_earlier_results_are_filled_again(where, quick):
    tree = mixed(where)
    out = to_cpu(tree).result()
    for leaf in out:
        leaf.zero_()
    newer = mixed(where)
    transfer = to_cpu(newer, out=out)
    assert quick == [True, True]
    result = transfer.result()
    assert all(a is b for a, b in zip(result, out, strict=True))
    assert same_tree(result, [leaf.cpu() for leaf in newer])


def test_earlier_results_in_another_order_and_a_part_of_them(where, quick):
    out = to_cpu([random_bits(33, where=where) for _ in range(20)]).result()[::-1][:12]
    tree = [random_bits(33, where=where) for _ in range(12)]
    assert same_tree(to_cpu(tree, out=out).result(), [leaf.cpu() for leaf in tree])
    assert quick == [True, True]


def test_destinations_of_every_other_kind_are_filled(where, quick):
    tree = [random_bits(33, where=where) for _ in range(12)]
    for out, is_quick in (
        ([torch.empty(33) for _ in tree], True),
        ([streamlap.empty_pinned(33) for _ in tree], True),
        ([np.empty(33, np.float32) for _ in tree], False),
        ([torch.empty(33) if i % 2 else streamlap.empty_pinned(33) for i in range(12)], None),
        (list(torch.empty(12, 33).unbind(0)), True),
        (list(streamlap.empty_pinned((12, 33)).unbind(0)), True),
        (list(streamlap.empty_pinned((33, 12)).unbind(1)), False),
    ):
        del quick[:]
        result = to_cpu(tree, out=out).result()
        assert all(a is b for a, b in zip(result, out, strict=True))
        assert is_quick is None or quick == [is_quick]
        assert same_tree([torch.as_tensor(leaf) for leaf in out], [leaf.cpu() for leaf in tree])


def test_sources_of_copies_to_each_destination_are_borrowed(where):
    tree = [random_bits(33, where=where) for _ in range(12)]
    out = [streamlap.empty_pinned(33) for _ in tree]
    to_cpu(tree, out=out).result()
    gate = CopySide(where).hold()
    transfer = to_cpu(tree, out=out)
    tree[5].zero_()
    gate.open()
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


@pytest.mark.parametrize("how", ["the same", "a part", "around"])
def test_a_destination_that_is_a_source_is_refused(how):
    base = torch.ones(100)
    tree = [torch.ones(33) for _ in range(12)]
    out = [torch.zeros(33) for _ in range(12)]
    tree[3], out[7] = {
        "the same": (base[:33], base[:33]),
        "a part": (base[20:53], base[:33]),
        "around": (base[:33], base[10:43]),
    }[how]
    with pytest.raises(streamlap.InvalidArgument, match="overlaps a source"):
        to_cpu(tree, out=out)
    assert not any(bool(leaf.any()) for index, leaf in enumerate(out) if index != 7)
    tree[3] = base[50:83]
    assert same_tree(to_cpu(tree, out=out).result(), tree)


def test_destinations_that_do_not_fit_are_refused_and_untouched(where):
    tree = [random_bits(33, where=where) for _ in range(12)]
    good = to_cpu(tree).result()
    for leaf in good:
        leaf.zero_()
    for bad in (
        [*good[:5], good[4], *good[6:]],  # twice the same
        [*good[:5], torch.empty(34), *good[6:]],
        [*good[:5], torch.empty(33, dtype=torch.int32), *good[6:]],
        [*good[:5], torch.empty(1).expand(33), *good[6:]],
        [*good[:5], good[5].clone().requires_grad_(), *good[6:]],
        good[:-1],
        tuple(good),
    ):
        with pytest.raises(streamlap.InvalidArgument):
            to_cpu(tree, out=bad)
    assert not any(bool(leaf.any()) for leaf in good)


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_leaves_are_cast_into_new_memory_and_into_the_same(where, quick, wanted):
    tree = [
        random_numbers((size, 3), dtype, where)
        for size in (1, 5, 300)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    transfer = to_cpu(tree, dtype=wanted)
    out = transfer.result()
    assert transfer.nbytes == sum(leaf.nbytes for leaf in out)
    for leaf, got in zip(tree, out, strict=True):
        assert got.dtype is wanted
        assert np.array_equal(bits_of(got), expected_bits(leaf.cpu(), wanted))
    newer = [random_numbers(leaf.shape, leaf.dtype, where) for leaf in tree]
    to_cpu(newer, out=out, dtype=wanted).result()
    for leaf, got in zip(newer, out, strict=True):
        assert np.array_equal(bits_of(got), expected_bits(leaf.cpu(), wanted))
    assert quick == [True, True]
    with pytest.raises(streamlap.InvalidArgument):
        to_cpu(tree, out=out, dtype=torch.float64)


def test_a_cast_that_no_row_describes_goes_the_general_way(where, quick, monkeypatch):
    tree = [random_numbers(9, where=where) for _ in range(10)]
    monkeypatch.setattr(rows, "row_like", lambda *_args: None)
    result = to_cpu(tree, dtype=torch.bfloat16).result()
    assert quick == [False]
    for leaf, got in zip(tree, result, strict=True):
        assert np.array_equal(bits_of(got), expected_bits(leaf.cpu(), torch.bfloat16))


def test_parameters_are_copied_without_their_history(where, quick):
    tree = [torch.nn.Parameter(random_numbers(9, where=where)) for _ in range(10)]
    tree += [torch.nn.Parameter(random_numbers(9, where=where), requires_grad=False)]
    result = to_cpu(tree).result()
    assert quick == [True]
    assert not any(leaf.requires_grad for leaf in result)
    assert same_tree(result, [leaf.detach().cpu() for leaf in tree])


def test_a_tree_past_the_pool_s_limit_goes_the_general_way(where):
    with streamlap.configure(small_leaf_bytes="1MiB"):
        tree = [random_bits(4096, where=where) for _ in range(10)]
        with pytest.raises(streamlap.PoolExhausted):
            to_cpu(tree, pin=True, pool=streamlap.PinnedPool("64KiB"))
        assert same_tree(to_cpu(tree).result(), [leaf.cpu() for leaf in tree])


def test_single_tensors_of_results_may_be_kept_alone(where):
    result = to_cpu([random_bits(64, where=where) for _ in range(20)])
    one = result.result()[3]
    expected = one.clone()
    del result
    gc.collect()
    to_cpu([random_bits(64, where=where) for _ in range(20)]).result()
    assert same_bits(one, expected)


def test_dtypes_that_are_one_to_dlpack_are_told_apart(where):
    tree = [torch.ones(8, dtype=torch.int8, device=where) for _ in range(9)]
    out = to_cpu(tree).result()
    plan = streamlap.TreeCopy(like=tree)
    other = [torch.empty(8, dtype=torch.int4, device=where) for _ in range(9)]
    with pytest.raises(streamlap.InvalidArgument, match="int4"):
        plan(other)
    with pytest.raises(streamlap.InvalidArgument, match="int4"):
        to_cpu(tree, out=[leaf.view(torch.int4) for leaf in out])
    assert same_tree(to_cpu(tree, out=out).result(), [leaf.cpu() for leaf in tree])


@pytest.mark.parametrize(
    ("how", "side"),
    [
        *((how, "source") for how in ("new", "earlier", "apart", "plan", "plan_out")),
        *((how, "out") for how in ("earlier", "apart", "plan_out")),  # who gives one
    ],
)
def test_a_tensor_that_is_given_other_memory_keeps_the_old_as_long_as_it_is_copied(how, side):
    """As FSDP does, and ``module.to()``."""
    where = "cpu"
    arrays = [np.full(64, float(index), np.float32) for index in range(9)]
    whole = np.zeros((9, 64), np.float32)
    if how in ("earlier", "plan_out"):
        landing = [torch.from_numpy(whole)[index].data for index in range(9)]  # no base
        alive = [weakref.ref(whole)]
    else:
        parts = [np.zeros(64, np.float32) for _ in range(9)]
        landing = [torch.from_numpy(part) for part in parts]
        alive = [weakref.ref(part) for part in parts]
        del parts
    tree = [torch.from_numpy(array) for array in arrays]
    if side == "source":
        alive = [weakref.ref(array) for array in arrays]
    if how.startswith("plan"):
        plan = streamlap.TreeCopy(like=tree)
        if how == "plan_out":
            landing = plan([torch.zeros(64) for _ in range(9)]).result()
            alive = [] if side == "out" else alive  # it is the pool's
    calls = {
        "new": lambda: to_cpu(tree),
        "earlier": lambda: to_cpu(tree, out=landing),
        "apart": lambda: to_cpu(tree, out=landing),
        "plan": lambda: plan(tree),
        "plan_out": lambda: plan(tree, out=landing),
    }
    before = streamlap.pool_stats(where)["live"]
    gate = CopySide(where).hold()
    transfer = calls[how]()
    del arrays, whole
    for tensor in tree if side == "source" else landing:
        tensor.data = torch.zeros(64)
    gc.collect()
    assert all(reference() is not None for reference in alive)
    assert streamlap.pool_stats(where)["live"] >= before
    del calls
    gate.open()
    with contextlib.suppress(streamlap.SourceModified):
        transfer.result()
    del transfer
    gc.collect()
    assert eventually(lambda: all(reference() is None for reference in alive))


def test_leaves_without_elements_take_nothing_of_a_block(where):
    empty = torch.zeros(0, dtype=torch.float64, device=where)
    one = torch.ones(1, dtype=torch.uint8, device=where)
    for tree in ([empty] * 8 + [one], [one, *[empty] * 8]):
        assert same_tree(to_cpu(tree).result(), [leaf.cpu() for leaf in tree])
        assert same_tree(
            streamlap.TreeCopy(like=tree)(tree).result(), [leaf.cpu() for leaf in tree]
        )
    nothing = [torch.zeros(0, 3, device=where) for _ in range(9)]
    assert same_tree(to_cpu(nothing).result(), [leaf.cpu() for leaf in nothing])
    plan = streamlap.TreeCopy(like=nothing)
    out = plan(nothing).result()
    assert same_tree(plan(nothing, out=out).result(), [leaf.cpu() for leaf in nothing])


def test_what_has_no_address_is_refused_by_a_plan_too(where):
    tree = [torch.ones(4, 4, device=where) for _ in range(9)]
    plan = streamlap.TreeCopy(like=tree)
    freed = torch.ones(4, 4, device=where)
    freed.untyped_storage().resize_(0)
    seen = []
    torch.func.vmap(lambda x: seen.append(x) or x)(torch.ones(4, 4, 4, device=where))
    for bad in (freed, seen[0]):
        with pytest.raises(streamlap.UnsupportedTensor):
            plan([bad, *tree[1:]])
        with pytest.raises(streamlap.UnsupportedTensor):
            plan(tree, out=[bad, *tree[1:]])


# -- to a device


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_many_leaves_of_all_kinds_to_a_device(quick, pinned):
    tree = mixed("cuda:0")
    tree = to_cpu(tree).result() if pinned else [leaf.cpu() for leaf in tree]
    del quick[:]
    transfer = to_device(tree, "cuda:0")
    assert quick == [True]
    result = transfer.wait()
    assert all(leaf.device == torch.device("cuda:0") for leaf in result)
    assert transfer.stats()["paths"] == ["scatter"]
    assert transfer.nbytes == sum(leaf.nbytes for leaf in tree)
    assert same_tree([leaf.cpu() for leaf in result], tree)
    out = [torch.empty_like(leaf) for leaf in result]
    assert all(a is b for a, b in zip(to_device(tree, "cuda:0", out=out).wait(), out, strict=True))
    assert same_tree([leaf.cpu() for leaf in out], tree)
    assert quick == [True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_leaves_are_cast_on_their_way_to_a_device(quick, pinned, wanted):
    tree = [random_numbers((size, 3), torch.float16) for size in range(1, 20)]
    if pinned:
        tree = to_cpu(tree).result()
        tree = to_cpu([leaf.cuda() for leaf in tree]).result()
    del quick[:]
    result = to_device(tree, "cuda:0", dtype=wanted).result()
    assert quick == [True]
    for leaf, got in zip(tree, result, strict=True):
        assert np.array_equal(bits_of(got.cpu()), expected_bits(leaf, wanted))


@pytest.mark.gpu
def test_page_locked_leaves_among_others_are_read_in_their_turn():
    made = torch.zeros(64, device="cuda:0")
    pinned = streamlap.empty_pinned(64)
    tree = [*(random_bits(64) for _ in range(20)), pinned]
    to_device(tree, "cuda:0").result()
    torch.cuda.synchronize()
    gate = current_stream(place_of(made.device)).gate()
    made.fill_(7)
    pinned.copy_(made, non_blocking=True)
    transfer = to_device(tree, "cuda:0")
    gate.open()
    assert bool((transfer.result()[-1] == 7).all())


@pytest.mark.gpu
def test_strides_are_those_of_the_source():
    tree = [torch.ones(8, 1, 4, 4).to(memory_format=torch.channels_last) for _ in range(20)]
    results = to_device(tree, "cuda:0").result()
    assert [leaf.stride() for leaf in results] == [leaf.stride() for leaf in tree]


@pytest.mark.gpu
def test_leaves_that_do_not_fit_into_the_pool_go_through_the_ring():
    held = []
    with contextlib.suppress(streamlap.PoolExhausted):
        pool = place_of(torch.device("cuda:0")).pool
        held = [pool.empty(pool.limit - pool.live - (1 << 20), torch.uint8)]
    tree = [torch.full((1,), float(index)) for index in range(20_000)]  # 256 bytes each, packed
    result = to_device(tree, "cuda:0").result()
    assert torch.equal(torch.cat(result).cpu(), torch.arange(20_000.0))
    del held


@pytest.mark.gpu
def test_packed_leaves_may_be_written_at_once():
    tree = [random_bits(64) for _ in range(20)]
    expected = [leaf.clone() for leaf in tree]
    to_device(tree, "cuda:0").result()
    gate = CopySide("cuda:0", to_device=True).hold()
    transfer = to_device(tree, "cuda:0")
    for leaf in tree:
        poison(leaf)
    gate.open()
    assert same_tree([leaf.cpu() for leaf in transfer.result()], expected)


@pytest.mark.gpu
def test_device_destinations_that_do_not_fit_are_refused():
    tree = [random_bits(33) for _ in range(12)]
    good = [torch.zeros(33, device="cuda:0") for _ in tree]
    for bad in (
        [*good[:5], good[4], *good[6:]],
        [*good[:5], torch.empty(34, device="cuda:0"), *good[6:]],
        [*good[:5], torch.empty(33), *good[6:]],
        good[:-1],
    ):
        with pytest.raises(streamlap.InvalidArgument):
            to_device(tree, "cuda:0", out=bad)
    torch.cuda.synchronize()
    assert not any(bool(leaf.any()) for leaf in good)


@pytest.mark.gpu
def test_a_tree_is_written_after_what_the_consumer_s_stream_still_reads():
    source = to_cpu([torch.full((64,), 1.0, device="cuda:0") for _ in range(9)]).result()
    out = [torch.zeros(64, device="cuda:0") for _ in source]
    to_device(source, "cuda:0", out=out).result()
    for leaf in out:
        leaf.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate = current_stream(place_of(torch.device("cuda:0"))).gate()
        transfer = to_device(source, "cuda:0", out=out)
        with pytest.raises(streamlap.TransferTimeout):
            transfer.result(MOMENT)
        gate.open()
        assert all(bool((leaf == 1).all()) for leaf in transfer.result())


@pytest.mark.gpu
def test_page_locked_leaves_on_their_way_to_a_device_are_borrowed():
    source = to_cpu([torch.full((64,), 1.0, device="cuda:0") for _ in range(9)]).result()
    to_device(source, "cuda:0").result()
    gate = CopySide("cuda:0", to_device=True).hold()
    transfer = to_device(source, "cuda:0")
    source[5].add_(1)
    gate.open()
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


@pytest.mark.gpu
def test_what_a_tree_to_a_device_needs_lives_although_nobody_holds_it():
    tree = [random_bits(64) for _ in range(20)]
    out = [torch.zeros(64, device="cuda:0") for _ in tree]
    to_device(tree, "cuda:0", out=out).result()
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    before = streamlap.pool_stats("cuda:0")["live"]
    gate = CopySide("cuda:0", to_device=True).hold()
    with contextlib.closing(_Opens(gate)):
        transfer = to_device(tree, "cuda:0", out=out)
        assert is_held(transfer)
        del transfer, out, tree
        gc.collect()
        assert streamlap.pool_stats("cuda:0")["live"] > before
        assert torch.cuda.memory_allocated() == allocated
    assert eventually(lambda: streamlap.pool_stats("cuda:0")["live"] == before)
    assert eventually(lambda: torch.cuda.memory_allocated() < allocated)


class _Opens:
    """Opens a gate at the end, whatever happens."""

    def __init__(self, gate):
        self.close = gate.open
