"""Moves: many leaves at once, every pair of dtypes, odd sizes and alignments, counts, both ways.

Against torch and NumPy bit for bit. What a cast makes of a NaN is in docs/kernels.md.
"""

import itertools

import numpy as np
import pytest
import torch
from helpers.data import POISON, poison, random_bits, random_numbers, same_bits, same_tree
from helpers.floats import (
    FLOATS,
    INTEGER,
    bits_of,
    every_half,
    expected_bits,
    nonfinite_in,
    values_of,
)

import streamlap
from streamlap import to_cpu, to_device

pytestmark = pytest.mark.usefixtures("nothing_left")

PAIRS = list(itertools.product(FLOATS, FLOATS))

# -- casts


@pytest.mark.parametrize(("source", "wanted"), PAIRS)
def test_a_cast_to_the_host_has_numpys_bits_and_torchs_numbers(where, source, wanted):
    values = values_of(source).to(where)
    transfer = to_cpu([values, values[:3]], dtype=wanted)
    result = transfer.result()[0]
    assert result.dtype is wanted
    assert np.array_equal(bits_of(result), expected_bits(values.cpu(), wanted))
    theirs = values.cpu().to(wanted)
    is_nan = theirs.isnan()
    assert torch.equal(result.isnan(), is_nan)
    integer = INTEGER[wanted]
    assert torch.equal(result.view(integer)[~is_nan], theirs.view(integer)[~is_nan])
    if source is not wanted:
        assert transfer.stats()["paths"] == ["gather"]


@pytest.mark.parametrize(("source", "wanted"), PAIRS)
def test_a_cast_to_a_device_has_numpys_bits(where, source, wanted):
    pinned = streamlap.empty_pinned(values_of(source).shape, source)
    pinned.copy_(values_of(source))
    transfer = to_device(pinned, where, dtype=wanted)
    result = transfer.result()
    assert result.device.type == torch.device(where).type
    assert np.array_equal(bits_of(result), expected_bits(pinned, wanted))
    if source is not wanted:
        way = "gather" if where == "cpu" else "scatter"
        assert transfer.stats()["paths"] == [way]


def test_values_that_were_widened_come_back(where):
    for dtype in (torch.float16, torch.bfloat16):
        wide = to_cpu(every_half(dtype).to(where), dtype=torch.float32).result()
        assert same_bits(to_cpu(wide, dtype=dtype).result(), every_half(dtype))


@pytest.mark.parametrize("size", [*range(0, 68, 3), 1000, 4097])
def test_odd_sizes_and_offsets_are_cast(where, size):
    for source, wanted in PAIRS:
        base = random_bits(size + 9, source, where)
        tree = [base[first : first + size] for first in range(9)]
        result = to_cpu(tree, dtype=wanted).result()
        for tensor, got in zip(tree, result, strict=True):
            assert np.array_equal(bits_of(got), expected_bits(tensor.cpu(), wanted))


def test_dtypes_that_no_move_casts_are_cast_as_before(where):
    tree = [torch.arange(5, device=where), random_numbers(7, where=where)]
    result = to_cpu(tree, dtype=torch.float64).result()
    assert same_tree(result, [tensor.cpu().double() for tensor in tree])
    mixed = to_cpu([*tree, True], dtype=torch.float16).result()
    assert same_tree(mixed, [*(tensor.cpu().half() for tensor in tree), True])


@pytest.mark.parametrize("dim", ["transposed", "stepped", "expanded", "permuted"])
def test_a_cast_of_what_is_not_contiguous(where, dim):
    x = random_numbers((6, 10, 4), where=where)
    views = {
        "transposed": x.transpose(0, 2),
        "stepped": x[:, ::3],
        "expanded": x[:1].expand(6, 10, 4),
        "permuted": x.permute(1, 2, 0),
    }
    result = to_cpu(views[dim], dtype=torch.bfloat16).result()
    assert same_bits(result, views[dim].cpu().bfloat16())


