"""Row panels at the ends: what is cut, when, and that no bit changes. Here on worker threads."""

import gc

import pytest
import torch
from helpers.data import random_numbers, same_bits, same_tree
from helpers.streams import eventually, finish_all

import streamlap
from streamlap import panels, product, watch
from streamlap.devices import host_place
from streamlap.panels import Ends, Panelled, as_panels, check_divides, panel_rows, wanted
from streamlap.pinned import pool_for

pytestmark = pytest.mark.usefixtures("nothing_left")

LARGE = panels.LEAST_BYTES


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(panels, "_known", {})


@pytest.fixture
def stream(monkeypatch):
    """A host stream that stands for torch's current one."""
    watch.enter()
    monkeypatch.setattr(panels, "ALIGNMENT", 64)  # of torch's memory on a CPU
    stream = host_place(0).runtime.stream(0, "compute")
    monkeypatch.setattr(product, "current_handle", lambda index: stream.handle)
    return stream


@pytest.fixture
def run(monkeypatch, stream):
    real = product._make_room

    def make_room(native, stream):
        native.sync()  # the host's allocator gives memory out at once, not in a stream's order
        real(native, stream)

    monkeypatch.setattr(product, "_make_room", make_room)
    place = host_place(0)
    return lambda x, n, cut=None: product._run(x, n, 3, place, pool_for(place), cut)


@pytest.fixture
def cuts(monkeypatch):
    """Which item each call has cut: -1 for none."""
    seen = []

    class Seen(Ends):
        def __init__(self, *args):
            super().__init__(*args)
            seen.append(self.cut)

    monkeypatch.setattr(product, "Ends", Seen)
    return seen


# -- what is asked for


def test_the_argument():
    assert as_panels(None) is None
    assert as_panels("auto") == 0
    assert as_panels(1) == 1
    assert as_panels(8) == 8
    for value, error in (
        (0, streamlap.InvalidArgument),
        (-4, streamlap.InvalidArgument),
        ("4", streamlap.InvalidType),
        (2.0, streamlap.InvalidType),
        (True, streamlap.InvalidType),
    ):
        with pytest.raises(error):
            as_panels(value)


def test_a_number_must_divide_the_rows():
    check_divides(None, 7)
    check_divides(7, 7)
    check_divides(1, 0)
    for count, rows in ((2, 7), (8, 4), (4, 0)):
        with pytest.raises(streamlap.InvalidArgument, match="does not divide"):
            check_divides(count, rows)


@pytest.mark.parametrize(
    ("given", "rows", "nbytes", "expected"),
    [
        (0, 4000, LARGE, 4),
        (0, 4000, LARGE - 1, 1),
        (0, 4001, LARGE, 1),
        (0, 4002, LARGE, 1),
        (1, 4000, LARGE, 1),
        (5, 4000, 1, 5),
    ],
)
def test_how_many(given, rows, nbytes, expected):
    assert wanted(given, rows, nbytes) == expected


def test_rows_are_cut_in_equal_parts():
    x = torch.arange(12)
    assert torch.equal(torch.cat([x[rows] for rows in panel_rows(12, 3)]), x)
    assert len(panel_rows(12, 3)) == 3


def test_the_key_changes_with_what_a_kernel_is_chosen_by():
    x = torch.zeros(8, 8)
    assert panels.key_of(x, 4) == panels.key_of(x.clone(), 4)
    keys = [panels.key_of(x, 4), panels.key_of(x, 2), panels.key_of(x.double(), 4)]
    keys.append(panels.key_of(torch.zeros(16, 16), 4))
    matmul = torch.backends.cuda.matmul
    for name in ("allow_tf32", "allow_fp16_reduced_precision_reduction"):
        before = getattr(matmul, name)
        try:
            setattr(matmul, name, not before)
            keys.append(panels.key_of(x, 4))
        finally:
            setattr(matmul, name, before)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(not before)
        keys.append(panels.key_of(x, 4))
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(set(keys)) == len(keys)


# -- the comparison


def answer_of(x, count, stream):
    answer, event = panels.enqueue_comparison(x, count, stream)
    event.synchronize()
    return bool(answer)


def test_the_comparison_sees_one_bit(stream, monkeypatch):
    x = random_numbers((16, 16))
    monkeypatch.setattr(panels, "cut_product", lambda x, count: x.mm(x))
    assert not answer_of(x, 4, stream)

    def one_bit_off(x, count):
        value = x.mm(x)
        value.view(torch.int32)[7, 3] ^= 1
        return value

    monkeypatch.setattr(panels, "cut_product", one_bit_off)
    assert answer_of(x, 4, stream)
    # An x whose sums are exact in any order would show nothing: it is not what is computed with.
    assert answer_of(torch.zeros(16, 16), 4, stream)


