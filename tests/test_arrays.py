"""Which tensors can be copied, bit for bit, and which are refused by name with nothing lost."""

import collections
import warnings

import numpy as np
import pytest
import torch
from helpers.data import every_dtype, poison, random_bits, same_bits
from helpers.streams import engine_of

import streamlap
from streamlap import arrays, to_cpu, to_device

pytestmark = pytest.mark.usefixtures("nothing_left")

DTYPES = every_dtype()
TYPED = [dtype for dtype in DTYPES if "bits" not in str(dtype) and "int" not in str(dtype)]


def quiet():
    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.simplefilter("ignore")
    return caught


# -- dtypes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_bit_for_bit(where, dtype):
    x = random_bits((7, 6), dtype)
    x = x.to(where)
    for options in ({}, {"pin": False}, {"chunk_bytes": 5}):
        assert same_bits(to_cpu(x, **options).result(), x)
    out = poison_like(x, "cpu")
    assert same_bits(to_cpu(x, out=out).result(), x)
    on_host = x.cpu()
    assert same_bits(to_device(on_host, where).result(), x)
    assert same_bits(to_device(x, where).result(), x)
    pinned = streamlap.empty_pinned((7, 6), dtype)
    pinned.view(torch.uint8).copy_(on_host.view(torch.uint8))
    assert same_bits(to_device(pinned, where).result(), x)


def poison_like(x, where):
    out = torch.empty(x.shape, dtype=x.dtype, device=where)
    poison(out.view(torch.uint8))
    return out


def copies_strides(dtype, where):
    """Whether torch itself can copy a strided tensor of this dtype there."""
    try:
        torch.empty(4, 4, dtype=dtype, device=where)[:, ::2].contiguous()
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_out_of_a_strided_view(where, dtype):
    if not copies_strides(dtype, where):
        x = random_bits((8, 6), dtype).to(where)
        if where != "cpu":  # a kernel of ours moves elements of any kind
            result = to_cpu(x[:, ::2]).result().view(torch.uint8)
            assert torch.equal(result, x.cpu().view(torch.uint8)[:, ::2])
            return
        # torch has no kernel for it: refused, by name, with nothing enqueued or lost.
        with pytest.raises((streamlap.StreamlapError, RuntimeError, NotImplementedError)):
            to_cpu(x[:, ::2]).result()
        return
    x = random_bits((8, 6), dtype).to(where)
    view = x[::3, ::2]
    assert same_bits(to_cpu(view).result(), view.contiguous())
    assert same_bits(to_device(view.cpu(), where).result(), view.contiguous())


def test_nan_payloads_and_negative_zero_stay(where):
    bits = torch.tensor([0x7FC01234, -0x003FFFFF, 0x7F800001, -0x80000000], dtype=torch.int32)
    x = bits.view(torch.float32).to(where)
    assert torch.equal(to_cpu(x).result().view(torch.int32), bits)
    assert torch.equal(to_device(x.cpu(), where).result().cpu().view(torch.int32), bits)
    wide = torch.zeros(4, 2)
    wide[:, 0] = bits.view(torch.float32)
    assert torch.equal(to_cpu(wide.to(where)[:, 0]).result().view(torch.int32), bits)


# -- layouts