VIEWS = {
    "transposed": lambda x: x.transpose(0, 2)[:, 1:],
    "stepped": lambda x: x[:, ::3, 1:],
    "expanded": lambda x: x[:1, 2:].expand(5, 38, 33),
    "permuted": lambda x: x.permute(2, 0, 1)[::2],
    "a column": lambda x: x[0, :, 5],
    "unsqueezed": lambda x: x[:, ::2].unsqueeze(0).unsqueeze(-1),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_lies_apart_is_counted_and_cast_on_the_way(where, name, dtype):
    view = VIEWS[name](random_bits((6, 40, 33), dtype, where))
    for wanted in (dtype, torch.bfloat16):
        transfer = to_cpu(view, dtype=wanted, nonfinite=True)
        assert transfer.stats()["paths"] == ["strided"]
        assert np.array_equal(bits_of(transfer.result()), expected_bits(view.cpu(), wanted))
        assert transfer.result().is_contiguous()
        assert transfer.nonfinite() == nonfinite_in(view)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.complex128])
def test_what_lies_apart_on_a_gpu_goes_by_a_kernel(name, dtype):
    view = VIEWS[name](random_bits((6, 40, 33), dtype, "cuda:0"))
    transfer = to_cpu(view)
    assert transfer.stats()["paths"] == ["strided"]
    assert same_bits(transfer.result(), view)
    out = streamlap.empty_pinned(view.shape[::-1], dtype).permute(*range(view.dim())[::-1])
    assert same_bits(to_cpu(view, out=out).result(), view)


@pytest.mark.gpu
def test_a_large_transpose():
    x = random_bits((4000, 3001), where="cuda:0")
    out = streamlap.empty_pinned((3001, 4000), torch.float32)
    transfer = to_cpu(x.t(), out=out)
    assert transfer.stats()["paths"] == ["strided"]
    assert same_bits(transfer.result(), x.t())


# -- gather and scatter


def ragged(count, where, dtype=torch.uint8):
    """Leaves of 0 to 67 elements, each at another alignment, and one large one."""
    base = random_bits(300_000 + 100 * count, dtype, where)
    leaves = [base[i * 97 : i * 97 + i % 68] for i in range(count)]
    leaves[count // 2] = base[1:250_001]
    return leaves


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.complex128])
def test_ragged_leaves_of_any_alignment_are_gathered(where, dtype):
    leaves = ragged(300, where, dtype)
    with streamlap.configure(small_leaf_bytes="1MiB"):
        transfer = to_cpu(leaves)
        assert same_tree(transfer.result(), [leaf.cpu() for leaf in leaves])
    assert "gather" in transfer.stats()["paths"]
    assert transfer.nbytes == sum(leaf.nbytes for leaf in leaves)


def test_one_byte_to_one_mib(where):
    base = random_bits((2 << 20) + 32, torch.uint8, where)
    sizes = [1 << power for power in range(21)] + [(1 << power) + 1 for power in range(20)]
    leaves = [base[i : i + size] for i, size in enumerate(sizes)]
    outs = streamlap.empty_pinned(sum(sizes) + len(sizes), torch.uint8)
    poison(outs)
    views, at = [], 1
    for size in sizes:
        views.append(outs[at : at + size])
        at += size + 1
    transfer = to_cpu(leaves, out=views)
    assert same_tree(transfer.result(), [leaf.cpu() for leaf in leaves])
    assert transfer.stats()["paths"] == ["gather"]
    between = [views[0].storage_offset() - 1, *(v.storage_offset() + len(v) for v in views[:-1])]
    assert all(outs[position] == POISON for position in between)


def test_leaves_of_one_pinned_block_are_scattered(where):
    result = to_cpu(ragged(100, where)).result()
    # Of ordinary memory, and of several sizes: into as many places.
    result = [leaf for leaf in result if leaf.numel() < 68]
    outs = [poison(torch.empty(leaf.shape, dtype=leaf.dtype, device=where)) for leaf in result]
    transfer = to_device(result, where, out=outs)
    assert transfer.stats()["paths"] == ["scatter"]
    back = transfer.result()
    assert all(a is b for a, b in zip(back, outs, strict=True))
    assert same_tree([leaf.cpu() for leaf in back], result)