def test_the_comparison_tells_zeros_apart_and_takes_equal_nans(stream, monkeypatch):
    x = torch.ones(4, 4)
    monkeypatch.setattr(panels, "cut_product", lambda x, count: x.mm(x) * torch.nan)
    monkeypatch.setattr(torch.Tensor, "mm", lambda self, other: torch.full((4, 4), torch.nan))
    assert not answer_of(x, 4, stream)
    monkeypatch.setattr(panels, "cut_product", lambda x, count: torch.zeros(4, 4))
    monkeypatch.setattr(torch.Tensor, "mm", lambda self, other: -torch.zeros(4, 4))
    assert answer_of(x, 4, stream)


def test_the_comparison_leaves_the_users_random_numbers_alone(stream):
    before = torch.get_rng_state()
    answer_of(random_numbers((16, 16)), 4, stream)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", product.MULTIPLIED)
def test_bits_of_every_dtype(dtype):
    if dtype is torch.complex32:
        x = torch.zeros(2, 3, dtype=torch.int32).view(dtype)
    else:
        x = torch.zeros(2, 3, dtype=dtype)
    assert not panels._bits(x).any()
    assert panels._bits(x).is_contiguous()


# -- the pipeline


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_a_number_cuts_the_last_item_from_the_second_call_on(run, cuts, n, stream):
    for _ in range(3):
        stream.synchronize()  # the comparison's answer is there
        x = random_numbers((32, 32))
        expected = panels.cut_product(x, 4)
        results = run(x, n, 4)
        assert same_tree(results[:-1], [x.mm(x)] * (n - 1))
        assert same_bits(results[-1], expected if cuts[-1] == n - 1 else x.mm(x))
        assert len({result.data_ptr() for result in results}) == n
    assert cuts[0] == -1
    known = next(iter(panels._known.values()))
    assert cuts[1:] == [n - 1 if known.same_bits() else -1] * 2


def same_and(monkeypatch, copies_last):
    """Let every key be known to have the same bits, and to be bound by copies or not."""

    class Known(panels._Known):
        def __init__(self):
            super().__init__()
            self._same = True
            self.copies_last = copies_last

    monkeypatch.setattr(panels, "_Known", Known)
    monkeypatch.setattr(panels, "LEAST_BYTES", 0)


@pytest.mark.parametrize(("copies_last", "cut"), [(True, -1), (False, 8), (None, -1)])
def test_the_end_that_nothing_hides_is_cut(run, cuts, monkeypatch, copies_last, cut):
    same_and(monkeypatch, copies_last)
    x = random_numbers((32, 32))
    results = run(x, 9)
    assert cuts == [cut]
    for index, result in enumerate(results):
        assert same_bits(result, panels.cut_product(x, 4) if index == cut else x.mm(x))


@pytest.mark.parametrize("copies_last", [True, False])
def test_memory_is_made_ahead_whether_or_not_one_is_cut(run, monkeypatch, copies_last):
    same_and(monkeypatch, copies_last)
    said = []

    class Growth:
        def cancel(self):
            said.append("cancelled")

    def grow_ahead(pool, nbytes, count):
        said.append((nbytes, count))
        return Growth()

    monkeypatch.setattr(streamlap.PinnedPool, "_grow_ahead", grow_ahead)
    x = random_numbers((32, 32))
    run(x, 9)
    assert said == [(x.nbytes, 9), "cancelled"]


def test_other_bits_are_found_and_never_cut(run, cuts, monkeypatch):
    real = panels.cut_product
    monkeypatch.setattr(panels, "cut_product", lambda x, count: real(x, count) + 1)
    for _ in range(3):
        x = random_numbers((32, 32))
        assert same_tree(run(x, 4, 4), [x.mm(x)] * 4)
    assert cuts == [-1, -1, -1]


def test_no_memory_for_the_comparison_means_whole_products(run, cuts, monkeypatch):
    calls = []

    def none(*args):
        calls.append(1)
        raise torch.OutOfMemoryError("deliberate")

    monkeypatch.setattr(panels, "enqueue_comparison", none)
    x = random_numbers((32, 32))
    for _ in range(3):
        assert same_tree(run(x, 4, 4), [x.mm(x)] * 4)
    assert cuts == [-1, -1, -1]
    assert calls == [1]


