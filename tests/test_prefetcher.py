"""Prefetcher: order by gates, bytes, how far ahead, errors in their turn, and what is left."""

import gc
import multiprocessing
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from helpers.data import random_bits, same_bits, same_tree
from helpers.streams import CopySide, eventually, finish_all, side, stays_false
from helpers.threads import spawn
from torch.utils.data import DataLoader, TensorDataset

import streamlap
from streamlap import Prefetcher
from streamlap.training import prefetch

FORKS = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
SCHEDULES = ("lazy", "eager", "starve(0)", "starve(1)", "random(1)", "random(2)")


class Boom(Exception):
    pass


class Loader:
    """Batches of random bits; counts what was pulled, and can fail at one."""

    def __init__(self, count, shape=1000, fails_at=None):
        self.batches = [random_bits(shape) for _ in range(count)]
        self.fails_at = fails_at
        self.pulled = 0
        self.iterators = []

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        made = self._iterate()
        self.iterators.append(weakref.ref(made))
        return made

    def _iterate(self):
        for index, batch in enumerate(self.batches):
            self.pulled += 1
            if index == self.fails_at:
                raise Boom(index)
            yield batch

    def nobody_iterates(self):
        return all(made() is None for made in self.iterators)


# -- what arrives


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_arrive_in_order_bit_for_bit(where, depth, nothing_left):
    loader = Loader(7)
    for _ in range(2):  # each pass is a new one
        got = list(Prefetcher(loader, where, depth))
        assert all(batch.device == torch.device(where) for batch in got)
        assert all(map(same_bits, got, loader.batches))
        assert len(got) == 7
        assert {batch.data_ptr() for batch in got}.isdisjoint(
            {batch.data_ptr() for batch in loader.batches}
        )
        del got


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batches_arrive_in_every_schedule(schedule):
    with streamlap.use_runtime("sim", schedule=schedule):
        loader = Loader(6)
        for got, sent in zip(Prefetcher(loader, "cpu"), loader.batches, strict=True):
            assert same_bits(got, sent)


def test_pinned_batches_arrive(where, nothing_left):
    def pinned():
        for value in range(5):
            yield streamlap.empty_pinned(3000, torch.int32).fill_(value)

    for value, batch in enumerate(Prefetcher(pinned(), where)):
        assert bool((batch == value).all())
    del batch


def test_trees_keep_their_shape_and_what_is_no_tensor_passes_through(where):
    marker = object()
    sent = [
        {"x": random_bits((4, 6)).t(), "names": ["a", index], "none": None, "pair": (1, marker)}
        for index in range(4)
    ]
    got = list(Prefetcher(sent, where))
    assert same_tree(got, sent)
    assert got[0]["pair"][1] is marker
    assert list(Prefetcher(["a", 1, None], where)) == ["a", 1, None]


def test_numpy_batches_arrive_as_tensors(where):
    sent = [np.arange(6, dtype=np.int16) + index for index in range(3)]
    for got, array in zip(Prefetcher(sent, where), sent, strict=True):
        assert isinstance(got, torch.Tensor)
        assert same_bits(got, array)


def test_the_transform_sees_batches_of_the_device_in_turn(where):
    threads, seen = [], []

    def transform(batch):
        threads.append(threading.get_ident())
        seen.append(batch.device)
        return batch + len(seen)

    loader = [torch.zeros(8) for _ in range(4)]
    batches = iter(Prefetcher(loader, where, transform=transform))
    for index in range(1, 5):
        assert bool((next(batches) == index).all())
        assert len(seen) == index  # not ahead
    assert set(threads) == {threading.get_ident()}
    assert set(seen) == {torch.device(where)}


@pytest.mark.forks
@FORKS
def test_a_dataloader_with_workers(where):
    data = torch.arange(400).reshape(100, 4)
    loader = DataLoader(TensorDataset(data), batch_size=8, num_workers=2)
    prefetcher = Prefetcher(loader, where)
    assert len(prefetcher) == len(loader) == 13
    for _ in range(2):
        assert torch.equal(torch.cat([batch.cpu() for (batch,) in prefetcher]), data)
    assert eventually(lambda: not multiprocessing.active_children())


