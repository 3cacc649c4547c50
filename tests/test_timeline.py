"""Timelines: what is recorded on either runtime, and that recording leaves nothing behind."""

import gc
import itertools
import json
import threading

import numpy as np
import pytest
import torch
from helpers.data import random_numbers, same_bits, same_tree
from helpers.streams import CopySide, eventually, finish_all, side, stays_false

import streamlap
from streamlap import observe

pytestmark = pytest.mark.usefixtures("nothing_left")

SIZE = 64


def of(timeline, kind):
    return [span for span in timeline.spans if span.kind == kind]


def warm(where, x):
    for _ in range(2):
        streamlap.pipelined_run(x, n=6)
    finish_all(where)


def test_every_call_and_every_copy_is_there_in_order(where):
    x = random_numbers((SIZE, SIZE), where=where)
    warm(where, x)
    with streamlap.timeline() as tl:
        results = streamlap.pipelined_run(x, n=6)
    assert same_tree(results, [x.mm(x).cpu()] * 6)
    calls, copies = of(tl, "compute"), of(tl, "copy")
    assert [call.name for call in calls] == [f"fn {index}" for index in range(6)]
    assert {call.lane for call in calls} == {f"{calls[0].device} compute"}
    assert [copy.nbytes for copy in copies] == [SIZE * SIZE * 4] * 6
    assert {copy.lane for copy in copies} == {f"{calls[0].device} to host"}
    for call, copy in zip(calls, copies, strict=True):
        assert call.begin < call.end
        assert call.end <= copy.begin + 5e-6  # two clocks' readings of one event, on a GPU
        assert copy.begin < copy.end
    assert calls[0].begin >= 0
    assert copies[-1].end <= tl.seconds + 1e-4


@pytest.mark.parametrize(
    "start",
    [
        lambda x: streamlap.run(x, n=3),
        lambda x: streamlap.parallel_run([x, x], n=3),
        lambda x: list(streamlap.pipelined_map(lambda y: y.mm(y), [x] * 3)),
        lambda x: streamlap.pipelined_run(x, n=3, fn=lambda y: y.mm(y)),
        lambda x: streamlap.pipelined_run([x, x], n=3),
        lambda x: streamlap.pipelined_run(x, n=3, wait=False).result(),
        lambda x: streamlap.pipelined_run(x, n=3, dtype=torch.float64, pin=False),
    ],
    ids=["run", "parallel_run", "map", "fn", "list", "handle", "dtype"],
)
def test_every_pipeline_records_its_calls(where, start):
    x = random_numbers((SIZE, SIZE), where=where)
    start(x)
    with streamlap.timeline() as tl:
        start(x)
    names = sorted(span.name for span in of(tl, "compute"))
    both = [f"fn {index}" for index in range(3)]
    assert names in (both, sorted(both * 2))
    assert all(span.seconds > 0 for span in of(tl, "compute"))


@pytest.mark.parametrize(
    "start",
    [
        lambda x: streamlap.to_cpu(x),
        lambda x: streamlap.to_cpu(x, chunk_bytes=1000),
        lambda x: streamlap.to_cpu(x, pin=False),
        lambda x: streamlap.to_cpu([x, x.t()]),
        lambda x: streamlap.to_cpu(x, out=torch.empty(SIZE, 2 * SIZE)[:, ::2]),
        lambda x: streamlap.to_device(x.cpu(), x.device),
        lambda x: streamlap.to_device(x.cpu().t(), x.device),
    ],
    ids=["to_cpu", "chunks", "ordinary", "tree", "unpack", "to_device", "to_device_strided"],
)
def test_every_copy_is_recorded_with_its_path(where, start):
    x = random_numbers((SIZE, SIZE), where=where)
    start(x).result()
    with streamlap.timeline() as tl:
        transfer = start(x)
        transfer.result()
    copies = of(tl, "copy")
    assert sorted({copy.path for copy in copies}) == transfer.stats()["paths"]
    assert sum(copy.nbytes for copy in copies) == transfer.nbytes
    assert all(copy.end > copy.begin for copy in copies)
    assert bool(of(tl, "staging")) == ("unpack" in transfer.stats()["paths"])


def test_compute_that_waits_for_copies_is_seen_to(where):
    x = random_numbers((SIZE, SIZE), where=where)
    warm(where, x)
    copy_side = CopySide(where)
    with streamlap.timeline() as tl:
        gate = copy_side.hold()
        handle = streamlap.pipelined_run(x, n=6, depth=2, wait=False)
        assert not eventually(handle.done, 0.25)  # the third product has long been asked for
        gate.open()
        handle.result()
    device = of(tl, "compute")[0].device
    waits = tl.summary().waits
    assert waits[f"{device} compute", f"{device} to host"] > 0.005  # the gate was longer closed
    calls, copies = of(tl, "compute"), of(tl, "copy")
    assert calls[2].begin >= copies[0].end - 5e-6


