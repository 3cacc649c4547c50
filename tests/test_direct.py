"""The short way of to_cpu. It needs a GPU to be taken; here it runs on worker threads."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.data import random_bits, random_numbers, same_bits
from helpers.streams import CopySide, eventually, finish_all, is_held, runtime_of, stays_false

import streamlap
from streamlap import _native, direct, watch
from streamlap.devices import host_place
from streamlap.pinned import PinnedPool, pool_for
from streamlap.training.memory import MemoryRef

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def start():
    """``start(tensor)``: after a host stream that stands for torch's current one."""
    watch.enter()
    place = host_place(0)
    stream = host_place(0).runtime.stream(0, "compute")

    def call(tensor, chunk_bytes=None, pool=None):
        short = _native.ShortWay()
        short.add(0, place.engine, (pool or pool_for(place))._pool(), place)
        made = short.start_after(tensor, True, chunk_bytes, stream.handle)
        return None if made is None else direct.TensorTransfer(made)

    call.stream = stream
    return call


@pytest.mark.parametrize("shape", [(), (1,), (7, 5), (3, 1, 4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex128, torch.float8_e5m2])
def test_bits_shape_and_dtype(start, shape, dtype):
    source = random_bits(shape, dtype)
    transfer = start(source)
    result = transfer.result()
    assert same_bits(result, source)
    assert (result.shape, result.dtype) == (source.shape, source.dtype)
    assert result.data_ptr() != source.data_ptr()
    assert transfer.nbytes == source.nbytes


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(3, 0, 2, 1),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x[:, :1].contiguous(memory_format=torch.channels_last),
        lambda x: x[1:].permute(2, 3, 1, 0),
    ],
)
def test_a_dense_tensor_comes_with_its_strides(start, view):
    source = view(random_bits((3, 4, 5, 6)))
    result = start(source).result()
    assert same_bits(result, source)
    assert result.stride() == source.stride() == streamlap.to_cpu(source).result().stride()


def test_it_starts_after_its_producer_and_keeps_both_ends(start):
    source = random_bits((300, 5))
    expected = source.clone()
    start(source).result()
    gate = start.stream.gate()
    transfer = start(source)
    assert is_held(transfer)
    del source
    gc.collect()
    gate.open()
    assert same_bits(transfer.result(), expected)


def test_a_dropped_transfer_gives_its_block_back_when_it_is_done(start):
    pool = PinnedPool(1 << 20)
    start(random_bits(10), pool=pool).result()
    assert eventually(lambda: pool.stats()["live"] == 0)
    gate = start.stream.gate()
    transfer = start(random_bits(10), pool=pool)
    del transfer
    gc.collect()
    assert pool.stats()["live_blocks"] == 1  # the copy has yet to write it
    gate.open()
    assert eventually(lambda: pool.stats()["live"] == 0)


@pytest.mark.parametrize("how", ["policy", "call", "both"])
def test_pieces_are_cut_as_asked(start, how):
    source = random_bits(1000)
    with streamlap.configure(chunk_bytes=100 if how == "both" else 400):
        transfer = start(source, chunk_bytes=None if how == "policy" else 400)
    pieces = list(transfer.chunks())
    assert len(pieces) == 10
    assert same_bits(torch.cat([piece for _leaf, _offset, piece in pieces]), source)


def test_who_asks_whether_it_is_done_makes_nothing(start):
    source = random_bits(1000)
    gate = start.stream.gate()
    transfer = start(source)
    assert stays_false(transfer.done)
    assert transfer._made  # and no parts
    expected, memory = source.clone(), MemoryRef(source.untyped_storage())
    del source
    gc.collect()
    assert memory.alive()
    gate.open()
    assert eventually(transfer.done)
    assert transfer._made
    assert not memory.alive()
    assert 0 <= transfer.elapsed() < 10
    assert transfer._made
    assert same_bits(transfer.result(), expected)
    assert transfer.done()
    assert 0 <= transfer.elapsed() < 10
    held = start.stream.gate()
    transfer = start(expected)
    with pytest.raises(streamlap.InvalidArgument, match="not done"):
        transfer.elapsed()
    held.open()


