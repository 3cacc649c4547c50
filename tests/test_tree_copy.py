"""TreeCopy: prepared once, called again and again, into new memory or into the same."""

import gc
from collections import namedtuple

import numpy as np
import pytest
import torch
from helpers.data import poison, random_bits, random_numbers, same_bits, same_tree
from helpers.floats import bits_of, expected_bits, nonfinite_in
from helpers.streams import finish_all, is_held, side

import streamlap
from streamlap import TreeCopy, to_cpu, tree_copy

pytestmark = pytest.mark.usefixtures("nothing_left")

Pair = namedtuple("Pair", "left right")


def tree_on(where):
    return {
        "list": [random_bits(i, where=where) for i in range(30)],
        "pair": Pair(random_bits((3, 4), torch.float64, where), random_bits(5, torch.bool, where)),
        "scalar": random_bits((), torch.int64, where),
        "text": "passes",
        "transposed": random_bits((6, 2), where=where).t(),
        "strided": random_bits((6, 8), where=where)[:, ::3],
        "empty": torch.empty(0, 3, device=where),
    }


def on_host(tree):
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def test_a_plan_copies_each_tree_that_comes(where):
    copy = TreeCopy(like=tree_on(where))
    transfers = []
    for _ in range(4):
        tree = tree_on(where)
        transfers.append((copy(tree), on_host(tree)))
    for transfer, expected in transfers:
        assert same_tree(transfer.result(), expected)
        assert transfer.stats()["paths"] == ["gather"]
        assert transfer.stats()["leaves"] == 36
        assert transfer.nbytes == sum(
            leaf.nbytes
            for leaf in torch.utils._pytree.tree_leaves(expected)
            if isinstance(leaf, torch.Tensor)
        )
    assert transfers[0][0].result()["transposed"].stride() == (1, 2)
    assert "36 tensors" in repr(copy)
    assert copy.nbytes >= transfers[0][0].nbytes


def test_a_single_tensor_and_items(where):
    x = random_bits((7, 9), where=where)
    copy = TreeCopy(like=x)
    assert same_bits(copy(x).result(), x)
    pair = TreeCopy(like=[x, x + 1])
    transfer = pair([x, x])
    assert len(transfer) == 2
    assert same_bits(transfer[1], x)
    assert [leaf for leaf, _offset, _view in transfer.chunks()] == [0, 1]


def test_numpy_arrays_come_back_as_such():
    arrays = [np.arange(5.0), np.ones((2, 3), np.int16)]
    result = TreeCopy(like=arrays)(arrays).result()
    assert all(isinstance(array, np.ndarray) for array in result)
    assert all(np.array_equal(a, b) for a, b in zip(result, arrays, strict=True))


def test_earlier_results_are_filled_again(where):
    copy = TreeCopy(like=tree_on(where))
    first = copy(tree_on(where)).result()
    live = streamlap.pool_stats(where)["live"]
    tree = tree_on(where)
    transfer = copy(tree, out=first)
    again = transfer.result()
    assert again["list"][3] is first["list"][3]
    assert again["text"] == "passes"
    assert same_tree(first, on_host(tree))
    assert streamlap.pool_stats(where)["live"] == live
    by_to_cpu = tree_on(where)
    transfer = to_cpu(by_to_cpu, out=first)
    assert same_tree(transfer.result(), on_host(by_to_cpu))
    assert "gather" in transfer.stats()["paths"]


def test_leaves_without_elements_lie_in_any_way(where):
    empty = torch.empty(3, 0, 2, device=where)
    tree = [empty.permute(2, 0, 1), random_bits(10, where=where), empty[::2], empty.conj()]
    copy = TreeCopy(like=tree)
    first = copy(tree).result()
    assert same_tree(copy([*tree[:2], empty[1:], tree[3]], out=first).result(), on_host(tree))


def test_what_is_no_earlier_result_is_refused(where):
    xs = [random_bits(10, where=where) for _ in range(3)]
    copy = TreeCopy(like=xs)
    results = copy(xs).result()
    kept = [x.clone() for x in results]
    wrong = {
        "of another shape": (results[:2], "another shape"),
        "apart": ([torch.empty(10) for _ in range(3)], "elsewhere"),
        "out of order": ([results[1], results[0], results[2]], "elsewhere"),
        "of another dtype": ([results[0], results[1], results[2].view(torch.int32)], "shape"),
        "strided": ([results[0], results[1], torch.empty(20)[::2]], "shape|elsewhere"),
        "a list": ([results[0], results[1], [1]], "another shape"),
        "no tensor": ([results[0], results[1], 5], "must be a tensor"),
    }
    for name, (out, why) in wrong.items():
        with pytest.raises((ValueError, TypeError), match=why):
            copy(xs, out=out)
        assert same_tree(results, kept), name