def test_few_or_large_leaves_go_their_own_way(where):
    own = "host" if where == "cpu" else "direct"
    few = [random_bits(10, where=where) for _ in range(7)]
    assert to_cpu(few).stats()["paths"] == [own]
    many = [*few, random_bits(10, where=where)]
    assert to_cpu(many).stats()["paths"] == ["gather"]
    with streamlap.configure(gather_leaves=0):
        assert to_cpu(many).stats()["paths"] == [own]
    with streamlap.configure(small_leaf_bytes=16):
        assert to_cpu(many).stats()["paths"] == [own]
    assert same_tree(to_cpu(many).result(), [leaf.cpu() for leaf in many])


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (3, 96), (64, 512)])
def test_any_grid_gives_the_same_bits(where, blocks, threads):
    leaves = ragged(50, where)
    floats = [random_bits(n, where=where) for n in (1, 100, 20_000)]
    grid = {"move_blocks": blocks, "cast_blocks": blocks, "scatter_blocks": blocks}
    with streamlap.configure(move_threads=threads, **grid):
        assert same_tree(to_cpu(leaves).result(), [leaf.cpu() for leaf in leaves])
        transfer = to_cpu(floats, dtype=torch.float16, nonfinite=True)
        for tensor, got in zip(floats, transfer.result(), strict=True):
            assert np.array_equal(bits_of(got), expected_bits(tensor.cpu(), torch.float16))
        assert transfer.nonfinite() == nonfinite_in(*floats)


def test_order_and_passengers_are_kept(where):
    tree = {"b": [random_bits(i, where=where) for i in range(20)], "a": ("text", None, 3)}
    result = to_cpu(tree).result()
    assert list(result) == ["b", "a"]
    assert result["a"] == ("text", None, 3)
    assert same_tree(result["b"], [leaf.cpu() for leaf in tree["b"]])
    scalars = [torch.tensor(float(i), device=where) for i in range(9)]
    assert [float(x) for x in to_cpu(scalars).result()] == list(range(9))
    assert all(x.shape == () for x in to_cpu(scalars).result())


def test_dense_layouts_are_kept(where):
    leaves = [random_bits((3, 5), where=where).t() for _ in range(10)]
    result = to_cpu(leaves)
    assert result.stats()["paths"] == ["gather"]
    for leaf, got in zip(leaves, result.result(), strict=True):
        assert got.stride() == leaf.stride()
        assert same_bits(got, leaf)


def test_items_and_chunks_of_a_gather(where):
    leaves = [random_bits(i + 1, where=where) for i in range(12)]
    transfer = to_cpu(leaves)
    assert same_bits(transfer[7], leaves[7])
    found = list(transfer.chunks())
    assert [leaf for leaf, _offset, _view in found] == list(range(12))
    assert all(offset == 0 for _leaf, offset, _view in found)
    assert all(same_bits(view, leaves[leaf]) for leaf, _offset, view in found)


@pytest.mark.parametrize("where", ["cpu"])  # on a device the addresses cannot meet
def test_sources_within_the_range_of_their_destinations(where):
    base = random_bits(40 * 16)
    pieces = base.split(16)
    leaves, outs = list(pieces[0::2]), list(pieces[1::2])
    wanted = [leaf.clone() for leaf in leaves]
    transfer = to_cpu(leaves, out=outs, nonfinite=True)
    assert transfer.nonfinite() == nonfinite_in(*wanted)
    assert same_tree(outs, wanted)


# -- counts


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_value_is_counted_rightly(where, dtype):
    values = values_of(dtype).to(where)
    transfer = to_cpu([values, torch.arange(3, device=where)], nonfinite=True)
    assert transfer.nonfinite() == nonfinite_in(values)
    assert same_bits(transfer.result()[0], values)
    assert transfer.nonfinite() == nonfinite_in(values)  # and again


def test_what_overflows_in_the_cast_is_not_counted(where):
    x = torch.tensor([1e30, -1e30, float("inf"), float("nan"), 1.0], device=where)
    transfer = to_cpu(x, dtype=torch.float16, nonfinite=True)
    assert transfer.nonfinite() == 2
    assert transfer.result().isinf().sum() == 3


def test_leaves_that_are_packed_are_counted_too(where):
    x = random_bits((40, 30), where=where)
    tree = [x.t(), x[:, ::2], x[:1].expand(5, 30), x[0, 0], torch.empty(0, device=where)]
    transfer = to_cpu(tree, nonfinite=True)
    assert transfer.nonfinite() == nonfinite_in(*tree)
    assert same_tree(transfer.result(), [leaf.cpu() for leaf in tree])


