"""The stopwatch: prints, waits for the devices at both ends, and does not hide errors."""

import re
import threading

import pytest
import torch
from helpers.streams import eventually, finish_all, side

import streamlap
from streamlap import Benchmark
from streamlap.devices import place_of


def stream_of(where):
    """A stream that synchronize() waits for."""
    if where == "cpu":
        return place_of(torch.device("cpu")).compute_stream()
    return side(where, "producer")


def hold(where):
    stream = stream_of(where)
    return stream.gate() if where == "cpu" else stream.hold()


def test_it_prints_d2l_s_line(capsys):
    with Benchmark("Run on GPU1") as timer:
        assert timer.seconds is None
    out = capsys.readouterr().out
    assert re.fullmatch(r"Run on GPU1: \d+\.\d{4} sec\n", out)
    assert f"{timer.seconds:.4f}" in out
    with Benchmark():
        pass
    assert capsys.readouterr().out.startswith("Done: ")


def test_an_error_is_not_hidden_and_nothing_is_printed(capsys):
    timer = Benchmark("never")
    with pytest.raises(ZeroDivisionError), timer:
        raise ZeroDivisionError
    assert capsys.readouterr().out == ""
    assert timer.seconds is not None


@pytest.mark.parametrize("end", ["begin", "end"])
def test_it_waits_for_the_devices_at_both_ends(where, end, capsys):
    finish_all(where)
    inside, after = threading.Event(), threading.Event()
    gates = []

    def body():
        with Benchmark("held"):
            inside.set()
            if end == "end":
                gates.append(hold(where))
        after.set()

    if end == "begin":
        gates.append(hold(where))
    thread = threading.Thread(target=body)
    thread.start()
    assert eventually(lambda: bool(gates))
    watched = inside if end == "begin" else after
    assert not eventually(watched.is_set, 0.02)
    gates[0].open()
    thread.join(20)
    assert after.is_set()
    assert "held" in capsys.readouterr().out


def test_it_measures_what_the_device_does(where, capsys):
    x = torch.ones(64, 64, device=where)
    with Benchmark("work") as timer:
        streamlap.pipelined_run(x, n=5, wait=False)
    assert 0 < timer.seconds < 60
    assert "work" in capsys.readouterr().out
