"""The examples run, and say what they promise."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_a_gpt_s_gradients(where, capsys):
    example = runpy.run_path(str(EXAMPLES / "gpt_gradients.py"), run_name="example")
    example["main"](["--device", where, "--steps", "6"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("loss ") for line in lines[:-1])
    assert lines[-1].startswith("6 steps: losses and parameters are those of the plain loop")
    losses = [float(line.split()[1].rstrip(",")) for line in lines[:-1]]
    assert losses[-1] < losses[0]