def test_a_copy_that_waits_for_its_producer_is_seen_to(where):
    if where == "cpu":
        pytest.skip("a CPU tensor's copy starts when its producer has returned")
    producer = side(where, "producer")
    source = torch.zeros(SIZE, SIZE, device=where)
    values = random_numbers((SIZE, SIZE), where=where)
    streamlap.to_cpu(source, stream=producer.stream).result()
    finish_all(where)
    with streamlap.timeline() as tl:
        gate = producer.hold()
        producer.copy(source, values)
        transfer = streamlap.to_cpu(source, stream=producer.stream)
        assert stays_false(transfer.done)
        gate.open()
        assert same_bits(transfer.result(), values.cpu())
    assert tl.summary().waits["cuda:0 to host", "cuda:0 compute"] > 0.005


def test_a_thread_that_waits_is_seen_to(where):
    x = random_numbers((SIZE, SIZE), where=where)
    streamlap.copy_to_cpu(x)
    copy_side = CopySide(where)
    with streamlap.timeline() as tl:
        gate = copy_side.hold()
        transfer = streamlap.to_cpu(x)
        threading.Timer(0.05, gate.open).start()
        transfer.result()
    name = f"thread {threading.current_thread().name}"
    (seconds,) = (s for (who, _), s in tl.summary().waits.items() if who == name)
    assert seconds > 0.01


def test_a_pool_that_grows_is_seen_to(where):
    x = random_numbers((SIZE, SIZE), where=where)
    streamlap.copy_to_cpu(x)
    pool = streamlap.PinnedPool("64MiB")
    with streamlap.timeline() as tl:
        first = streamlap.to_cpu(x, pool=pool).result()
    assert [span.nbytes for span in of(tl, "growth")] == [x.nbytes]
    del first
    gc.collect()
    with streamlap.timeline() as tl:
        streamlap.to_cpu(x, pool=pool).result()
    assert of(tl, "growth") == []


def test_a_range_of_the_users(where):
    x = random_numbers((SIZE, SIZE), where=where)
    x.mm(x)
    with streamlap.timeline() as tl:
        with tl.range("forward", device=where):
            x.mm(x)
        if where != "cpu":
            other = torch.cuda.Stream(where)
            with torch.cuda.stream(other), tl.range("backward", other):
                x.mm(x)
    spans = of(tl, "compute")
    assert spans[0].name == "forward"
    assert spans[0].seconds > 0
    if where != "cpu":
        assert [(span.name, span.lane) for span in spans[1:]] == [("backward", "cuda:0 compute 2")]
    with tl.range("too late", device=where):
        pass
    assert of(tl, "compute") == spans
    with pytest.raises(streamlap.InvalidType, match="name must be a str"), tl.range(3):
        pass


def test_results_and_sources_are_not_kept(where):
    x = random_numbers((SIZE, SIZE), where=where)
    before = streamlap.pool_stats(where)["live"]
    with streamlap.timeline() as tl:
        results = streamlap.pipelined_run(x, n=6)
        del results
        assert eventually(lambda: streamlap.pool_stats(where)["live"] == before)
    assert len(of(tl, "copy")) == 6


def test_one_timeline_at_a_time_and_one_block_each(where):
    x = random_numbers((SIZE, SIZE), where=where)
    with streamlap.timeline() as tl:
        for ask in (lambda: tl.spans, lambda: tl.seconds, tl.summary, lambda: tl.save("a.json")):
            with pytest.raises(streamlap.InvalidArgument, match="has not ended"):
                ask()
        with pytest.raises(streamlap.InvalidArgument, match="another timeline"):
            streamlap.timeline().__enter__()
        streamlap.copy_to_cpu(x)
    assert len(of(tl, "copy")) == 1
    with pytest.raises(streamlap.InvalidArgument, match="records one block"):
        tl.__enter__()
    for wrong in (tl, streamlap.timeline()):
        with pytest.raises(streamlap.InvalidArgument, match="not being recorded"):
            wrong.__exit__(None, None, None)
    assert not observe.watched()


def test_an_error_in_the_block_arrives_and_what_was_done_is_there(where):
    x = random_numbers((SIZE, SIZE), where=where)
    tl = streamlap.timeline()

    def fail(y):
        if len(calls) == 3:
            raise ArithmeticError("deliberate")
        calls.append(1)
        return y.mm(y)

    calls = []
    with pytest.raises(ArithmeticError), tl:
        streamlap.pipelined_run(x, n=6, fn=fail)
    assert not observe.watched()
    # The call that raised has run, too.
    assert [span.name for span in of(tl, "compute")] == ["fn 0", "fn 1", "fn 2", "fn 3"]
    assert len(of(tl, "copy")) == 3