VIEWS = {
    "offset": lambda x: x.view(-1)[7:],
    "slice": lambda x: x[3:9],
    "columns": lambda x: x[:, 2:5],
    "steps": lambda x: x[::2, ::3],
    "transposed": lambda x: x.t(),
    "transposed_slice": lambda x: x.t()[1:4],
    "expanded": lambda x: x[:, :1].expand(24, 30),
    "expanded_scalar": lambda x: x[0, 0].expand(5, 6),
    "diagonal": lambda x: x.diagonal(),
    "unfolded": lambda x: x.unfold(0, 4, 1),
    "four": lambda x: x.view(2, 3, 4, 30),
    "permuted": lambda x: x.view(2, 3, 4, 30).permute(2, 0, 3, 1),
    "channels_last": lambda x: x.view(2, 3, 4, 30).contiguous(memory_format=torch.channels_last),
    "ones": lambda x: x.view(24, 1, 30, 1).transpose(1, 3),
    "empty_slice": lambda x: x[5:5],
    "one_element": lambda x: x[3, 4],
    "conj": lambda x: torch.complex(x, x + 1).conj(),
    "conj_strided": lambda x: torch.complex(x, x + 1).conj()[:, ::2],
    "neg": lambda x: torch.complex(x, x + 1).conj().imag,
    "conj_of_neg": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_come_as_their_values(where, name):
    base = torch.randn(24, 30, device=where)
    view = VIEWS[name](base)
    expected = view.cpu().resolve_conj().resolve_neg().contiguous()
    for options in ({}, {"pin": False}):
        result = to_cpu(view, **options).result()
        assert not result.is_conj()
        assert not result.is_neg()
        assert same_bits(result, expected)
    out = torch.empty(view.shape, dtype=view.dtype)
    assert same_bits(to_cpu(view, out=out).result(), expected)
    strided = torch.empty((*view.shape, 2), dtype=view.dtype)[..., 0]
    assert same_bits(to_cpu(view, out=strided).result(), expected)
    on_host = VIEWS[name](base.cpu())
    for source in (view, on_host):
        assert same_bits(to_device(source, where).result(), expected)
        target = torch.empty(view.shape, dtype=view.dtype, device=where)
        assert same_bits(to_device(source, where, out=target).result(), expected)


@pytest.mark.parametrize("name", ["transposed", "permuted", "channels_last"])
def test_dense_strides_are_kept(where, name):
    if name == "permuted":
        view = torch.randn(2, 3, 4, 5, device=where).permute(2, 0, 3, 1)
    else:
        view = VIEWS[name](torch.randn(24, 30, device=where))
    assert to_cpu(view).result().stride() == view.stride()
    assert to_cpu(view, pin=False).result().stride() == view.stride()
    assert to_device(view.cpu(), where).result().stride() == view.stride()


def test_gaps_of_a_strided_destination_stay_untouched(where):
    out = torch.full((6, 20), 9.0)
    x = torch.randn(6, 10, device=where)
    to_cpu(x, out=out[:, ::2]).result()
    assert same_bits(out[:, ::2].contiguous(), x)
    assert bool((out[:, 1::2] == 9).all())


def test_grad_parameters_and_history_are_left_behind(where):
    leaf = torch.randn(4, 4, device=where, requires_grad=True)
    parameter = torch.nn.Parameter(torch.randn(4, 4, device=where))
    made = leaf * 2
    for x in (leaf, parameter, made):
        result = to_cpu(x).result()
        assert type(result) is torch.Tensor
        assert not result.requires_grad
        assert same_bits(result, x)
        back = to_device(x, where).result()
        assert not back.requires_grad
        assert same_bits(back, x)
    made.sum().backward()
    assert same_bits(leaf.grad, torch.full((4, 4), 2.0))


def test_inference_tensors_both_ways(where):
    with torch.inference_mode():
        x = torch.randn(6, 6, device=where)
        out = torch.empty(6, 6)
        strided = torch.empty(6, 12)[:, ::2]
    for inside in (False, True):
        with torch.inference_mode(inside):
            assert same_bits(to_cpu(x).result(), x)
            assert same_bits(to_cpu(x[:, ::2]).result(), x[:, ::2].contiguous())
            assert same_bits(to_cpu(x, out=out).result(), x)
            assert same_bits(to_cpu(x, out=strided).result(), x)
            assert same_bits(to_device(x.cpu(), where).result(), x)


def test_results_can_be_trained_on(where):
    """A result made inside inference mode or not is an ordinary tensor outside of it."""
    result = to_cpu(torch.randn(3, 3, device=where)).result()
    result.requires_grad_()
    (result * 2).sum().backward()
    assert result.grad is not None


# -- other libraries' arrays


@pytest.mark.parametrize(
    "dtype", ["bool", "u1", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
)
def test_numpy_arrays_come_back_as_numpy(where, dtype):
    x = np.frombuffer(np.random.default_rng(5).bytes(16 * 16 * 12), dtype=np.uint8)
    x = (x % 2).astype(bool) if dtype == "bool" else x.view(dtype)
    x = np.ascontiguousarray(x.reshape(12, -1)).copy()
    assert same_bits(to_cpu(x.copy()).result(), x)
    assert isinstance(to_cpu(x.copy()).result(), np.ndarray)
    moved = to_device(x.copy(), where).result()
    assert isinstance(moved, torch.Tensor)
    assert same_bits(moved, torch.from_numpy(x.copy()))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::-1],
        lambda x: x[:, ::-2],
        lambda x: x.T,
        lambda x: x.astype(">f4"),
        lambda x: np.broadcast_to(x[:, :1], (12, 20)),
        lambda x: np.asfortranarray(x),
        lambda x: np.lib.stride_tricks.as_strided(x, (5, 5), (4, 4)),
        lambda x: x[3, 4, None].reshape(()),
        lambda x: x[:0],
    ],
)
def test_numpy_layouts(where, view):
    x = view(np.arange(240, dtype=np.float32).reshape(12, 20))
    expected = np.ascontiguousarray(x).astype("=f4")
    result = to_cpu(x).result()
    assert result.shape == x.shape
    assert np.array_equal(result, expected.reshape(x.shape))
    assert same_bits(to_device(x, where).result(), torch.from_numpy(expected.reshape(x.shape)))


