"""checking(): the library's own paths are in order, and what is not is refused."""

import numpy as np
import pytest
import torch
from helpers.data import random_numbers, same_bits, same_tree
from helpers.streams import engine_of, runtime_of

import streamlap
from streamlap.errors import OrderError

SCHEDULES = ("eager", "lazy", "random(1)", "random(2)", "starve(1)", "pct(1,3)")


def programs(where):
    """Every path once; each returns what it got and what it should have got."""
    x = random_numbers((64, 64), where=where)
    host = x.cpu()
    pinned = streamlap.empty_pinned((64, 64), torch.float32)
    return {
        "to_cpu": lambda: (streamlap.to_cpu(x).result(), host),
        "chunks": lambda: (streamlap.to_cpu(x, chunk_bytes=1000).result(), host),
        "tree": lambda: (streamlap.to_cpu([x, {"a": x.t()}]).result(), [host, {"a": host.t()}]),
        "ordinary": lambda: (streamlap.to_cpu(x, pin=False).result(), host),
        "out": lambda: (streamlap.to_cpu(x, out=pinned).result(), host),
        "dtype": lambda: (streamlap.to_cpu(x, dtype=torch.float64).result(), host.double()),
        "to_device": lambda: (streamlap.to_device(host, x.device).result().cpu(), host),
        "run": lambda: (streamlap.pipelined_run(x, n=9), [x.mm(x).cpu()] * 9),
        "fn": lambda: (streamlap.pipelined_run(x, n=9, fn=lambda y: y + 1), [host + 1] * 9),
        "map": lambda: (
            list(streamlap.pipelined_map(lambda k: x * k, range(9))),
            [host * k for k in range(9)],
        ),
        "handle": lambda: (
            streamlap.pipelined_run(x, n=9, wait=False).result(),
            [x.mm(x).cpu()] * 9,
        ),
    }


NAMES = list(programs("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_every_path_is_in_order(where, name):
    programs(where)[name]()  # warm, and unchecked
    with streamlap.checking() as checked:
        for _ in range(5):  # so that pool memory is handed out again
            found, expected = programs(where)[name]()
            assert same_tree(found, expected)
            del found
        assert checked.accesses > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_path_is_in_order_under_every_schedule(schedule):
    for name in NAMES:
        with streamlap.use_runtime("sim", schedule=schedule) as simulation:
            for _ in range(3):
                found, expected = programs("cpu")[name]()
                assert same_tree(found, expected), name
                del found
            assert simulation.accesses > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_failed_pipeline_gave_back_is_handed_out_in_order(schedule):
    """Waiting for the end of a copy is no read of it."""

    def fn(x):
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("deliberate")
        return x + 1

    calls = []
    with streamlap.use_runtime("sim", schedule=schedule):
        with pytest.raises(ArithmeticError):
            streamlap.pipelined_run(torch.ones(4), n=9, depth=1, fn=fn)
        for _ in range(3):
            streamlap.to_cpu(torch.ones(4)).result()


def test_a_replayed_schedule_does_the_same_every_time():
    def run(schedule):
        with streamlap.use_runtime("sim", schedule=schedule, costs={"memcpy": 1e9}) as simulation:
            for name in ("tree", "run", "map"):
                programs("cpu")[name]()
            return simulation.replay(), simulation.now()

    decisions, now = run("random(7)")
    for _ in range(50):
        assert run("random(7)") == (decisions, now)
        assert run(decisions) == (decisions, now)


def test_a_deadlock_is_reported():
    with streamlap.use_runtime("sim") as simulation:
        stream = simulation.place(0).runtime.stream(0, "compute")
        other = simulation.place(0).runtime.stream(0, "compute")
        gate = other.gate()
        event = other.record()
        stream.wait(event)
        # A gate opens itself in the end, with an error that the wait carries on.
        with pytest.raises(streamlap.DeviceError, match="gate was not opened"):
            stream.synchronize()
        assert gate.timed_out


def test_a_copy_that_forgets_its_producer_is_refused(where):
    with streamlap.checking():
        runtime, engine = runtime_of(where), engine_of(where)
        producer = runtime.stream(0, "compute")
        source = torch.empty(1000, dtype=torch.uint8, device=where)
        out = streamlap.empty_pinned(1000, torch.uint8)
        runtime.declare(producer, source.data_ptr(), 1000, True)

        def submit(after):
            return engine.submit(
                device=0,
                to_device=False,
                items=[(out.data_ptr(), source.data_ptr(), 1000, 1, None)],
                after=after,
                chunk_bytes=1 << 30,
                keep_source=source,
                keep_destination=out,
            )

        with pytest.raises(OrderError, match=r"a copy's read of 1000 bytes .* a declared write"):
            submit([])
        transfer = submit([producer])
        with pytest.raises(OrderError, match="a read of a result"):
            runtime.host_reads(out.data_ptr() + 999, 1)  # one byte, before anybody waited
        transfer.sync()
        runtime.host_reads(out.data_ptr(), 1000)


@pytest.mark.unchecked("looks at what is there without the checker")
def test_off_it_is_not_there(where):
    assert not runtime_of(where).checked
    with streamlap.checking():
        assert runtime_of(where).checked
        with streamlap.checking():
            assert runtime_of(where).checked
    assert not runtime_of(where).checked
    x = np.ones(5)
    assert same_bits(streamlap.to_cpu(torch.from_numpy(x)).result(), torch.ones(5).double())