@pytest.mark.parametrize("who", ["thread", "finalizer"])
def test_what_is_done_is_no_longer_borrowed_whoever_makes_the_parts_meanwhile(
    start, monkeypatch, who
):
    source = random_bits(1000)
    expected = source.clone()
    transfer = start(source)
    assert eventually(transfer._made[0].done)
    if who == "thread":  # makes them while done() looks
        real = direct.version_of

        def version_of(tensor):
            thread = threading.Thread(target=lambda: transfer.nbytes)
            thread.start()
            thread.join()
            return real(tensor)

        monkeypatch.setattr(direct, "version_of", version_of)
        assert transfer.done()
    else:  # runs while they are made, and asks
        part, asked = direct.Part, []

        def make(*arguments):
            asked.append(transfer.done())
            return part(*arguments)

        monkeypatch.setattr(direct, "Part", make)
        assert transfer.nbytes == source.nbytes
        assert asked == [True]
    monkeypatch.undo()
    source.zero_()
    assert same_bits(transfer.result(), expected)


def test_a_source_written_before_somebody_asked_is_noticed_by_who_asks(start):
    source = random_bits(1000)
    gate = start.stream.gate()
    transfer = start(source)
    source.zero_()
    gate.open()
    assert eventually(transfer.done)
    with pytest.raises(streamlap.SourceModified):
        transfer.result()
    transfer = start(source)
    assert eventually(transfer.done)
    source.add_(1)  # it is no longer borrowed
    assert not transfer.result().any()


def test_a_source_written_too_early_is_noticed(start):
    source = random_bits(10)
    gate = start.stream.gate()
    transfer = start(source)
    source.zero_()
    gate.open()
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


def test_the_limit_is_kept_and_waits_for_what_comes_home(start):
    pool = PinnedPool(8 << 10)
    source = random_bits(1024)
    held = [start(source, pool=pool).result() for _ in range(2)]
    with pytest.raises(streamlap.PoolExhausted) as caught:
        start(source, pool=pool)
    assert (caught.value.used, caught.value.limit) == (8 << 10, 8 << 10)
    held.clear()
    del caught
    gate = start.stream.gate()
    transfer = start(source, pool=pool)
    del transfer  # in flight: its block comes home once the gate is open
    kept = start(source, pool=pool)
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    assert same_bits(start(source, pool=pool).result(), source)
    assert same_bits(kept.result(), source)
    opener.join()


def test_what_is_to_go_another_way(start):
    z = torch.randn(6, 6, dtype=torch.complex64)
    wrapped = torch.func.vmap(lambda row: [others.append(start(row)), row][1])
    others = [start(z[:1].expand(6, 6)), start(z[:, 1:]), start(z[:0]), start(z.conj())]
    others += [
        start(z.conj().imag[0, :1]),
        start(torch.eye(3).to_sparse()),
        start([z]),
        start(None),
    ]
    wrapped(torch.ones(3, 4))
    assert others == [None] * 9
    escaped = []
    keep = lambda x: [escaped.append(x), x][1]  # noqa: E731
    torch.func.vmap(keep)(torch.ones(3, 4))
    torch.func.functionalize(keep)(torch.ones(3, 4))
    torch.func.jvp(keep, (torch.ones(3),), (torch.ones(3),))
    torch.func.grad(lambda x: keep(x).sum())(torch.ones(3))  # its alias would tell
    assert [start(one) for one in escaped] == [None] * 4
    short = _native.ShortWay()
    assert short.start(z, None, None) is None  # of a CPU, without a stream
    assert _native.start_short(short.handle(), z, None, None) is None
    with pytest.raises(TypeError, match="start_short"):
        _native.start_short(short.handle(), z, None)
    with pytest.raises(ValueError, match="PyCapsule"):
        _native.start_short(short, z, None, None)


@pytest.mark.parametrize("how", [{}, {"pin": True}, {"timed": None}, {"out": None}])
@pytest.mark.parametrize("many", [False, True])
def test_each_call_tries_the_short_way_once(monkeypatch, how, many):
    tried = []
    real = direct._start_short
    monkeypatch.setattr(direct, "_start_short", lambda *args: tried.append(1) or real(*args))
    x = random_bits(10)
    result = streamlap.to_cpu([x, x] if many else x, **how).result()
    assert same_bits(result[0] if many else result, x)
    assert len(tried) == 1