def test_a_read_only_numpy_array_is_read(where):
    x = np.arange(10.0)
    x.flags.writeable = False
    assert np.array_equal(to_cpu(x).result(), x)
    assert same_bits(to_device(x, where).result(), torch.arange(10.0, dtype=torch.float64))
    assert not x.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text", None], dtype=object),
        np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]),
        np.array(["a", "b"]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.zeros(3, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_numpy_arrays_that_no_tensor_can_hold(where, array):
    before = streamlap.pool_stats(where)
    with pytest.raises(streamlap.UnsupportedTensor) as caught:
        to_cpu([torch.ones(3, device=where), array])
    assert str(array.dtype) in str(caught.value)
    assert streamlap.pool_stats(where) == before


def test_dlpack_objects_are_sources(where):
    class Exporter:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **options):
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    x = random_bits((5, 5), where=where)
    result = to_cpu(Exporter(x)).result()
    assert isinstance(result, torch.Tensor)
    assert same_bits(result, x)


@pytest.mark.gpu
def test_cupy_arrays_come_back_as_numpy():
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(100, dtype=cupy.float32).reshape(10, 10)
    result = to_cpu(x).result()
    assert isinstance(result, np.ndarray)
    assert np.array_equal(result, cupy.asnumpy(x))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y = x * 3
        result = to_cpu(y).result()
    assert np.array_equal(result, cupy.asnumpy(x) * 3)
    out = np.empty((10, 10), np.float32)
    assert to_cpu(x, out=out).result() is out


# -- refusals


def _freed(where):
    x = torch.ones(4, 4, device=where)
    x.untyped_storage().resize_(0)
    return x


def _inside(transform):
    """Makes what a function sees that ``transform`` was applied to."""

    def make(where):
        seen = []
        transform(lambda x: seen.append(x) or x)(torch.ones(4, 4, device=where))
        return seen[0]

    return make


def _subclass(where):
    class Special(torch.Tensor):
        pass

    return torch.ones(3, device=where).as_subclass(Special)


def _csr(where):
    return torch.eye(3, device=where).to_sparse_csr()


REFUSED = {
    "sparse_coo": (lambda where: torch.eye(3, device=where).to_sparse(), "sparse"),
    "sparse_csr": (_csr, "sparse"),
    "quantized": (
        lambda where: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "quantized",
    ),
    "meta": (lambda where: torch.empty(3, device="meta"), "meta"),
    "nested": (lambda where: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "nested_jagged": (
        lambda where: torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(3)], layout=torch.jagged
        ),
        "(?i)nested",
    ),
    "subclass": (_subclass, "Special"),
    "freed": (_freed, "freed"),
    "vmap": (_inside(torch.func.vmap), "torch.func"),
    "grad": (_inside(lambda f: torch.func.grad(lambda x: f(x).sum())), "torch.func"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("call", ["to_cpu", "to_device", "copy_to_cpu", "tree"])
def test_tensors_that_are_no_range_of_bytes(where, name, call):
    make, match = REFUSED[name]
    warned = quiet()
    x = make(where)
    warned.__exit__(None, None, None)
    good = torch.ones(3, device=where)
    calls = {
        "to_cpu": lambda: to_cpu(x),
        "to_device": lambda: to_device(x, where),
        "copy_to_cpu": lambda: streamlap.copy_to_cpu(x),
        "tree": lambda: to_cpu([good, {"bad": x}]),
    }
    before = streamlap.pool_stats(where)
    with pytest.raises(streamlap.UnsupportedTensor, match=match) as caught:
        calls[call]()
    assert isinstance(caught.value, TypeError)
    assert streamlap.pool_stats(where) == before
    assert engine_of(where).abandoned() == 0


def _read_only():
    out = np.zeros((4, 6), np.float32)
    out.flags.writeable = False
    return out


BAD_OUTS = {
    "shape": (lambda: torch.empty(4, 5), ValueError, r"\(4, 5\).*\(4, 6\)"),
    "dims": (lambda: torch.empty(24), ValueError, r"\(24,\)"),
    "dtype": (lambda: torch.empty(4, 6).double(), ValueError, "float64.*float32"),
    "expanded": (lambda: torch.empty(4, 1).expand(4, 6), ValueError, "expanded"),
    "overlapping_itself": (
        lambda: torch.empty(30).as_strided((4, 6), (5, 1)),
        ValueError,
        "overlaps itself",
    ),
    "read_only": (_read_only, ValueError, "read-only"),
    "negative_strides": (lambda: np.zeros((4, 6), np.float32)[::-1], ValueError, "negative"),
    "big_endian": (lambda: np.zeros((4, 6), ">f4"), TypeError, "f4"),
    "meta": (lambda: torch.empty(4, 6, device="meta"), TypeError, "meta"),
    "sparse": (lambda: torch.ones(4, 6).to_sparse(), TypeError, "sparse"),
    "conj": (lambda: torch.empty(4, 6, dtype=torch.complex64).conj(), ValueError, "conj"),
    "grad": (lambda: torch.empty(4, 6, requires_grad=True), ValueError, "grad"),
    "a list": (lambda: [torch.empty(4, 6)], ValueError, "tree"),
    "a number": (lambda: 7, TypeError, "int"),
    "text": (lambda: "out", TypeError, "str"),
}


@pytest.mark.parametrize("name", BAD_OUTS)
def test_destinations_that_do_not_fit(where, name):
    make, kind, match = BAD_OUTS[name]
    x = torch.randn(4, 6, device=where)
    out = make()
    before = streamlap.pool_stats(where)
    with pytest.raises(kind, match=match) as caught:
        to_cpu(x, out=out)
    assert isinstance(caught.value, streamlap.StreamlapError)
    assert streamlap.pool_stats(where) == before
    with pytest.raises(kind, match=match) as caught:
        to_device(x, "cpu", out=out)
    assert isinstance(caught.value, streamlap.StreamlapError)


def test_a_destination_in_a_tree_is_named(where):
    x = torch.randn(4, 6, device=where)
    with pytest.raises(ValueError, match=r"out\[1\]"):
        to_cpu([x, x], out=[torch.empty(4, 6), torch.empty(5, 6)])


def test_nothing_of_a_tree_is_copied_when_one_destination_is_wrong(where):
    x = torch.randn(4, 6, device=where)
    good = poison(torch.empty(4, 6))
    with pytest.raises(ValueError, match="shape"):
        to_cpu([x, x], out=[good, torch.empty(5, 6)])
    streamlap.synchronize()
    assert same_bits(good, poison(torch.empty(4, 6)))


def test_destinations_that_overlap_each_other(where):
    x = torch.randn(4, 6, device=where)
    memory = torch.empty(8, 6)
    with pytest.raises(ValueError, match=r"out\[0\] and out\[1\] overlap"):
        to_cpu([x, x], out=[memory[:4], memory[3:7]])
    with pytest.raises(ValueError, match=r"overlap"):
        to_cpu([x, x], out=[memory[:4], memory[:4]])
    with pytest.raises(ValueError, match="overlap"):
        to_cpu(
            {"a": x, "b": x, "c": x},
            out={"a": memory[:4], "b": torch.empty(4, 6), "c": memory[1:5]},
        )
    result = to_cpu([x, x + 1], out=[memory[:4], memory[4:]]).result()
    assert same_bits(torch.cat(result), torch.cat([x, x + 1]))
    woven = torch.empty(4, 12)
    result = to_cpu([x, x + 1], out=[woven[:, ::2], woven[:, 1::2]]).result()
    assert same_bits(result[1], x + 1)


def test_a_destination_that_overlaps_its_source():
    memory = torch.randn(8, 6)
    for out in (memory[:4], memory[2:6], memory.view(-1)[5:29].view(4, 6)):
        with pytest.raises(ValueError, match="overlaps a source"):
            to_cpu(memory[:4], out=out)
    assert same_bits(to_cpu(memory[:4], out=memory[4:]).result(), memory[:4])


@pytest.mark.gpu
def test_a_device_destination_that_overlaps_its_source():
    memory = torch.randn(8, 6, device="cuda:0")
    with pytest.raises(ValueError, match="overlaps a source"):
        to_device(memory[:4], "cuda:0", out=memory[2:6])


@pytest.mark.gpu
def test_destinations_on_the_wrong_device():
    x = torch.randn(4, 6, device="cuda:0")
    with pytest.raises(ValueError, match="cuda:0, not on cpu"):
        to_cpu(x, out=torch.empty(4, 6, device="cuda:0"))
    with pytest.raises(ValueError, match="cpu, not on cuda"):
        to_device(x, "cuda:0", out=torch.empty(4, 6))


def test_a_device_that_nobody_knows_is_named(where):
    del where
    with pytest.raises(streamlap.StreamlapError, match="meta"):
        to_device(torch.ones(3), "meta")


# -- the arithmetic


@pytest.mark.parametrize(
    ("shape", "stride", "dense", "overlaps"),
    [
        ((3, 4), (4, 1), True, False),
        ((3, 4), (1, 3), True, False),
        ((3, 4), (8, 2), False, False),
        ((3, 4), (0, 1), False, True),
        ((3, 4), (3, 1), False, True),
        ((3, 4), (1, 1), False, True),
        ((1, 4), (0, 1), True, False),
        ((), (), True, False),
        ((0, 4), (0, 0), True, False),
        ((2, 2, 2), (2, 4, 1), True, False),
        ((2, 2), (1, 100), False, False),
    ],
)
def test_dense_and_overlapping(shape, stride, dense, overlaps, where):
    tensor = torch.empty(400, device=where).as_strided(shape, stride)
    assert arrays.is_dense(tensor) == dense
    assert arrays.may_overlap_itself(tensor) == overlaps


def test_overlapping_pairs():
    base = torch.empty(100)
    assert arrays.overlapping([base[:50], base[50:]]) is None
    assert arrays.overlapping([base[:51], torch.empty(5), base[50:]]) == (0, 2)
    assert arrays.overlapping([base[::2], base[1::2]]) is None
    assert arrays.overlapping([base[::2], base[::3]]) == (0, 1)
    assert arrays.overlapping([base[:0], base]) is None
    assert arrays.overlapping([]) is None


class Row(list):
    """A list by another name: a leaf, as pytree has it."""


def test_a_row_of_tensors_is_a_tree_as_any_other():
    x, p = torch.zeros(3), torch.nn.Parameter(torch.zeros(2))
    pair = collections.namedtuple("pair", "a b")
    for tree in ([], (), [x], (x, p), [x, 1], [[x], (p,)], {"a": [x, x]}, pair(x, p), Row([x]), x):
        leaves, spec = arrays.flatten(tree)
        expected, as_pytree = torch.utils._pytree.tree_flatten(tree)
        assert len(leaves) == len(expected)
        assert all(a is b for a, b in zip(leaves, expected, strict=True))
        assert spec == as_pytree
        again = arrays.unflatten(leaves, spec)
        assert type(again) is type(tree)
        if not isinstance(tree, torch.Tensor):
            assert again == tree
        assert type(arrays.unflatten(leaves, as_pytree)) is type(tree)