def test_a_count_that_was_not_asked_for(where):
    transfer = to_cpu(random_bits(5, where=where))
    with pytest.raises(streamlap.InvalidArgument, match="nonfinite=True"):
        transfer.nonfinite()
    counted = to_cpu([torch.arange(3, device=where), "text"], nonfinite=True)
    assert counted.nonfinite() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_that_cannot_be_counted_are_refused(where, dtype):
    with pytest.raises(streamlap.UnsupportedTensor, match=f"leaf 1 is {dtype}"):
        to_cpu([random_bits(3, where=where), random_bits(3, dtype, where)], nonfinite=True)


def test_counts_on_impossible_ways_are_refused(where):
    x = random_bits((4, 6), where=where)
    with pytest.raises(streamlap.InvalidArgument, match="gaps"):
        to_cpu(x, out=streamlap.empty_pinned((4, 12))[:, ::2], nonfinite=True)
    with pytest.raises(streamlap.InvalidArgument, match="float64"):
        to_cpu(x, dtype=torch.float64, nonfinite=True)
    with pytest.raises(streamlap.InvalidType, match="nonfinite"):
        to_cpu(x, nonfinite=1)
    if where != "cpu":
        with pytest.raises(streamlap.InvalidArgument, match="ordinary memory"):
            to_cpu(x, pin=False, nonfinite=True)


# -- checksums


def plain_checksum(array: np.ndarray) -> int:
    """The same in whole numbers of Python, word by word."""
    mask = (1 << 64) - 1

    def mixed(number):
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
        number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
        return number ^ number >> 31

    raw = array.tobytes()
    total = 0
    for place in range(0, len(raw), 8):
        word = int.from_bytes(raw[place : place + 8], "little")
        total += mixed(word ^ mixed(place + 0x9E3779B97F4A7C15 & mask))
    return mixed((total & mask) ^ mixed(len(raw)))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 1000, 40_001])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_a_checksum_is_the_same_everywhere(where, size, first):
    x = random_bits(size + first, torch.uint8, where)[first:]
    assert streamlap.checksum(x) == plain_checksum(x.cpu().numpy())
    assert streamlap.checksum(x.cpu()) == streamlap.checksum(x)


def test_a_checksum_depends_on_each_byte_and_its_place(where):
    x = random_bits(100, torch.uint8, where)
    seen = {streamlap.checksum(x)}
    for index in range(100):
        y = x.clone()
        y[index] ^= 1 << index % 8
        seen.add(streamlap.checksum(y))
    seen.add(streamlap.checksum(x.flip(0)))
    seen.add(streamlap.checksum(x.roll(8)))
    seen.add(streamlap.checksum(torch.cat([x, x.new_zeros(1)])))
    assert len(seen) == 104


def test_a_checksum_is_of_the_elements_in_order(where):
    x = random_bits((30, 40), where=where)
    assert streamlap.checksum(x.t()) == streamlap.checksum(x.t().contiguous())
    assert streamlap.checksum(x.t()) != streamlap.checksum(x)
    y = random_bits(9, torch.complex64, where).conj()
    assert streamlap.checksum(y) == streamlap.checksum(y.resolve_conj())
    with pytest.raises(streamlap.InvalidType, match="str"):
        streamlap.checksum("text")


# -- the policy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gather_leaves", -1),
        ("move_blocks", 0),
        ("cast_blocks", 1025),
        ("scatter_blocks", 0),
        ("strided_blocks", 2000),
        ("move_threads", 48),
        ("move_threads", 0),
        ("move_threads", 1024),
    ],
)
def test_numbers_that_no_kernel_has_are_refused(name, value):
    with pytest.raises(streamlap.InvalidArgument, match=name):
        streamlap.configure(**{name: value})


def test_the_policy_says_what_is_moved_together():
    policy = streamlap.Policy(gather_leaves=8, small_leaf_bytes=100)
    assert policy.moves_together(8, 800)
    assert not policy.moves_together(7, 7)
    assert not policy.moves_together(8, 801)
    assert not streamlap.Policy(gather_leaves=0).moves_together(100, 100)
    assert policy.blocks_of_move(True, False, False) == policy.move_blocks
    assert policy.blocks_of_move(True, True, False) == policy.cast_blocks
    assert policy.blocks_of_move(False, True, False) == policy.scatter_blocks
    assert policy.blocks_of_move(True, True, True) == policy.strided_blocks
