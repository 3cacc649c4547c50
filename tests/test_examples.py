"""The examples run as they are, on the host runtime, and do what they say."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(name, *arguments):
    # Without a GPU, and without threads that spin for the cores of a busy machine.
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


def test_digits_are_learnt_the_same_with_and_without_the_helpers():
    done = run("digits_prefetch.py", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("plain: 15 steps")
    assert float(lines[0].split()[-2].rstrip("%")) > 60
    assert [line.split(":")[1] for line in lines[1:]] == [
        " the losses are the same, bit for bit"
    ] * 3
    assert done.stderr == ""
