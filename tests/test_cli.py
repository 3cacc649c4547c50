"""The command line, run as a user runs it."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamlap import __version__, cli, demo, experiment, info, limit, sizes

TINY = ("--size", "64", "--n", "4", "--repeat", "2")
ALONE = {
    "compute alone",
    "copy alone",
    "run alone",
    "copy blocking",
    "run then copy",
    "stock non_blocking",
    "pipelined_run",
}
TOGETHER = {"compute alone", "copy alone", "parallel_run", "pipelined_run"}


def streamlap(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "streamlap", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | environment,
    )


def printed(*arguments, **environment):
    done = streamlap(*arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def demo_json(*arguments, **environment):
    return json.loads(printed("demo", *arguments, "--json", **environment))


def rows_of(found, device):
    return {row["row"] for row in found["rows"] if row["device"] == device}


def test_demo_on_the_cpu_has_every_row():
    found = demo_json("--device", "cpu", *TINY)
    assert found["verified"] is True
    assert found["settings"]["size"] == 64
    assert (found["settings"]["n"], found["settings"]["rounds"]) == (4, 2)
    assert rows_of(found, "cpu:0") == ALONE
    assert rows_of(found, "all 2 at once") == TOGETHER
    limits = {(entry["dtype"], entry["device"]): entry["seconds"] for entry in found["limits"]}
    for row in found["rows"]:
        assert len(row["samples"]) == 2
        assert row["seconds"] > 0
        assert row["ratio"] == row["seconds"] / limits[row["dtype"], row["device"]]
        assert row["device_bytes"] is None
        ours = row["row"] == "pipelined_run"
        results = 4 * (2 if row["device"].startswith("all") else 1) * 64 * 64 * 4
        assert row["pinned_bytes"] == (results if ours else 0)
    assert found["result"].startswith("On cpu:0, pipelined_run took ")


def test_demo_prints_a_table_and_ends_with_the_result():
    lines = printed("demo", "--device", "cpu", *TINY).splitlines()
    assert "every result of pipelined_run is bit-identical to x.mm(x)" in lines
    assert any("share the same" in line for line in lines)
    assert lines[-1].startswith("On cpu:0, pipelined_run took ")
    names = {line[2:24].strip() for line in lines if line.startswith("  ")}
    assert names == ALONE | TOGETHER


def test_demo_says_what_its_columns_mean():
    lines = printed("demo", "--device", "cpu", "--size", "64", "--n", "1", "--repeat", "1")
    assert "1 product of 64x64 per device" in lines
    assert "medians of 1 round\n" in lines
    assert lines.count("x limit: ") == 1
    assert "pool: ordinary memory" in lines
    assert "pinned  " not in lines


@pytest.mark.parametrize(("seconds", "noise"), [(0.0999, True), (0.09997, False), (0.2, False)])
def test_demo_speaks_of_noise_only_where_there_is_some(seconds, noise):
    group = experiment.Group("fp32", "cuda:0", [], [])
    rows = [("compute alone", 0.1), ("copy alone", 0.05), ("run alone", 0.09)]
    rows.append(("pipelined_run", seconds))
    measured = [experiment.Measured(name, group, [value]) for name, value in rows]
    outcome = experiment.Outcome(measured, 0.0, {}, True)
    legend = demo._legend(experiment.Plan(True, 64, 1, 1, [group], []), outcome)
    assert any("noise" in line for line in legend) == noise


def test_a_row_is_timed_until_its_results_are_ready(monkeypatch):
    waited = []
    monkeypatch.setattr(limit, "synchronize", lambda devices: waited.append(devices))
    limit.timed(lambda: None, ["device"], ready=True)
    assert len(waited) == 1
    limit.timed(lambda: None, ["device"])
    assert len(waited) == 3


def test_demo_lowers_n_to_what_fits_and_says_so():
    found = demo_json("--device", "cpu", *TINY, STREAMLAP_PINNED_LIMIT="96KiB")
    assert found["settings"]["n"] == 3  # 16 KiB each, on two devices
    assert any("n is 3 instead of 4" in note for note in found["notes"])


def test_demo_in_bf16():
    found = demo_json("--device", "cpu", "--dtype", "bf16", *TINY)
    assert {row["dtype"] for row in found["rows"]} == {"bf16"}


@pytest.mark.gpu
def test_demo_on_a_gpu_has_every_row_in_fp32_and_tf32():
    found = demo_json("--device", "cuda:0", *TINY)
    assert found["verified"] is True
    for dtype in ("fp32", "tf32"):
        rows = {row["row"]: row for row in found["rows"] if row["dtype"] == dtype}
        assert set(rows) == ALONE
        assert rows["pipelined_run"]["pinned_bytes"] == 4 * 64 * 64 * 4
        assert rows["pipelined_run"]["device_bytes"] > 0


@pytest.mark.parametrize("before", [False, True])
def test_demo_leaves_the_process_as_it_was(before, capsys):
    import torch

    matmul = torch.backends.cuda.matmul
    kept = matmul.allow_tf32
    try:
        matmul.allow_tf32 = before
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        assert cli.main(["demo", "--device", "cpu", *TINY]) == 0
        assert matmul.allow_tf32 is before
        assert torch.equal(torch.rand(3), expected)
    finally:
        matmul.allow_tf32 = kept
    assert capsys.readouterr().err == ""


def test_demo_reports_a_wrong_result(monkeypatch, capsys):
    from streamlap import experiment

    monkeypatch.setattr(experiment, "_results_are_right", lambda group: False)
    assert cli.main(["demo", "--device", "cpu", *TINY]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_info_says_what_there_is():
    found = json.loads(printed("info", "--json"))
    assert found["versions"]["streamlap"] == __version__
    assert any(device["name"] == "cpu:0" for device in found["devices"])
    assert bool(found["no_gpu_reason"]) != any(
        device["runtime"] == "cuda" for device in found["devices"]
    )
    assert found["pools"]["cpu"]["limit"] > 0
    assert isinstance(found["build"]["cuda"], bool)
    text = printed("info")
    assert found["no_gpu_reason"] in text
    assert "a quarter of the memory" in text


def test_info_says_where_the_limit_comes_from():
    found = json.loads(printed("info", "--json", STREAMLAP_PINNED_LIMIT="1GiB"))
    assert found["pools"]["cpu"]["limit"] == 1 << 30
    assert found["pool_limit_from"] == "STREAMLAP_PINNED_LIMIT"


@pytest.mark.parametrize(
    ("processes", "says"),
    [
        ("4", "a quarter of the memory, divided by LOCAL_WORLD_SIZE=4;"),
        ("1", "a quarter of the memory;"),
        ("0", "LOCAL_WORLD_SIZE='0' is no positive number and was ignored"),
        ("-2", "LOCAL_WORLD_SIZE='-2' is no positive number and was ignored"),
        ("two", "LOCAL_WORLD_SIZE='two' is no positive number and was ignored"),
    ],
)
def test_info_says_what_became_of_the_number_of_processes(processes, says, monkeypatch):
    monkeypatch.delenv("STREAMLAP_PINNED_LIMIT", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    found = info.collect()["pool_limit_from"]
    assert says in found
    divided = sizes.default_pinned_limit() != sizes.memory_total() // 4
    assert divided == ("divided" in found)


def test_version_and_help():
    assert printed("--version") == f"streamlap {__version__}\n"
    for arguments in (["--help"], ["demo", "--help"], ["info", "--help"]):
        assert "examples:" in printed(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        (["no_such"], "demo"),
        (["info", "more"], "more"),
        (["demo", "--no-such"], "--no-such"),
        (["demo", "--n", "-3"], "number from 1 up"),
        (["demo", "--n", "many"], "number from 1 up"),
        (["demo", "--n", "10001"], "most is 10000"),
        (["demo", "--n", "9" * 5000], "from 1 up"),
        (["demo", "--size", "0"], "number from 1 up"),
        (["demo", "--size", "10000000"], "smaller"),
        (["demo", "--repeat", "0"], "number from 1 up"),
        (["demo", "--device", "tpu"], "cuda:0"),
        (["demo", "--device", "cuda:-1"], "cuda:0"),
        (["demo", "--device", "cuda:999"], "GPU"),
        (["demo", "--dtype", "fp64"], "bf16"),
        (["demo", "--device", "cpu", "--dtype", "tf32"], "fp32"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(arguments, says, capsys):
    try:
        status = cli.main(arguments)
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    assert captured.err.startswith("streamlap")
    assert says in captured.err


def test_bad_arguments_as_a_user_meets_them():
    done = streamlap("no_such")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_reader_that_leaves_early_gets_no_complaint():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "streamlap", "info"],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_full_disk_is_said_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "streamlap", "info"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_the_limit_is_measured_by_code_that_imports_nothing_of_ours():
    tree = ast.parse(Path(limit.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("streamlap") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert not (node.module or "").startswith("streamlap")