def test_an_interrupt_does_not_wait_for_what_is_in_flight(where):
    x = random_numbers((SIZE, SIZE), where=where)
    streamlap.copy_to_cpu(x)
    tl = streamlap.timeline()

    def interrupted():
        nonlocal transfer
        with tl:
            transfer = streamlap.to_cpu(x)
            raise KeyboardInterrupt

    transfer = None
    gate = CopySide(where).hold()
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert not transfer.done()
    finally:
        gate.open()
    assert of(tl, "copy") == []
    assert same_bits(transfer.result(), x.cpu())


def test_copies_from_many_threads_are_all_there(where):
    x = random_numbers((SIZE, SIZE), where=where)
    streamlap.copy_to_cpu(x)

    def work():
        for _ in range(20):
            streamlap.to_cpu(x).result()

    threads = [threading.Thread(target=work) for _ in range(4)]
    with streamlap.timeline() as tl:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    copies = of(tl, "copy")
    assert len(copies) == 80
    ordered = sorted(copies, key=lambda span: span.begin)
    for before, after in itertools.pairwise(ordered):
        assert after.begin >= before.end - 5e-6  # one stream, one at a time


def test_each_thread_that_computes_has_a_lane_of_its_own():
    x = random_numbers((SIZE, SIZE))
    barrier = threading.Barrier(2)

    def work():
        def fn(y):
            barrier.wait()  # both are inside at once
            return y.mm(y)

        streamlap.run(x, n=3, fn=fn)

    threads = [threading.Thread(target=work, name="same name") for _ in range(2)]
    with streamlap.timeline() as tl:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lanes = {span.lane for span in of(tl, "compute")}
    assert lanes == {"cpu:0 compute", "cpu:0 compute 2"}
    for lane in lanes:
        own = [span for span in of(tl, "compute") if span.lane == lane]
        assert len(own) == 3
        for before, after in itertools.pairwise(own):
            assert after.begin >= before.end


def test_growth_is_the_thread_s_that_asked(where):
    x = random_numbers((SIZE, SIZE), where=where)
    pool = streamlap.PinnedPool("64MiB")
    kept = [pool.empty(1000)]
    del kept[0]
    with streamlap.timeline() as tl:
        kept.append(pool.empty(1000))  # the block from before
        kept.append(pool.empty(1000))
    assert len(of(tl, "growth")) == 1
    del x


def test_a_recorded_run_gives_a_trace_and_a_picture(where, tmp_path):
    x = random_numbers((SIZE, SIZE), where=where)
    with streamlap.timeline() as tl:
        streamlap.pipelined_run(x, n=4)
    tl.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(tl.spans)
    tl.plot(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_the_clock_of_a_gpu_is_that_of_the_host():
    x = random_numbers((SIZE, SIZE), where="cuda:0")
    streamlap.copy_to_cpu(x)
    torch.cuda.synchronize()
    with streamlap.timeline() as tl:
        for _ in range(5):
            streamlap.to_cpu(x).result()
            torch.cuda.synchronize()
    asked = np.diff([0.0, *[span.begin for span in of(tl, "copy")], tl.seconds])
    # Each copy began after the one before had been waited for, and none outside the block.
    assert (asked > 0).all()


@pytest.mark.gpu
def test_the_d2l_job_is_recorded_as_it_runs():
    """All copies but the last run under the products; the figures agree with each other."""
    x = torch.rand(4000, 4000, device="cuda:0")
    for _ in range(2):
        streamlap.pipelined_run(x, n=20)
    torch.cuda.synchronize()
    with streamlap.timeline() as tl:
        streamlap.pipelined_run(x, n=20)
    calls, copies = of(tl, "compute"), of(tl, "copy")
    assert len(calls) == len(copies) == 20
    for copy in copies[:-1]:
        assert calls[0].begin < copy.begin
        assert copy.end < calls[-1].end
    assert copies[-1].begin >= calls[-1].end - 5e-6
    assert abs(tl.summary().overlap_fraction - 19 / 20) < 0.02


@pytest.mark.two_gpus
def test_two_gpus_have_lanes_of_their_own():
    xs = [random_numbers((SIZE, SIZE), where=f"cuda:{index}") for index in range(2)]
    streamlap.pipelined_run(xs, n=3)
    with streamlap.timeline() as tl:
        streamlap.pipelined_run(xs, n=3)
    for device in ("cuda:0", "cuda:1"):
        own = [span for span in tl.spans if span.device == device and span.kind != "wait"]
        assert sorted(span.kind for span in own) == ["compute"] * 3 + ["copy"] * 3
