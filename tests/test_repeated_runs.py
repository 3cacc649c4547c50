"""What runs tests under the sanitizers and in the soak: a failure there must not go unseen."""

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def load(path):
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def soak(tmp_path, monkeypatch):
    module = load(TESTS / "soak.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    return module


@pytest.fixture
def sanitize(tmp_path, monkeypatch):
    module = load(TESTS / "sanitize" / "run.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


# -- soak


def parts(soak):
    return [
        soak.Part("good", ("-c", "assert {seed} > 0")),
        soak.Part("odd", ("-c", "print('seen'); assert {seed} % 2")),
    ]


def test_a_failure_of_a_part_can_be_replayed(soak, capfd):
    assert soak.main(["--rounds", "4", "--seed", "7"], parts(soak)) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == ("soak: 4 whole rounds: good 4 passed 0 failed, odd 2 passed 2 failed")
    replays = [line.removeprefix("soak: replay: ") for line in said if "replay" in line]
    assert len(replays) == 2
    for line in replays:
        assert subprocess.run(shlex.split(line), capture_output=True).returncode == 1
    assert "seen" in (soak.LOGS / "odd-8.log").read_text()
    assert not (soak.LOGS / "odd-7.log").exists()


def test_a_hang_is_a_failure(soak, capfd, monkeypatch):
    monkeypatch.setattr(soak, "HUNG", 0.5)
    part = soak.Part("hangs", ("-c", "import time; time.sleep(60)"))
    assert soak.main(["--rounds", "1"], [part]) == 1
    assert "it hung" in capfd.readouterr().out


def test_when_all_is_well_and_the_time_is_over(soak, capfd):
    assert soak.main(["--minutes", "0", "--seed", "7"], parts(soak)) == 0
    assert "soak: 1 whole rounds: good 1 passed 0 failed, odd 1 passed" in capfd.readouterr().out


def test_every_part_of_the_soak_knows_its_files_and_takes_a_seed(soak):
    for part in soak.PARTS:
        assert part.command(5) != part.command(6)
        for word in part.command(5):
            if word.startswith("tests/"):
                assert (TESTS.parent / word).is_file(), word


# -- sanitizers


@pytest.mark.parametrize("kind", ["thread", "address", "undefined"])
def test_a_report_and_a_status_are_failures(sanitize, kind):
    run = sanitize.Run(kind)
    run.check("step", 0, "")
    with pytest.raises(sanitize.FailureError, match="status 3"):
        run.check("step", 3, "")
    with pytest.raises(sanitize.FailureError, match="status None"):
        run.check("step", None, "")
    (run.reports / "report.1").write_text("SUMMARY: Sanitizer: something\n")
    with pytest.raises(sanitize.FailureError, match=r"1 reports.*\n.*something"):
        run.check("step", 0, "")


@pytest.mark.parametrize("kind", ["thread", "address", "undefined"])
@pytest.mark.parametrize(
    "says",
    [
        "exit 66",
        "echo something else in fault_x > {reports}/report.1; exit 66",
        "echo '{text} in fault_x' > {reports}/report.1; exit 0",
    ],
)
def test_a_fault_that_is_not_reported_is_a_failure(sanitize, kind, says):
    run = sanitize.Run(kind)
    text = next(iter(sanitize.FAULTS[kind].values()))
    program = run.tree / "tests" / "faults"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n" + says.format(reports=run.reports, text=text) + "\n")
    program.chmod(0o755)
    with pytest.raises(sanitize.FailureError, match="proves nothing"):
        run.deliberate_faults()


def test_every_file_under_the_sanitizers_exists(sanitize):
    for name in sanitize.FILES:
        assert (TESTS / name).is_file(), name


def test_every_suppression_has_its_reason():
    for path in (TESTS / "sanitize").glob("*.supp"):
        reason = False
        for line in path.read_text().splitlines()[1:]:
            if line.startswith("#"):
                reason = True
            elif not line:
                reason = False
            else:
                assert reason, f"{path.name}: {line}"