def test_the_loader_is_pulled_in_the_consumer_s_thread_and_modes():
    seen = []

    def loader():
        for _ in range(3):
            seen.append((threading.get_ident(), torch.is_grad_enabled()))
            yield torch.zeros(1)

    with torch.no_grad():
        list(Prefetcher(loader(), "cpu"))
    assert set(seen) == {(threading.get_ident(), False)}


# -- how far ahead


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_at_most_depth_batches_are_ahead(where, depth):
    loader = Loader(9)
    prefetcher = Prefetcher(loader, where, depth)
    for index, _batch in enumerate(prefetcher):
        assert loader.pulled == min(index + 1 + depth, 9)
        assert prefetcher.stats()["ahead"] == loader.pulled - index - 1
    assert prefetcher.stats()["ahead"] == 0


def test_stats_show_who_keeps_his_batches(where):
    prefetcher = Prefetcher([torch.zeros(1000) for _ in range(40)], where)
    kept = []
    for index, batch in enumerate(prefetcher):
        if index % 2:
            kept.append(batch[10:])  # a view is enough
    del batch
    gc.collect()
    stats = prefetcher.stats()
    assert stats["batches"] == 40
    assert stats["bytes"] == 40 * 4000
    assert stats["held_batches"] == 20
    assert stats["held_bytes"] == 20 * 4000
    kept.clear()
    assert prefetcher.stats()["held_batches"] == 0


def test_a_pass_may_end_while_its_figures_are_asked_for(monkeypatch):
    """As a collection of garbage can end it, anywhere."""
    prefetcher = Prefetcher(Loader(4), "cpu")
    batches = iter(prefetcher)
    held = next(batches)
    alive = prefetch.MemoryRef.alive

    def collected(ref):
        batches.close()
        return alive(ref)

    monkeypatch.setattr(prefetch.MemoryRef, "alive", collected)
    errors = []
    asked = spawn(prefetcher.stats, errors)
    asked.join(5)
    assert not asked.is_alive()
    assert not errors
    assert prefetcher.stats()["ahead"] == 0
    del held


def test_the_notes_of_dropped_batches_are_dropped():
    prefetcher = Prefetcher((torch.zeros(4) for _ in range(500)), "cpu")
    for batch in prefetcher:
        del batch
    assert len(prefetcher._given) <= 16


def memory(where):
    if where == "cpu":
        stats = streamlap.pool_stats(where)
        return stats["reserved"], stats["peak"]
    return torch.cuda.memory_reserved(where), torch.cuda.max_memory_reserved(where)


def test_reserved_memory_is_flat_over_a_thousand_steps(where):
    batch_of = [random_bits(50_000) for _ in range(4)]
    sums = [batch.view(torch.int32).sum().item() for batch in batch_of]
    prefetcher = Prefetcher((batch_of[step % 4] for step in range(1000)), where)
    if where != "cpu":  # what other tests left is there to be filled
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
    for step, batch in enumerate(prefetcher):
        if step % 100 == 0 or step > 990:
            assert batch.view(torch.int32).sum().item() == sums[step % 4]
        if step == 20:
            before = memory(where)
    assert memory(where) == before


# -- order


def test_a_batch_is_waited_for(where):
    loader = Loader(3, 100_000)
    copies = CopySide(where, to_device=True)
    prefetcher = Prefetcher(
        [streamlap.empty_pinned(b.shape).copy_(b) for b in loader.batches], where
    )
    consumer = side(where, "consumer")
    keep = torch.empty(100_000, device=where)
    finish_all(where)
    gate = copies.hold()
    if where == "cpu":  # there the thread is what waits
        got, errors = [], []
        thread = spawn(lambda: got.append(next(iter(prefetcher))), errors)
        assert stays_false(lambda: got or errors)
        gate.open()
        thread.join()
        assert errors == []
        assert same_bits(got[0], loader.batches[0])
        return
    with consumer.current():
        batch = next(iter(prefetcher))  # returns although the copy is held
        keep.copy_(batch)
    passed = consumer.passed()
    assert stays_false(passed)
    gate.open()
    consumer.sync()
    assert same_bits(keep, loader.batches[0])


