"""Predictions: the closed form, the figures that were measured, and senseless arguments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import streamlap
from streamlap.prediction import MACHINES, Machine, predict

ROOT = Path(__file__).resolve().parents[1]
H200 = MACHINES["h200"]
BYTES = {"fp32": 64_000_000, "tf32": 64_000_000, "bf16": 32_000_000}


def closed_form(g, c, n):
    """As the pipeline would be with launches that cost nothing and whole items."""
    return n * max(g, c) + min(g, c)


@pytest.mark.parametrize("n", [1, 2, 50])
@pytest.mark.parametrize("depth", [2, 4, 50])
@pytest.mark.parametrize(("g", "c"), [(3e-3, 1e-3), (1e-3, 3e-3), (1e-3, 1e-3), (1e-6, 1.0)])
def test_it_agrees_with_the_closed_form(g, c, n, depth):
    machine = Machine("one", to_host=1e9, per_copy=0.0, products={})
    found = predict(g, round(c * 1e9), n, depth=depth, machine=machine)
    assert found.seconds == pytest.approx(closed_form(g, c, n), rel=1e-6)
    assert (found.compute, found.copy) == pytest.approx((n * g, n * c))
    assert found.limit == max(found.compute, found.copy)
    assert found.one_by_one == found.compute + found.copy


def test_a_depth_of_one_takes_turns():
    machine = Machine("one", to_host=1e9, per_copy=0.0, products={})
    found = predict(1e-3, 10**6, 10, depth=1, machine=machine)
    assert found.seconds == pytest.approx(10 * 2e-3)


@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_it_agrees_with_what_was_measured(dtype):
    path = ROOT / "benches" / "results" / "binary" / "overlap-nvidia-h200.json"
    rows = json.loads(path.read_text())["rows"]
    (measured,) = (
        row["x_limit"] for row in rows if (row["row"], row["dtype"]) == ("streamlap", dtype)
    )
    found = predict(H200.products[dtype], BYTES[dtype], 50)
    assert found.over_limit == pytest.approx(measured, rel=0.01)


def test_nothing_takes_no_time():
    assert predict(1.0, 100, 0).seconds == 0
    assert predict(0.0, 0, 0).over_limit == 1.0
    assert predict(1e-3, 0, 5).seconds == pytest.approx(5e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((-1.0, 10), {}),
        ((float("nan"), 10), {}),
        ((1.0, -1), {}),
        ((1.0, 10, -1), {}),
        ((1.0, 10, 5), {"depth": 0}),
        ((1.0, 10, 5), {"machine": "abacus"}),
        (("soon", 10), {}),
        ((1.0, 1.5), {}),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, options):
    with pytest.raises((streamlap.InvalidArgument, streamlap.InvalidType)):
        predict(*arguments, **options)


def test_the_demo_predicts():
    def demo(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "streamlap", "demo", "--simulate", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )

    done = demo("h200")
    assert (done.returncode, done.stderr) == (0, "")
    assert "predicted" in done.stdout
    for word in ("fp32", "tf32", "pipelined_run", "run then copy"):
        assert word in done.stdout
    found = json.loads(demo("h200", "--json", "--n", "10", "--size", "2000").stdout)
    assert found["predicted"] is True
    rows = {(row["dtype"], row["row"]): row for row in found["rows"]}
    assert rows["fp32", "compute alone"]["seconds"] == pytest.approx(
        10 * H200.products["fp32"] / 8, rel=1e-6
    )
    done = demo("abacus")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
