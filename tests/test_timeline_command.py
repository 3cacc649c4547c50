"""``streamlap timeline`` as a user runs it, and NVTX ranges as a profiler gets them."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

TINY = ("--size", "64", "--n", "4", "--repeat", "2")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | environment,
    )


def timeline(*arguments):
    return run("-m", "streamlap", "timeline", *arguments)


def test_trace_picture_and_summary(where, tmp_path):
    out = tmp_path / "job"
    done = timeline(*TINY, "--device", where, "--out", str(out), "--format", "svg")
    assert (done.returncode, done.stderr) == (0, "")
    events = json.loads((tmp_path / "job.json").read_text())["traceEvents"]
    kinds = [event["cat"] for event in events if event["ph"] == "X"]
    assert (kinds.count("compute"), kinds.count("copy")) == (4, 4)
    picture = (tmp_path / "job.svg").read_text()
    assert "4 products of 64x64, fp32" in picture
    device = "cpu:0" if where == "cpu" else where
    lines = done.stdout.splitlines()
    assert lines[0] == f"4 products of 64x64, fp32 on {device}"
    assert re.match(r"[\d.]+ s, [\d.]+ x the limit", lines[1])
    assert any(line.startswith("advice: ") for line in lines)
    assert any(line.startswith("by the stopwatch: compute alone ") for line in lines)
    assert lines[-1] == f"written: {out}.json, {out}.svg"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "job.svg"]


def test_a_suffix_in_out_is_no_second_one(tmp_path):
    done = timeline(*TINY, "--device", "cpu", "--out", str(tmp_path / "job.png"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "job.png"]
    (tmp_path / "q.png").mkdir()
    done = timeline(*TINY, "--device", "cpu", "--out", str(tmp_path / "q"))
    assert done.returncode == 2
    assert "q.png' cannot be written" in done.stderr
    assert not (tmp_path / "q.json").exists()


def test_without_a_picture_matplotlib_is_not_needed(tmp_path):
    code = (
        "import sys, importlib.util; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'matplotlib' else real(n, *a)\n"
        "sys.modules['matplotlib'] = None\n"
        "from streamlap.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    out = str(tmp_path / "job")
    common = ("timeline", *TINY, "--device", "cpu", "--out", out)
    done = run("-c", code, *common)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        'streamlap: the picture needs matplotlib: pip install "streamlap[viz]", or pass --no-plot'
    )
    done = run("-c", code, *common, "--no-plot")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--size", "0"),
        ("--n", "-1"),
        ("--n", "many"),
        ("--repeat", "0"),
        ("--device", "tpu"),
        ("--device", "cuda:99"),
        ("--dtype", "int8"),
        ("--format", "gif"),
        ("--out", "no/such/folder/t"),
        ("--out", ""),
        ("--out", "./"),
        ("--out", "tests/"),
        ("--size", "99999999999999999999999"),
        ("--size", "1_0"),
        ("--repeat", "99999999"),
        ("--dtype", "tf32", "--device", "cpu"),
        ("surplus",),
        ("--unknown",),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments):
    done = timeline(*arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


INJECTION = r"""
#include <stdio.h>
#include <stdlib.h>
#include <nvtx3/nvToolsExt.h>
/* A profiler in its smallest form: writes the name of each range to a file. */
static void note(const char* name) {
  FILE* file = fopen(getenv("RANGES"), "a");
  fprintf(file, "%s\n", name);
  fclose(file);
}
static int push(const char* name) { note(name); return 0; }
static int pop(void) { note("-"); return 0; }
__attribute__((visibility("default")))
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const NvtxExportTableCallbacks* callbacks =
      (const NvtxExportTableCallbacks*)get(NVTX_ETID_CALLBACKS);
  NvtxFunctionTable table;
  unsigned size;
  if (!callbacks) return 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
  *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
  return 1;
}
"""

JOB = """
import torch, streamlap
x = torch.rand(64, 64, device="cuda")
streamlap.pipelined_run(x, n=2)
streamlap.to_device(torch.ones(4), "cuda").result()
"""


@pytest.mark.gpu
def test_a_profiler_gets_nvtx_ranges(tmp_path):
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    source, library = tmp_path / "profiler.c", tmp_path / "profiler.so"
    ranges = tmp_path / "ranges"
    source.write_text(INJECTION)
    subprocess.run(
        [nvcc, "-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(source)], check=True
    )
    done = run("-c", JOB, NVTX_INJECTION64_PATH=str(library), RANGES=str(ranges))
    assert (done.returncode, done.stderr) == (0, "")
    names = [line for line in ranges.read_text().splitlines() if line.startswith("streamlap: ")]
    nbytes = 64 * 64 * 4
    assert [name for name in names if "wait" not in name] == [
        "streamlap: fn 0",
        f"streamlap: cuda:0 to host, {nbytes} bytes",
        "streamlap: fn 1",
        f"streamlap: cuda:0 to host, {nbytes} bytes",
        "streamlap: cuda:0 to device (staged), 16 bytes",
    ]
    ranges.unlink()
    done = run("-c", JOB, RANGES=str(ranges))
    assert (done.returncode, done.stderr) == (0, "")
    assert not ranges.exists()