def test_memory_is_not_reused_before_the_consumer_s_stream_has_read_it(where):
    loader = Loader(12, 50_000)
    pinned = [streamlap.empty_pinned(b.shape).copy_(b) for b in loader.batches]
    consumer = side(where, "consumer")
    keeps = [torch.zeros(50_000, device=where) for _ in loader.batches]
    finish_all(where)
    if (
        where != "cpu"
    ):  # a thousand operations fit behind a gate, and the host may be ahead by depth
        with consumer.current():
            batches = iter(Prefetcher(pinned, where, depth=6))
            gate = consumer.hold()
            for keep in keeps[:6]:
                keep.copy_(next(batches))  # and the batch is dropped
            gate.open()
            for keep in keeps[6:]:
                keep.copy_(next(batches))
        consumer.sync()
    else:
        gate = consumer.hold()
        for keep, batch in zip(keeps, Prefetcher(pinned, where), strict=True):
            consumer.copy(keep, batch)
            streamlap.record_use(batch, consumer.native)
        del batch
        gate.open()
        consumer.sync()
    assert all(map(same_bits, keeps, loader.batches))


def test_a_batch_that_is_written_while_it_is_copied_is_noticed(where):
    shared = streamlap.empty_pinned(1000).fill_(1)

    def refilled():  # asked for the next one before anybody asked whether this one was copied
        while True:
            yield shared.add_(1)

    with pytest.raises(streamlap.SourceModified):
        for _ in Prefetcher(refilled(), where):
            pass


class Pending:
    """A transfer whose copy is never done by itself."""

    nbytes = 4

    def __init__(self, log, value):
        self.log, self.value = log, value

    def wait(self):
        return self.value

    def done(self):
        return False

    def result(self):
        self.log.append(self.value)


@pytest.mark.parametrize("depth", [1, 3])
def test_the_host_is_at_most_depth_batches_ahead_of_the_copies(depth, monkeypatch):
    finished = []
    stand_in = types.SimpleNamespace(to_device=lambda value, device: Pending(finished, value))
    monkeypatch.setattr(prefetch, "streamlap", stand_in)
    for value in Prefetcher(range(10), "cpu", depth):
        assert finished == list(range(max(0, value + 1 - depth)))


def test_a_batch_for_another_stream_is_fetched_anew(monkeypatch):
    streams = iter([1, 1, 1, 1, 2, 2, 2, 2, 2])  # three fetches and a delivery, then another stream
    started = []

    def to_device(value, device):
        started.append(int(value[0]))
        return streamlap.to_device(value, device)

    monkeypatch.setattr(prefetch, "streamlap", types.SimpleNamespace(to_device=to_device))
    monkeypatch.setattr(prefetch, "_current", lambda device: next(streams))
    batches = iter(Prefetcher([torch.full((4,), i) for i in range(9)], "cpu"))
    assert int(next(batches)[0]) == 0
    assert started == [0, 1, 2]
    assert int(next(batches)[0]) == 1
    assert started == [0, 1, 2, 3, 1]


@pytest.mark.gpu
def test_batches_on_alternating_streams_are_right():
    where = "cuda:0"
    loader = Loader(20, 50_000)
    streams = [torch.cuda.Stream(where) for _ in range(2)]
    batches = iter(Prefetcher(loader, where))
    keeps = []
    for index in range(20):
        with torch.cuda.stream(streams[index % 2]):
            batch = next(batches)
            torch.cuda._sleep(1_000_000)
            keeps.append(batch.clone())
            del batch
    torch.cuda.synchronize()
    assert all(map(same_bits, keeps, loader.batches))


# -- errors


@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_an_error_of_the_loader_comes_in_its_turn(where, at, nothing_left):
    loader = Loader(7, fails_at=at)
    got = []
    with pytest.raises(Boom) as raised:
        got.extend(Prefetcher(loader, where))
    assert raised.value.args == (at,)
    assert len(got) == at
    assert all(map(same_bits, got, loader.batches))
    assert loader.pulled == at + 1  # and nothing after it
    del got, raised
    gc.collect()
    assert loader.nobody_iterates()


def test_a_batch_that_cannot_be_copied_fails_in_its_turn(where):
    sent = [torch.zeros(4), torch.zeros(4), torch.zeros(4).to_sparse(), torch.zeros(4)]
    batches = iter(Prefetcher(sent, where))
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(streamlap.UnsupportedTensor):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_an_error_of_the_transform_is_raised_as_it_is(where, nothing_left):
    def transform(batch):
        if float(batch[0]) == 2:
            raise Boom
        return batch

    got = []
    with pytest.raises(Boom):
        got.extend(Prefetcher([torch.full((4,), float(i)) for i in range(6)], where, 2, transform))


