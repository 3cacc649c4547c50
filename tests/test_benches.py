"""The bench scripts run, small, and say what they need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).parent.parent / "benches" / "job.py"


def run_job(*arguments):
    command = [sys.executable, str(JOB), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    ended = run_job()
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_it_measures_every_row(dtype):
    ended = run_job("--size", "256", "--n", "8", "--rounds", "3", "--dtype", dtype)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["right"] is True
    assert {"compute alone", "copy alone", "side stream by hand", "pipelined_run"} == set(
        found["rows"]
    )
    assert all(row["seconds"] > 0 for row in found["rows"].values())