def test_small_odd_and_strided_stay_whole(run, cuts, monkeypatch):
    same_and(monkeypatch, False)
    odd = random_numbers((33, 33))
    strided = random_numbers((32, 32)).t()
    shifted = torch.empty(32 * 32 + 1)[1:].view(32, 32).copy_(random_numbers((32, 32)))
    for x in (odd, strided, shifted):
        assert same_tree(run(x, 3), [x.mm(x)] * 3)
    x = random_numbers((32, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(x, 3)
    run(x, 3, 1)
    monkeypatch.setattr(panels, "LEAST_BYTES", x.nbytes + 1)
    run(x, 3)
    assert cuts == [-1] * 6


def test_who_is_last_is_learned_from_the_copy_before_the_last(stream):
    x = torch.zeros(32, 32)
    for held, expected in ((True, False), (False, True)):
        ends = Ends(x, 5, 4)
        gate = stream.gate()
        if not held:
            gate.open()
            stream.synchronize()
        ends.issued(stream)
        if not held:
            stream.synchronize()
        for index in range(5):
            ends.copied(index)
            if index == 3:
                gate.open()  # the product ends, before the last copy does
        assert ends._known.copies_last is expected
        stream.synchronize()


def test_an_error_in_a_panel_gives_all_back(run, monkeypatch, stream):
    same_and(monkeypatch, False)
    x = random_numbers((32, 32))
    before = streamlap.pool_stats("cpu")["live"]
    calls = []
    real = torch.mm

    def mm(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("deliberate")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", mm)
    with pytest.raises(ArithmeticError) as caught:
        run(x, 4)
    assert caught.value.streamlap_index == 3
    assert eventually(lambda: gc.collect() >= 0 and streamlap.pool_stats("cpu")["live"] <= before)


def test_the_parts_act_as_one():
    done = []

    class Part:
        def __init__(self, name):
            self.name = name

        def sync(self, timeout=None, reads=True):
            done.append(("sync", self.name))
            return True

        def wait_on_stream(self, stream):
            done.append(("wait", self.name))

        def release_source(self):
            done.append(("release", self.name))

    both = Panelled([Part("a"), Part("b")])
    assert both.sync()
    both.wait_on_stream(None)
    both.release_source()
    assert done == [("sync", "a"), ("sync", "b"), ("wait", "b"), ("release", "a"), ("release", "b")]


def test_panels_are_accepted_everywhere():
    x = random_numbers((8, 8))
    for value in (None, "auto", 1, 2, 8):
        assert same_tree(streamlap.pipelined_run(x, n=3, panels=value), [x.mm(x)] * 3)


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda:0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [256, 1000, 2048, 4000])
@pytest.mark.parametrize("count", [None, 2, 4, 8])
def test_no_bit_changes(where, dtype, size, count, cuts):
    streamlap.copy_to_cpu(
        torch.zeros(1, device=where)
    )  # the first call of a process goes elsewhere
    for _ in range(3):
        x = random_numbers((size, size), dtype, where)
        expected = x.mm(x).cpu()
        with streamlap.configure(tiny_item_bytes=0):
            results = streamlap.pipelined_run(x, n=6, panels=count)
        assert same_tree(results, [expected] * 6)
        finish_all(where)  # the comparison, too
    assert len(cuts) == 3
    assert cuts[0] == -1


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda:0"])
def test_other_flags_are_compared_again(where, cuts):
    streamlap.copy_to_cpu(torch.zeros(1, device=where))
    x = random_numbers((2048, 2048), where=where)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for allowed in (False, True, False, True):
            matmul.allow_tf32 = allowed
            results = streamlap.pipelined_run(x, n=4)
            assert same_tree(results, [x.mm(x).cpu()] * 4)
            finish_all(where)
    finally:
        matmul.allow_tf32 = before
    assert cuts[:2] == [-1, -1]
    assert len(panels._known) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda:0"])
def test_a_call_does_not_wait_for_the_comparison(where, cuts):
    """With the comparison held, the next calls stay whole."""
    streamlap.copy_to_cpu(torch.zeros(1, device=where))
    x = random_numbers((2048, 2048), where=where)

    class NotDone:
        def done(self):
            return False

    real = panels.enqueue_comparison
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "enqueue_comparison", lambda *args: (real(*args)[0], NotDone()))
        for _ in range(3):
            streamlap.pipelined_run(x, n=4)
    assert cuts == [-1, -1, -1]


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cuda:0"])
def test_the_checker_finds_nothing_in_panels(where, monkeypatch, cuts):
    same_and(monkeypatch, True)
    with streamlap.checking():
        streamlap.copy_to_cpu(torch.zeros(1, device=where))
        x = random_numbers((512, 512), where=where)
        with streamlap.configure(tiny_item_bytes=0):
            for _ in range(3):
                streamlap.pipelined_run(x, n=8, panels=4)
    assert cuts == [7, 7, 7]