@pytest.mark.parametrize("make", [torch.nn.Parameter, lambda x: x.clone().requires_grad_()])
def test_what_has_history_comes_without(start, make):
    source = make(torch.rand(7))
    result = start(source).result()
    assert not result.requires_grad
    assert type(result) is torch.Tensor
    assert same_bits(result, source.detach())
    with torch.inference_mode():
        assert same_bits(start(torch.ones(5)).result(), torch.ones(5))


def test_what_the_result_is_was_settled_by_the_call(start):
    source = random_numbers((4,))
    expected = source.clone()
    transfer = start(source)
    source.data = source.half()  # another type, without a new version
    assert same_bits(transfer.result(), expected)
    layer = torch.nn.Linear(3, 2).requires_grad_(False)
    expected = layer.weight.detach().clone()
    transfer = start(layer.weight)
    layer.half()
    assert same_bits(transfer.result(), expected)
    transfer = start(torch.tensor(2.5))
    with torch.inference_mode():
        assert not transfer.result().is_inference()
        transfer = start(torch.tensor(2.5))
    assert transfer.result().is_inference()


def test_a_source_s_later_history_is_not_kept(start):
    source = random_numbers((5,))
    transfer = start(source)
    alive = weakref.ref(source)
    graded = torch.ones(5, requires_grad=True)
    source.copy_(graded * 2)
    assert all(getattr(thing, "grad_fn", None) is None for thing in transfer._made)
    del source
    assert alive() is None
    with pytest.raises(streamlap.SourceModified):
        transfer.result()


def test_what_is_written_while_the_call_waits_for_memory_is_noticed(start):
    pool = PinnedPool(8 << 10)
    source = random_bits(1024)
    kept = [start(source, pool=pool).result()]
    gate = start.stream.gate()
    transfer = start(source, pool=pool)
    del transfer  # in flight: its block comes home once the gate is open
    found = []
    thread = threading.Thread(target=lambda: found.append(start(source, pool=pool)))
    thread.start()
    assert stays_false(lambda: found)
    source.zero_()
    gate.open()
    thread.join()
    with pytest.raises(streamlap.SourceModified):
        found[0].result()
    found.clear()
    kept.clear()


def test_a_device_may_be_added_while_a_call_waits(start):
    pool, source = PinnedPool(8 << 10), random_bits(1024)
    place, short = host_place(0), _native.ShortWay()
    short.add(0, place.engine, pool._pool(), place)

    def call():
        return direct.TensorTransfer(short.start_after(source, None, None, start.stream.handle))

    kept = [call().result()]
    gate = start.stream.gate()
    del_me = call()
    del del_me
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    assert stays_false(lambda: found)
    short.add(0, place.engine, PinnedPool(1 << 20)._pool(), place)
    for index in range(1, 100):
        short.add(index, place.engine, pool._pool(), place)
    gate.open()
    thread.join()
    assert same_bits(found[0].result(), source)
    kept.clear()
    found.clear()


def test_the_result_can_be_asked_for_again_after_an_error(start, monkeypatch):
    source = random_bits(10)
    transfer = start(source)

    def fails(*args):
        raise MemoryError("deliberate")

    with monkeypatch.context() as patched:
        patched.setattr(direct, "Part", fails)
        with pytest.raises(MemoryError, match="deliberate"):
            transfer.result()
    assert same_bits(transfer.result(), source)


def test_a_finalizer_inside_may_ask_the_same_transfer(start, monkeypatch):
    source = random_bits(10)
    holder = [start(source)]
    real, inner, asked = direct.Part, [], []

    def part(*args):
        if not asked:
            asked.append(True)
            inner.append(holder[0].result())
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(direct, "Part", part)
        assert holder[0].result() is inner[0]
    assert same_bits(inner[0], source)
    inner.clear()
    holder.clear()


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_question_that_raises_sends_it_another_way_but_for_an_interrupt(start, error):
    class Raises(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "is_neg":
                raise error("deliberate")
            return func(*args, **kwargs or {})

    tensor = torch.ones(3)
    with Raises():
        if error is ArithmeticError:
            assert start(tensor) is None
            assert _native.TensorRow.of([tensor]) is None
        else:
            with pytest.raises(KeyboardInterrupt):
                start(tensor)
            with pytest.raises(KeyboardInterrupt):
                _native.TensorRow.of([tensor])


def test_a_mode_that_changes_the_tensor_changes_no_copy(start):
    source = random_bits((7, 3))
    expected = source.clone()

    class Changes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in ("is_neg", "is_conj"):
                source.data = torch.zeros(1, 2, 3, 4, 5, 6)
            return func(*args, **kwargs or {})

    with Changes():
        transfer = start(source)
    assert same_bits(transfer.result(), expected)


def test_parts_are_made_once_whoever_asks(start):
    transfer = start(random_bits(1000))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: transfer.result(), range(32)))
    assert len({id(result) for result in results}) == 1
    assert (transfer.nbytes, transfer.stats()["leaves"]) == (4000, 1)
    with pytest.raises(AttributeError, match="no attribute 'value'"):
        _ = transfer.value