def square(where):
    return random_numbers((6, 6), where=where)


ODD = {
    "transposed": lambda where: square(where).t(),
    "negated later": lambda where: torch._neg_view(square(where)),
    "with history": lambda where: square(where).requires_grad_() * 2,
    "a parameter": lambda where: torch.nn.Parameter(square(where)),
    "of inference": torch.inference_mode()(square),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_leaf_that_is_not_as_usual_is_looked_at_by_itself(where, odd):
    usual = [square(where) for _ in range(5)]
    copy = TreeCopy(like=usual)
    first = copy(usual).result()
    tree = [*usual[:3], ODD[odd](where), usual[4]]
    for out in (None, first):
        result = copy(tree, out=out).result()
        assert same_tree(result, [leaf.detach().resolve_neg().cpu() for leaf in tree])
        assert not any(leaf.requires_grad for leaf in result)


def test_an_earlier_result_that_was_changed_in_place_is_refused(where):
    tree = [square(where) for _ in range(5)]
    copy = TreeCopy(like=tree)
    for change in (
        lambda leaf: leaf.t_(),
        lambda leaf: leaf.resize_(4, 9),
        lambda leaf: leaf.set_(torch.zeros(6, 6)),
    ):
        out = copy(tree).result()
        change(out[3])
        with pytest.raises(streamlap.InvalidArgument, match="no earlier result"):
            copy(tree, out=out)


def test_trees_that_do_not_fit_are_refused(where):
    xs = [random_bits(10, where=where), random_bits(4, torch.int32, where), 5]
    copy = TreeCopy(like=xs)
    wrong = {
        "another shape": (xs[:2], "another shape than the plan"),
        "a leaf's shape": ([xs[0][1:], *xs[1:]], r"shape \(9,\)"),
        "a leaf's dtype": ([xs[0].double(), *xs[1:]], "float64"),
        "no tensor": (["x", *xs[1:]], "is a str"),
        "sparse": ([xs[0].to_sparse(), *xs[1:]], "sparse"),
    }
    if where != "cpu":
        wrong["a leaf's device"] = ([xs[0].cpu(), *xs[1:]], "on cpu")
    for tree, why in wrong.values():
        with pytest.raises((ValueError, TypeError), match=why):
            copy(tree)
    assert copy([*xs[:2], "another passenger"]).result()[2] == "another passenger"


def test_plans_that_make_no_sense_are_refused(where):
    x = random_bits(10, where=where)
    ints = torch.arange(3, device=where)
    with pytest.raises(streamlap.InvalidArgument, match="without tensors"):
        TreeCopy(like=["text", 5])
    with pytest.raises(streamlap.UnsupportedTensor, match=r"leaf 1 is torch\.int64"):
        TreeCopy(like=[x, ints], dtype=torch.bfloat16)
    with pytest.raises(streamlap.UnsupportedTensor, match="casts float32"):
        TreeCopy(like=x, dtype=torch.float64)
    with pytest.raises(streamlap.UnsupportedTensor, match="scaled"):
        TreeCopy(like=[x, ints], scale=2)
    with pytest.raises(streamlap.UnsupportedTensor, match="counted"):
        TreeCopy(like=x.double(), nonfinite=True)
    for scale in (float("inf"), float("nan"), 1e39, 10**400, np.float64("nan")):
        with pytest.raises(streamlap.InvalidArgument, match="finite"):
            TreeCopy(like=x, scale=scale)
    for scale in ("2", True, torch.tensor(2.0)):
        with pytest.raises(streamlap.InvalidType, match="scale"):
            TreeCopy(like=x, scale=scale)
    with pytest.raises(streamlap.InvalidArgument, match="does not scale"):
        TreeCopy(like=x)(x, scale=2.0)
    with pytest.raises(streamlap.InvalidType, match="nonfinite"):
        TreeCopy(like=x, nonfinite=1)


@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_a_plan_casts_scales_and_counts_in_one_pass(where, wanted):
    trees = [[random_bits(n, d, where) for n in (1, 7, 64, 5001)] for d in (torch.float32,) * 2]
    copy = TreeCopy(like=trees[0], dtype=wanted, scale=1.0, nonfinite=True)
    for tree, scale in zip(trees, (0.25, np.float32(3e-5)), strict=True):
        transfer = copy(tree, scale=scale)
        for source, got in zip(tree, transfer.result(), strict=True):
            with np.errstate(all="ignore"):
                product = source.cpu().numpy() * np.float32(scale)
            expected = expected_bits(torch.from_numpy(product), wanted)
            is_nan = source.cpu().isnan().numpy()
            assert np.array_equal(bits_of(got)[~is_nan], expected[~is_nan])
            kept = expected_bits(source.cpu(), wanted)  # a NaN is not multiplied
            assert np.array_equal(bits_of(got)[is_nan], kept[is_nan])
        assert transfer.nonfinite() == nonfinite_in(*tree)


def test_unscaling_is_that_of_the_gradient_scaler(where):
    grads = [random_numbers((30, 7), where=where) * 1024 for _ in range(9)]
    grads[3][2, 2] = float("inf")
    transfer = TreeCopy(like=grads, scale=1 / 1024, nonfinite=True)(grads)
    theirs = [grad.clone() for grad in grads]
    found = torch.zeros(1, device=where)
    inverse = torch.tensor([1 / 1024], device=where)
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, found, inverse)
    assert same_tree(transfer.result(), on_host(theirs))
    assert (transfer.nonfinite() > 0) == bool(found.item())


