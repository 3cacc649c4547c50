"""The benches of the training helpers, run as a user runs them: small. No timing is tested here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = {"prefetch": 7, "activations": 6}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_quick_run_measures_every_row(where, name):
    command = [sys.executable, "-m", f"benches.{name}", "--quick", "--rounds", "1", "--json"]
    done = subprocess.run(
        [*command, "--device", where],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == ROWS[name]
    for row in rows:
        if row["failed"] and row["row"].startswith("torchtune"):
            assert row["failed"].startswith("missing")
            continue
        assert row["failed"] is None
        assert row["seconds"] > 0
    ours = [row for row in rows if row["row"].startswith(("Prefetcher", "offload"))]
    assert all(row["moved_bytes"] > 0 for row in ours)


def test_a_wrong_result_is_a_failed_row():
    code = (
        "from benches.turns import Turn, take_turns, report\n"
        "import torch\n"
        "rows = [Turn('right', lambda: 1), Turn('wrong', lambda: 2)]\n"
        "take_turns(rows, torch.device('cpu'), 1)\n"
        "raise SystemExit(report(rows, False))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "wrong result" in done.stdout