@pytest.mark.forks
@FORKS
def test_an_error_of_a_worker_process(where):
    class Fails(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5:
                raise Boom
            return torch.tensor(index)

    loader = DataLoader(Fails(), batch_size=1, num_workers=1)
    got = []
    with pytest.raises(Boom):
        got.extend(Prefetcher(loader, where))
    assert [int(batch) for batch in got] == [0, 1, 2, 3, 4]
    gc.collect()
    assert eventually(lambda: not multiprocessing.active_children())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3, "cpu"), streamlap.InvalidType),
        (([], "no such device"), streamlap.InvalidArgument),
        (([], "mps"), streamlap.InvalidArgument),
        (([], None), streamlap.InvalidType),
        (([], "cpu", 0), streamlap.InvalidArgument),
        (([], "cpu", -1), streamlap.InvalidArgument),
        (([], "cpu", 1.5), streamlap.InvalidType),
        (([], "cpu", 2, 5), streamlap.InvalidType),
        (([], "cuda:99"), (streamlap.InvalidArgument, streamlap.DeviceError)),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, error):
    with pytest.raises(error):
        Prefetcher(*arguments)


def test_a_loader_without_a_length_has_none():
    with pytest.raises(TypeError):
        len(Prefetcher(iter([]), "cpu"))
    assert list(Prefetcher([], "cpu")) == []


# -- leaving early


def by_break(prefetcher):
    for _ in prefetcher:
        break


def by_error(prefetcher):
    def loop():
        for _ in prefetcher:
            raise Boom

    with pytest.raises(Boom):
        loop()


def by_dropping(prefetcher):
    batches = iter(prefetcher)
    next(batches)


def before_the_first(prefetcher):
    iter(prefetcher)


def by_a_cycle(prefetcher):
    batches = iter(prefetcher)
    circle = [next(batches), batches]
    circle.append(circle)
    del circle, batches
    gc.collect()


LEAVING = [by_break, by_error, by_dropping, before_the_first, by_a_cycle]


@pytest.mark.parametrize("leave", LEAVING)
def test_leaving_early_leaves_nothing(where, leave, nothing_left):
    loader = Loader(20)
    prefetcher = Prefetcher(loader, where, 4)
    threads = threading.active_count()
    leave(prefetcher)
    gc.collect()
    assert loader.nobody_iterates()
    assert prefetcher.stats()["ahead"] == 0
    assert prefetcher.stats()["held_batches"] == 0
    assert threading.active_count() <= threads + 1  # the library's one thread
    assert len(list(prefetcher)) == 20


# In a cycle a DataLoader's own end takes ten seconds, with or without a prefetcher.
@pytest.mark.forks
@pytest.mark.parametrize("leave", [way for way in LEAVING if way is not by_a_cycle])
@FORKS
def test_leaving_early_ends_the_loader_s_workers(where, leave):
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=1, num_workers=2)
    leave(Prefetcher(loader, where))
    gc.collect()
    assert eventually(lambda: not multiprocessing.active_children())


def test_leaving_early_while_copies_are_held(where, nothing_left):
    copies = CopySide(where, to_device=True)
    loader = Loader(20)
    finish_all(where)
    gate = copies.hold()
    errors = []
    thread = spawn(lambda: by_break(Prefetcher(loader, where)), errors)
    gate.open()
    thread.join()
    assert errors == []
    assert loader.nobody_iterates()


# -- training


def train(loader, device, steps=50):
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 32), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(32, 5)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append([loss, *(p.grad.clone() for p in model.parameters())])
        seen[-1] += [p.detach().clone() for p in model.parameters()]
    assert len(seen) == steps
    return [[tensor.detach().cpu() for tensor in step] for step in seen]


def test_fifty_steps_of_training_are_those_of_the_plain_loop(where):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(800, 20, generator=generator), torch.randint(5, (800,), generator=generator)
    )

    def loader():
        torch.manual_seed(5)
        return DataLoader(data, batch_size=16, shuffle=True)

    plain = train(loader(), where)
    fetched = train(Prefetcher(loader(), where), where)
    assert same_tree(plain, fetched)