def test_a_source_that_changed_is_noticed(where):
    xs = [random_bits(1000, where=where) for _ in range(3)]
    copy = TreeCopy(like=xs)
    transfer = copy(xs)
    xs[1].add_(1)
    with pytest.raises(streamlap.SourceModified):
        transfer.result()
    transfer = copy(xs, protect=True)
    xs[1].add_(1)
    transfer.result()
    transfer = copy(xs)
    transfer.wait_source()
    xs[1].add_(1)
    transfer.result()


def test_a_plan_s_copy_comes_after_its_producer(where):
    producer = side(where, "producer")
    xs = [poison(torch.empty(50, device=where)) for _ in range(9)]
    copy = TreeCopy(like=xs)
    copy(xs, stream=producer.stream).result()
    values = [random_numbers(50, where=where) for _ in xs]
    finish_all(where)
    gate = producer.hold()
    for x, value in zip(xs, values, strict=True):
        producer.copy(x, value)
    transfer = copy(xs, stream=producer.stream)
    assert is_held(transfer)
    gate.open()
    assert same_tree(transfer.result(), on_host(values))


def test_results_live_as_long_as_a_view(where):
    xs = [random_bits(1000, where=where) for _ in range(3)]
    before = streamlap.pool_stats(where)["live"]
    view = TreeCopy(like=xs)(xs).result()[2][5:]
    gc.collect()
    assert streamlap.pool_stats(where)["live"] > before
    assert same_bits(view, xs[2][5:])
    del view
    gc.collect()
    assert streamlap.pool_stats(where)["live"] == before


def test_a_pool_of_ones_own(where):
    pool = streamlap.PinnedPool("1MiB")
    xs = [random_bits(1000, where=where) for _ in range(3)]
    copy = TreeCopy(like=xs, pool=pool)
    result = copy(xs).result()
    assert pool.live >= 12000
    held = [copy(xs) for _ in range(20)]
    assert all(same_tree(t.result(), on_host(xs)) for t in held)
    with pytest.raises(streamlap.PoolExhausted):
        TreeCopy(like=[torch.empty(1 << 20, device=where)], pool=pool)(
            [torch.empty(1 << 20, device=where)]
        )
    del result, held


def test_a_module_s_gradients(where):
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    model = model.to(where)
    model(torch.randn(3, 5, device=where)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    copy = TreeCopy(like=grads)
    assert same_tree(copy(grads).result(), on_host(grads))
    parameters = list(model.parameters())
    result = TreeCopy(like=parameters)(parameters).result()
    assert all(not leaf.requires_grad for leaf in result)
    assert same_tree(result, [p.detach().cpu() for p in parameters])


@pytest.mark.gpu
def test_a_tree_on_both_sides():
    tree = [random_bits(9, where="cuda:0"), random_bits(9), random_bits(5, where="cuda:0")]
    copy = TreeCopy(like=tree)
    for _ in range(2):
        result = copy(tree).result()
        assert same_tree(result, [leaf.cpu() for leaf in tree])
    assert same_tree(copy(tree, out=result).result(), [leaf.cpu() for leaf in tree])


@pytest.mark.gpu
def test_a_plan_in_a_capture_is_refused():
    xs = [random_bits(9, where="cuda:0") for _ in range(3)]
    copy = TreeCopy(like=xs)
    copy(xs).result()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        xs[0].add_(1)  # torch warns of a graph that is empty
        with pytest.raises(streamlap.CaptureError):
            copy(xs)


def test_scratch_memory_is_for_results_in_one_block(monkeypatch):
    asked = []
    monkeypatch.setattr(tree_copy, "scratch_for", lambda *args: asked.append(args))
    tree = [random_numbers((64,)) for _ in range(4)]  # 256 bytes each: nothing lies between them
    copy = TreeCopy(like=tree)
    results = copy(tree).result()
    copy(tree, out=results).result()
    assert len(asked) == 2
    # What lies as planned in other memory may be several reservations.
    whole = torch.empty(4 * 64)
    copy(tree, out=list(whole.split(64))).result()
    assert len(asked) == 2
    assert same_bits(whole, torch.cat(tree))
