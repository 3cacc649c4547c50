"""The bench binary: built by setup.py, run as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamlap import __version__

ROOT = Path(__file__).resolve().parents[1]
BINARY = ROOT / "build" / "streamlap-bench"
TINY = {
    "bandwidth": ("--bytes", "256KiB"),
    "pool": ("--bytes", "4MiB"),
    "overlap": ("--n", "6", "--size", "48"),
    "small": ("--n", "900", "--size", "1KiB"),  # more than fit behind one gate
}
WAYS = {
    "compute alone",
    "copy alone",
    "run, then copy",
    "one stream",
    "side stream by hand",
    "streamlap",
}
BY_HAND = {
    f"{pages}, {threads}"
    for pages in ("huge pages", "4 KiB pages")
    for threads in ("1 thread", "4 threads", "8 threads")
}
pytestmark = pytest.mark.timeout(300)  # the first test builds, perhaps everything
REUSE = {"take, give back", "take, record a use, give back"}


@pytest.fixture(scope="session", autouse=True)
def binary():
    """Build it, with CUDA where there is nvcc."""
    command = [sys.executable, "setup.py", "-q", "bench"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "built build/streamlap-bench" in built.stdout
    return BINARY


def bench(*arguments, **environment):
    return subprocess.run(
        [BINARY, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | environment,
    )


def printed(*arguments, **environment):
    done = bench(*arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def measured(mode, *arguments, repeat=2, **environment):
    command = (mode, *TINY[mode], "--repeat", str(repeat), "--json", *arguments)
    found = json.loads(printed(*command, **environment))
    assert found["mode"] == mode
    assert found["verified"] is True
    assert found["faults"] == []
    assert found["settings"]["repeat"] == repeat
    assert found["versions"]["streamlap"] == __version__
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory"] > 1 << 20
    for row in found["rows"]:
        assert len(row["samples"]) == repeat
        assert 0 < row["min"] <= row["median"] <= row["max"]
        assert row["min"] == min(row["samples"])
    return found


def names(found, **labels):
    return {
        row["row"]
        for row in found["rows"]
        if all(row[key] == value for key, value in labels.items())
    }


def check_bandwidth(found, device):
    for memory in ("pinned", "pageable"):
        for size in (16384, 65536, 262144):
            assert names(found, device=device, memory=memory, size=size) == {
                "D2H",
                "H2D",
                "both at once",
            }
    assert {row["size"] for row in found["rows"]} == {16384, 65536, 262144}
    assert {row["unit"] for row in found["rows"]} == {"GB/s"}


def check_overlap(found, device, dtype):
    rows = {
        row["row"]: row for row in found["rows"] if (row["device"], row["dtype"]) == (device, dtype)
    }
    assert set(rows) == WAYS
    limit = max(rows["compute alone"]["median"], rows["copy alone"]["median"])
    for row in rows.values():
        assert row["unit"] == "s"
        assert row["x_limit"] == pytest.approx(row["median"] / limit, rel=1e-6)


def check_small(found, ways):
    for clock in ("wall", "device"):
        assert names(found, clock=clock, size=1024) == ways
    assert found["settings"]["n"] == 900


def test_bandwidth_on_the_cpu():
    found = measured("bandwidth", "--device", "cpu")
    assert found["runtime"] == "host"
    assert any("stand in for a GPU" in note for note in found["notes"])
    check_bandwidth(found, "cpu:0")


def test_bandwidth_of_one_size():
    found = measured("bandwidth", "--device", "cpu", "--size", "100000")
    assert {(row["size"], row["copies"]) for row in found["rows"]} == {(100000, 2)}


def test_pool_on_the_cpu():
    found = measured("pool", "--device", "cpu")
    assert names(found, unit="GB/s") == BY_HAND | {"PinnedPool"}
    assert names(found, unit="us", block=1 << 20) == REUSE
    assert names(found, unit="us", block=1 << 16) == REUSE
    assert all(row["register"] is None for row in found["rows"] if row["row"] in BY_HAND)


def test_overlap_on_the_cpu():
    found = measured("overlap", "--device", "cpu")
    assert {row["dtype"] for row in found["rows"]} == {"fp32"}
    check_overlap(found, "cpu:0", "fp32")


@pytest.mark.parametrize("n", ["1", "4", "5", "70"])
def test_overlap_with_more_and_fewer_items_than_buffers(n):
    found = measured("overlap", "--device", "cpu", "--n", n, "--size", "9", repeat=1)
    assert found["settings"]["n"] == int(n)
    check_overlap(found, "cpu:0", "fp32")


def test_small_on_the_cpu():
    found = measured("small", "--device", "cpu")
    check_small(found, {"loop of copies", "streamlap", "one big copy"})


@pytest.mark.parametrize("size", ["1", "13", "5000"])
def test_small_of_odd_sizes(size):
    found = measured("small", "--device", "cpu", "--size", size, "--n", "37", repeat=1)
    assert {row["size"] for row in found["rows"]} == {int(size)}


def test_two_logical_devices_at_once_where_there_is_no_gpu():
    found = measured("overlap", "--gpus", "all", CUDA_VISIBLE_DEVICES="")
    assert found["runtime"] == "host"
    assert any(note.startswith("no GPU: ") for note in found["notes"])
    for device in ("cpu:0", "cpu:1", "all"):
        check_overlap(found, device, "fp32")
    found = measured("bandwidth", "--gpus", "all", CUDA_VISIBLE_DEVICES="")
    for device in ("cpu:0", "cpu:1", "all"):
        check_bandwidth(found, device)


@pytest.mark.parametrize("mode", TINY)
def test_the_table(mode):
    lines = printed(mode, "--device", "cpu", *TINY[mode], "--repeat", "1").splitlines()
    assert lines[0] == f"streamlap-bench {__version__} {mode} on the CPU"
    assert "repeat 1" in lines[1]
    assert lines[2].startswith("note: ")
    assert lines[-1] == "every row's results were checked, byte by byte"
    header = next(line for line in lines if line.startswith("  device"))
    assert " row " in header
    assert sum(line.startswith("  cpu:0") for line in lines) >= 5


@pytest.mark.parametrize("mode", ["bandwidth", "pool", "overlap", "small"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_wrong_result_is_reported(mode, form):
    arguments = (mode, "--device", "cpu", *TINY[mode], "--repeat", "1", *form)
    done = bench(*arguments, STREAMLAP_BENCH_BREAK="1")
    assert done.returncode == 1
    assert done.stderr.startswith("streamlap-bench: wrong results: ")
    assert done.stderr.count("\n") == 1
    if form:
        found = json.loads(done.stdout)
        assert found["verified"] is False
        assert found["faults"]
    else:
        assert "WRONG: " in done.stdout
        assert "were checked" not in done.stdout


def test_help_and_version():
    assert printed("--version") == f"streamlap-bench {__version__}\n"
    for arguments in (["--help"], *([mode, "--help"] for mode in TINY)):
        text = printed(*arguments)
        assert text.startswith("usage: streamlap-bench ")
        assert "examples:" in text
        assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "which mode"),
        (["no_such"], "bandwidth, pool, overlap or small"),
        (["--json"], "mode comes first"),
        (["--json", "pool"], "mode comes first"),
        (["pool", "--no-such"], "--no-such"),
        (["pool", "more"], "more"),
        (["pool", "--n", "3"], "no option '--n'"),
        (["pool", "--gpus", "all"], "no option '--gpus'"),
        (["small", "--bytes", "3"], "no option '--bytes'"),
        (["bandwidth", "--dtype", "fp32"], "no option '--dtype'"),
        (["overlap", "--n"], "--n needs a value"),
        (["overlap", "--n", "--json"], "--n needs a value"),
        (["overlap", "--n", ""], "from 1 up"),
        (["overlap", "--n", "many"], "from 1 up"),
        (["overlap", "--n", "3x"], "from 1 up"),
        (["overlap", "--n", "1.5"], "from 1 up"),
        (["overlap", "--n", "-3"], "from 1 up"),
        (["overlap", "--n", "0"], "from 1 up"),
        (["overlap", "--n=0"], "from 1 up"),
        (["overlap", "--n", "2049"], "most is 2048"),
        (["overlap", "--n", "9" * 500], "too large"),
        (["overlap", "--size", "64MiB"], "from 1 up"),
        (["overlap", "--repeat", "0"], "from 1 up"),
        (["overlap", "--dtype", "fp64"], "fp32, tf32 or bf16"),
        (["overlap", "--device", "cpu", "--dtype", "tf32"], "needs a GPU"),
        (["overlap", "--device", "cpu", "--size", "50000", "--n", "2048"], "smaller --n or --size"),
        (["bandwidth", "--bytes", "0"], "from 1 byte up"),
        (["bandwidth", "--bytes", "-1MiB"], "from 1 byte up"),
        (["bandwidth", "--bytes", "nan"], "from 1 byte up"),
        (["bandwidth", "--bytes", "inf"], "too large"),
        (["bandwidth", "--bytes", "MiB"], "from 1 byte up"),
        (["bandwidth", "--bytes", "3 apples"], "like 64MiB"),
        (["bandwidth", "--bytes", "9" * 400], "too large"),
        (["bandwidth", "--bytes", "9" * 40 + "GiB"], "too large"),
        (["bandwidth", "--device", "cpu", "--bytes", "8000TiB"], "smaller --bytes"),
        (["bandwidth", "--size", "2MiB", "--bytes", "1MiB"], "raise --bytes"),
        (["pool", "--device", "cpu", "--bytes", "900TiB"], "smaller --bytes"),
        (["small", "--device", "cpu", "--size", "1TiB"], "smaller --n or --size"),
        (["small", "--device", "cpu", "--size", "8000TiB"], "smaller --n or --size"),
        (["pool", "--device", "tpu"], "or cpu"),
        (["pool", "--device", ""], "or cpu"),
        (["pool", "--device", "cuda:0"], "number of a GPU"),
        (["pool", "--device", "-1"], "number of a GPU"),
        (["pool", "--device", "999"], "no such GPU"),
        (["pool", "--device", "99999999999999999999"], "number of a GPU"),
        (["overlap", "--gpus", "some"], "--gpus all"),
        (["overlap", "--gpus", "2"], "--gpus all"),
        (["overlap", "--gpus"], "--gpus needs a value"),
        (["overlap", "--gpus", "all", "--device", "cpu"], "give one of them"),
        (["overlap", "--device", "0", "--gpus", "all"], "give one of them"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(arguments, says):
    done = bench(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("streamlap-bench: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("4MiB", 4 << 20), ("4mib", 4 << 20), ("0.5 MB", 500_000), ("70000", 70_000)]
)
def test_sizes_are_read(text, size):
    arguments = ("--device", "cpu", "--bytes", text, "--repeat", "1", "--json")
    assert json.loads(printed("bandwidth", *arguments))["settings"]["bytes"] == size


@pytest.mark.parametrize("mode", ["bandwidth", "overlap"])
def test_ctrl_c_ends_it_at_once(mode):
    process = subprocess.Popen(
        [BINARY, mode, "--device", "cpu", "--repeat", "10000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    status = Path(f"/proc/{process.pid}/status")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        # Two worker threads at least, so the mode is running and the signal is caught by then.
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        if int(fields["SigCgt"], 16) & 1 << signal.SIGINT - 1 and int(fields["Threads"]) >= 2:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "streamlap-bench: interrupted\n")


def test_a_reader_that_leaves_early_gets_no_complaint():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([BINARY, "--help"], stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_full_disk_is_said_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [BINARY, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_it_needs_no_python():
    needed = subprocess.run(["ldd", BINARY], capture_output=True, text=True, check=True).stdout
    assert "python" not in needed


@pytest.mark.gpu
def test_bandwidth_on_a_gpu():
    found = measured("bandwidth", "--device", "0")
    assert found["runtime"] == "cuda"
    assert found["machine"]["gpus"][0]["memory"] > 0
    assert "CUDA_driver" in found["versions"]
    check_bandwidth(found, "cuda:0")


@pytest.mark.gpu
def test_pool_on_a_gpu():
    found = measured("pool", "--device", "0")
    assert names(found, unit="GB/s") == BY_HAND | {"cudaHostAlloc", "PinnedPool"}
    assert all(row["register"] > 0 for row in found["rows"] if row["row"] in BY_HAND)
    assert names(found, unit="us") == REUSE


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["48", "61", "512"])
def test_overlap_on_a_gpu(size):
    # It fails in a build without cuBLAS, and says how to get it.
    found = measured("overlap", "--device", "0", "--n", "20", "--size", size)
    assert found["versions"]["cuBLAS"]
    for dtype in ("fp32", "tf32", "bf16"):
        check_overlap(found, "cuda:0", dtype)


@pytest.mark.gpu
def test_more_items_than_a_driver_queues():
    found = measured("overlap", "--device", "0", "--n", "2048", "--size", "16", "--dtype", "bf16")
    check_overlap(found, "cuda:0", "bf16")


@pytest.mark.gpu
def test_small_on_a_gpu():
    check_small(
        measured("small", "--device", "0"),
        {"loop of cudaMemcpyAsync", "cudaMemcpyBatchAsync", "streamlap", "one big copy"},
    )


@pytest.mark.two_gpus
def test_all_gpus_at_once():
    for mode, check in (("bandwidth", check_bandwidth), ("overlap", check_overlap)):
        dtype = ("tf32",) if mode == "overlap" else ()
        found = measured(mode, "--gpus", "all", *(("--dtype", *dtype) if dtype else ()))
        for device in ("cuda:0", "cuda:1", "all"):
            check(found, device, *dtype)
