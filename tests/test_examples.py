"""The examples run, and do what they say."""

import os
import runpy
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


def test_a_gpt_s_gradients(where, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "gpt_gradients.py"), run_name="example")
    example["main"](["--device", where, "--steps", "6"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("loss ") for line in lines[:-1])
    assert lines[-1].startswith("6 steps: losses and parameters are those of the plain loop")
    losses = [float(line.split()[1].rstrip(",")) for line in lines[:-1]]
    assert losses[-1] < losses[0]