# -- on a GPU


@pytest.fixture
def taken(monkeypatch):
    """One entry for each transfer of the short way."""
    seen = []

    def new(kind):
        seen.append(kind)
        return object.__new__(kind)

    monkeypatch.setattr(direct, "_new", new)
    return seen


@pytest.mark.gpu
def test_what_is_taken_and_what_is_not(taken):
    x = random_bits((40, 30), where="cuda:0")
    assert same_bits(streamlap.to_cpu(x).result(), x.cpu())
    with streamlap.configure(chunk_bytes=100):
        transfer = streamlap.to_cpu(x)
        assert transfer.stats()["chunks"] == 48
        assert same_bits(transfer.result(), x.cpu())
    with torch.inference_mode():
        assert same_bits(streamlap.to_cpu(x).result(), x.cpu())
    graded = torch.rand(5, device="cuda:0", requires_grad=True)
    assert not streamlap.to_cpu(graded).result().requires_grad
    assert len(taken) == 4
    z = torch.randn(6, 6, dtype=torch.complex64, device="cuda:0")
    streamlap.to_cpu(torch.nn.Parameter(graded.data)).result()
    assert len(taken) == 5
    turned = streamlap.to_cpu(x.t()).result()
    assert same_bits(turned, x.t().cpu())
    assert turned.stride() == (1, 30)
    assert len(taken) == 6
    for other in (x[:, 1:], x[:0], z.conj(), z.conj().imag[0, :1], [x], {"a": x}):
        streamlap.to_cpu(other).result()
    assert same_bits(streamlap.to_cpu(z.conj()).result(), z.conj().resolve_conj().cpu())
    assert same_bits(streamlap.to_cpu(x, pin=False).result(), x.cpu())
    assert streamlap.to_cpu(x, dtype=torch.float64).result().dtype == torch.float64
    assert len(taken) == 6


@pytest.mark.gpu
def test_on_a_gpu_it_starts_after_the_current_stream(taken):
    x = torch.zeros(1000, device="cuda:0")
    side = torch.cuda.Stream()
    native = runtime_of("cuda:0").adopt(0, side.cuda_stream)
    streamlap.to_cpu(x).result()
    native.gate().open()
    finish_all("cuda:0")
    gate = native.gate()
    with torch.cuda.stream(side):
        x.fill_(7)
        transfer = streamlap.to_cpu(x)
    assert is_held(transfer)
    gate.open()
    assert torch.equal(transfer.result(), torch.full((1000,), 7.0))
    with pytest.raises(streamlap.InvalidArgument, match="timed=True"):
        transfer.elapsed()
    with streamlap.configure(timed_bytes=4000):
        timed = [streamlap.to_cpu(x), streamlap.to_cpu(x[:500], timed=True)]
    for transfer in timed:
        transfer.result()
        assert 0 <= transfer.elapsed() < 20
    assert len(taken) == 4


@pytest.mark.gpu
def test_the_source_may_change_its_memory_in_flight(taken):
    x = random_bits(1000, where="cuda:0")
    expected = x.cpu()
    streamlap.to_cpu(x).result()
    gate = CopySide("cuda:0").hold()
    transfer = streamlap.to_cpu(x)
    x.data = torch.zeros(1000, device="cuda:0")
    torch.full((1000,), 3.0, device="cuda:0")  # would get the old memory, were it free
    gate.open()
    assert same_bits(transfer.result(), expected)
    assert len(taken) == 2
