"""The bench suite, run as a user runs it: small, on the CPU. No timing is tested here."""

import ast
import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import streamlap
from streamlap import bench, cli
from streamlap.errors import InvalidArgument

ROOT = Path(__file__).parent.parent
JOB = {"compute alone", "copy alone", "run, then copy", "thread by hand", "pipelined_run"}
MEMORY = {"torch.empty", "empty_pinned"}
SMALL = {
    "copy_ each, ready",
    "_foreach_copy_, ready",
    ".to(copy=True) each",
    "torch.cat, one copy, ready",
    "to_cpu(list)",
}
LINK = "one copy of as many bytes"
TREES = {
    *("copy_ each, ready", "torch.cat, one copy, ready"),
    *("to_cpu(list)", "TreeCopy", "TreeCopy, ready"),
}
CALLS = {".to(copy=True)", "to_cpu"}
HOOKS = {"hooks by hand, ready", ".cpu() afterwards", "stream_gradients"}
STEP = {*HOOKS, "forward and backward alone", "non_blocking afterwards"}
STEP |= {"stream_gradients(free=True)"}
JOB_ON_GPU = {
    "compute alone",
    "copy alone",
    "stock .cpu()",
    "stock non_blocking",
    "side stream by hand",
    "row panels by hand",
    "CuPy by hand",
    "pipelined_run",
    "pipelined_run, panels=1",
}


def suite(module="suite"):
    return bench.load(module)


def run_bench(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "streamlap", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | environment,
    )


def files_of_results():
    return {path: path.stat().st_mtime_ns for path in (ROOT / "benches" / "results").iterdir()}


@pytest.fixture(scope="module")
def printed():
    before = files_of_results()
    ended = run_bench("--device", "cpu", "--quick", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert files_of_results() == before  # a quick run is no result
    return ended.stdout


@pytest.fixture(scope="module")
def document(printed):
    return json.loads(printed)


def quick(capsys, *arguments):
    """Run in this process; return the status, the document and what was said."""
    status = cli.main(["bench", "--device", "cpu", "--quick", "--json", *arguments])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def row_of(document, name):
    return next(row for table in document["tables"] for row in table["rows"] if row["row"] == name)


# -- what a run gives


def test_every_group_that_means_something_on_a_cpu_has_its_rows(document):
    found = [(t["group"], {row["row"] for row in t["rows"]}) for t in document["tables"]]
    assert found == [
        ("job", JOB),
        *[("pinned", MEMORY), ("pinned", {*MEMORY, "prewarm"}), ("pinned", MEMORY)],
        *[("small", SMALL)] * 3,
        ("small", CALLS),
        *[("kernels", {LINK, "TreeCopy, ready"})] * 4,
        ("kernels", {"in fp32, by a TreeCopy", "as bf16"}),
        ("kernels", {LINK, "a transpose"}),
        ("kernels", {LINK, "to_device(out=)"}),
        *[("kernels", TREES)] * 4,
        ("kernels", {"to(dtype), copy_ each, ready", "to_cpu(dtype=)", "TreeCopy(dtype=), ready"}),
        ("kernels", {"contiguous(), copy_, ready", "to_cpu(out=)"}),
        ("kernels", {"copy_ each", "to_device(out=)"}),
        ("gradients", {*STEP, "copies alone"}),
        ("gradients", STEP),
        ("gradients", {*HOOKS, "backward alone"}),
    ]
    left_out = {note.split()[0] for note in document["notes"] if "is left out" in note}
    assert left_out == {"first", "ordinary", "tiny", "two_gpus"}


def test_every_row_was_measured_each_round_and_checked_at_both_ends(document):
    for table in document["tables"]:
        for row in table["rows"]:
            assert row["failed"] is None
            assert len(row["samples"]) == document["settings"]["rounds"] == 3
            assert row["checks"] == 2
            assert 0 < row["min"] <= row["q1"] <= row["seconds"] <= row["q3"] <= row["max"]
            assert row["ratio"] == row["seconds"] / table["reference_seconds"]


def test_ratios_are_to_the_limit_or_to_the_best_peer(document):
    for table in document["tables"]:
        limits = [row["seconds"] for row in table["rows"] if row["kind"] == "limit"]
        assert (table["against"] == "limit") == bool(limits)
        if limits:
            best = max(limits)
        else:
            best = min(row["seconds"] for row in table["rows"] if row["kind"] == "peer")
        assert table["reference_seconds"] == best
        ours = [row["row"] for row in table["rows"] if row["kind"] == "ours"]
        again = ("TreeCopy", "prewarm", "stream_gradients(free=True)")  # other ways of ours
        assert ours
        assert sum(not name.startswith(again) for name in ours) <= 1


def test_a_document_says_what_it_was_measured_on(document):
    assert document["versions"]["streamlap"] == streamlap.__version__
    assert document["versions"]["torch"] == torch.__version__
    assert document["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert document["machine"]["cpu"]
    assert document["commit"]
    assert document["settings"]["quick"] is True


def test_a_document_names_no_host_no_user_and_no_path(printed):
    words = set(re.findall(r"[\w.-]+", printed))
    assert socket.gethostname() not in words
    assert getpass.getuser() not in words
    assert not re.search(r"(?<![\w.])/\w+", printed)
    assert str(Path.home()) not in printed


def test_the_table_has_the_same_rows(capsys):
    assert cli.main(["bench", "--device", "cpu", "--quick", "--group", "job"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert {line[2:30].strip() for line in captured.out.splitlines() if "GB/s" not in line} >= JOB
    assert "x limit" in captured.out
    assert "no GPU takes part" in captured.out


# -- failures


class Broken(Exception):
    pass


def breaks(*_):
    raise Broken("no /usr/lib/libnone.so.1\nand more")


@pytest.mark.parametrize("when", ["__init__", "go"])
def test_a_peer_that_fails_is_a_failed_row_and_the_others_go_on(when, monkeypatch, capsys):
    monkeypatch.setattr(suite("peers.stock_cpu").RunThenCopy, when, breaks)
    status, found, said = quick(capsys, "--group", "job")
    assert status == 1
    assert said.count("\n") == 1
    assert "run, then copy: Broken: no libnone.so.1 and more" in said
    failed = row_of(found, "run, then copy")
    assert failed["failed"] == "Broken: no libnone.so.1 and more"
    assert (failed["seconds"], failed["ratio"], failed["samples"]) == (None, None, [])
    for name in JOB - {"run, then copy"}:
        assert len(row_of(found, name)["samples"]) == 3


def test_a_failed_row_is_in_the_table(monkeypatch, capsys):
    monkeypatch.setattr(suite("peers.stock_cpu").RunThenCopy, "go", breaks)
    assert cli.main(["bench", "--device", "cpu", "--quick", "--group", "job"]) == 1
    assert "FAILED: Broken: no libnone.so.1 and more" in capsys.readouterr().out


def test_gradients_that_are_not_those_of_their_pass_are_a_failure(monkeypatch, capsys):
    ours = suite("groups.gradients").StreamGradients
    collect = ours.collect
    monkeypatch.setattr(ours, "collect", lambda way: [2 * grad for grad in collect(way)])
    status, found, _ = quick(capsys, "--group", "gradients")
    assert status == 1
    for table in found["tables"]:
        for row in table["rows"]:
            assert (row["failed"] or "").startswith("wrong result") == (row["kind"] == "ours")


def test_without_its_limit_a_table_has_no_ratios(monkeypatch, capsys):
    monkeypatch.setattr(suite("groups.job").CopyAlone, "go", breaks)
    status, found, _ = quick(capsys, "--group", "job")
    assert status == 1
    assert row_of(found, "pipelined_run")["seconds"] > 0
    assert row_of(found, "pipelined_run")["ratio"] is None


def test_a_table_that_cannot_be_made_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(suite("groups.pinned"), "Table", breaks)
    status, found, _ = quick(capsys, "--group", "pinned")
    assert status == 1
    assert [table["rows"][0]["row"] for table in found["tables"]] == ["set-up"] * 3


def test_sources_that_cannot_be_changed_fail_every_row(monkeypatch, capsys):
    change = suite("work").Job.change
    monkeypatch.setattr(
        suite("work").Job, "change", lambda job, index: breaks() if index else change(job, 0)
    )
    status, found, _ = quick(capsys, "--group", "job")
    assert status == 1
    assert all("before round 2" in row["failed"] for row in found["tables"][0]["rows"])


def flipped(results):
    """One bit of the last element of the last result is wrong."""
    results[-1].view(torch.int32).view(-1)[-1] ^= 1
    return results


class Stale:
    """Gives the results of its first call again."""

    def __init__(self, go):
        self.go = go
        self.first = None

    def __call__(self, way):
        if self.first is None:
            self.first = [tensor.clone() for tensor in self.go(way)]
        return [tensor.clone() for tensor in self.first]


def one_less(results):
    return results[:-1]


@pytest.mark.parametrize("wrong", ["a bit", "one less", "stale", "nothing done"])
@pytest.mark.parametrize(
    ("module", "name", "row"),
    [
        ("peers.thread_by_hand", "ThreadByHand", "thread by hand"),
        ("ours", "PipelinedRun", "pipelined_run"),
        ("peers.ready_copies", "CatThenCopy", "torch.cat, one copy, ready"),
    ],
)
def test_a_wrong_result_is_a_failed_row(module, name, row, wrong, monkeypatch, capsys):
    way = getattr(suite(module), name)
    go = way.go
    nothing = {
        "ThreadByHand": lambda self: self.results_on_host,
        "CatThenCopy": lambda self: list(self.flat.split(self.sizes)),
        "PipelinedRun": lambda self: [torch.empty(128, 128) for _ in range(self.n)],
    }
    stale = Stale(go)
    changed = {
        "a bit": lambda self: flipped(go(self)),
        "one less": lambda self: one_less(go(self)),
        "stale": lambda self: stale(self),
        "nothing done": nothing[name],
    }
    monkeypatch.setattr(way, "go", changed[wrong])
    group = "small" if name == "CatThenCopy" else "job"
    status, found, said = quick(capsys, "--group", group)
    assert status == 1
    assert row_of(found, row)["failed"].startswith("wrong result: ")
    assert "wrong result" in said
    others = [one for one in found["tables"][0]["rows"] if one["row"] != row]
    assert [one["failed"] for one in others] == [None] * len(others)


def test_memory_that_is_handed_out_twice_is_noticed():
    checks = suite("checks")
    block = torch.empty(8192, dtype=torch.uint8)
    checks.require_usable([block, block.clone()], pinned=False)
    with pytest.raises(checks.WrongResult, match="shares memory"):
        checks.require_usable([block, block], pinned=False)
    if not torch.cuda.is_available():
        with pytest.raises(checks.WrongResult, match="not page-locked"):
            checks.require_usable([block], pinned=True)


def test_control_c_ends_it_with_130(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(suite("ours").PipelinedRun, "go", interrupt)
    assert cli.main(["bench", "--device", "cpu", "--quick", "--group", "job"]) == 130
    assert capsys.readouterr().err == "streamlap: interrupted\n"


# -- how it measures


def test_rows_take_turns_in_every_round():
    rows, runner = suite("rows"), suite("runner")
    log = []

    class Logged(rows.Way):
        def __init__(self, name):
            self.name = name

        def go(self):
            log.append(self.name)
            return []

    def build():
        made = [rows.Row(name, lambda name=name: Logged(name)) for name in "abc"]
        made.append(rows.Row("slow", lambda: Logged("slow"), rounds=2))
        return rows.Table(made, [], lambda index: log.append(index), list)

    setting = rows.Setting(torch.device("cpu"), True, 9)
    found = runner.run_table(rows.Planned("turns", build), setting, lambda line: None)
    assert [len(row["samples"]) for row in found["rows"]] == [9, 9, 9, 2]
    rounds, current = [], []
    for entry in [*log[1:], 11]:
        if isinstance(entry, int):
            rounds.append(current)
            current = []
        else:
            current.append(entry)
    with_slow = {0, 2, 3}  # the first warm-up, and two that count
    assert len(rounds) == 11
    for index, names in enumerate(rounds):
        assert sorted(names) == sorted([*"abc", *(["slow"] if index in with_slow else [])])
    assert len({tuple(names) for names in rounds if len(names) == 3}) > 1  # not always in one order


def test_the_limit_is_measured_by_code_that_imports_only_torch():
    tree = ast.parse((ROOT / "benches" / "limit.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module.partition(".")[0])
    assert found == {"__future__", "collections", "torch"}


def test_a_fresh_process_measures_and_checks_by_itself(monkeypatch):
    first, rows = suite("groups.first"), suite("rows")
    setting = rows.Setting(torch.device("cpu"), True, 1)
    seconds, _ = first.FreshProcess("pipelined_run", setting, "fp32").timed([])
    assert seconds > 0
    broken = first.FreshProcess("pipelined_run", setting, "fp32")
    broken.request["size"] = -1
    with pytest.raises(rows.Unavailable, match="RuntimeError: "):
        broken.timed([])
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(rows.Unavailable, match="ended with status 1"):
        broken.timed([])


def test_the_commit_comes_from_git_or_the_environment(monkeypatch, tmp_path):
    machine = suite("machine")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("STREAMLAP_COMMIT", raising=False)
    assert machine.commit(tmp_path) == {"commit": "unknown", "dirty": None}
    monkeypatch.setenv("STREAMLAP_COMMIT", "0123456789")
    assert machine.commit(tmp_path) == {"commit": "0123456789", "dirty": None}
    # Copied sources may lie in a checkout of another commit.
    assert machine.commit(ROOT) == {"commit": "0123456789", "dirty": None}
    monkeypatch.delenv("STREAMLAP_COMMIT")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@e"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-qm", "one"], cwd=tmp_path, check=True)
    found = machine.commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", found["commit"])
    assert found["dirty"] is False
    (tmp_path / "file").write_text("two")
    assert machine.commit(tmp_path)["dirty"] is True


# -- results and the page


def test_the_committed_page_is_what_the_results_make():
    report = suite("report")
    assert report.PAGE.read_text() == report.page(report.documents())


def changed(document, **values):
    return json.loads(json.dumps(document)) | values


def test_the_page_has_a_section_a_machine_and_the_newest_of_each_table(document, tmp_path):
    report = suite("report")
    settings = document["settings"] | {"quick": False}
    old = changed(document, date="2026-01-01T10:00:00Z", commit="a" * 40, settings=settings)
    new = changed(document, date="2026-01-02T10:00:00Z", commit="b" * 40, settings=settings)
    new["tables"] = [table for table in new["tables"] if table["group"] == "job"]
    new["tables"][0]["rows"][-1] |= {"failed": "Broken: a|b", "seconds": None}
    gpu = changed(old, commit="c" * 40)
    gpu["machine"] |= {"kind": "NVIDIA H200", "gpus": ["NVIDIA H200"]}
    saved = [suite().save(one, tmp_path).name for one in (old, new, gpu)]
    assert saved[2] == "2026-01-01-100000-nvidia-h200-ccccccc.json"
    suite().save(changed(document, date="2026-02-02T10:00:00Z", commit="d" * 40), tmp_path)
    page = tmp_path / "docs" / "performance.md"
    assert report.write(page, tmp_path) == 3
    text = page.read_text()
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections == ["NVIDIA H200", document["machine"]["kind"]]
    cpu = text.split(f"## {sections[1]}")[1]
    assert cpu.count("### The job, warm") == 1
    job, memory = cpu.split("### Memory of the results")
    assert "commit bbbbbbb" in job
    assert "commit aaaaaaa" not in job
    assert "failed: Broken: a\\|b" in job
    assert "commit aaaaaaa" in memory
    assert "ddddddd" not in text
    assert report.page(report.documents(tmp_path), tmp_path / "binary") == text


def test_a_suite_elsewhere_keeps_results_and_writes_its_page(tmp_path):
    other = tmp_path / "other_suite"
    shutil.copytree(
        ROOT / "benches", other, ignore=shutil.ignore_patterns("results", "__pycache__")
    )
    options = ("--suite", str(other))
    small = ("--device", "cpu", "--group", "pinned", "--rounds", "1")
    ended = run_bench(*options, *small, "--quick", "--save", STREAMLAP_COMMIT="fedcba98")
    assert (ended.returncode, ended.stderr) == (0, "")
    [saved] = (other / "results").iterdir()
    assert saved.name.endswith("-fedcba9-pinned-quick.json")
    assert ended.stdout.endswith(f"kept in other_suite/results/{saved.name}\n")
    assert json.loads(saved.read_text())["settings"]["rounds"] == 1
    ended = run_bench(*options, "--report")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "wrote performance.md from 0 results\n"
    assert "Nothing has been measured yet." in (tmp_path / "docs" / "performance.md").read_text()


def test_what_cannot_be_kept_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    kept = suite("suite")
    place = tmp_path / "results"
    place.write_text("a file in the folder's place")
    with pytest.raises(InvalidArgument, match="pass --no-save"):
        kept.require_folder(place)
    monkeypatch.setattr(bench, "load", lambda module, folder: kept)
    monkeypatch.setattr(kept, "require_folder", lambda: kept_require(place))
    monkeypatch.setattr(kept, "measure", lambda *args: pytest.fail("it was measured"))
    assert cli.main(["bench", "--group", "pinned"]) == 2


def kept_require(place):
    raise InvalidArgument(f"nothing can be kept in {place.name}")


def test_a_broken_result_is_named(tmp_path):
    report = suite("report")
    for text in ("{", "[]", "{}"):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(InvalidArgument, match=r"broken\.json is no result"):
            report.documents(tmp_path)


# -- arguments


def test_without_a_checkout_it_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "streamlap" / "bench.py"))
    assert cli.main(["bench", "--quick"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "--suite" in captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--group", "jobs"], "job, first"),
        (["--device", "cpu", "--group", "tiny"], "cannot run on cpu"),
        (["--device", "tpu"], "cuda:0"),
        (["--device", "cuda:999"], "GPU"),
        (["--dtype", "fp64"], "bf16"),
        (["--device", "cpu", "--dtype", "tf32"], "fp32"),
        (["--rounds", "0"], "from 1 to"),
        (["--rounds", "many"], "from 1 to"),
        (["--rounds", "9" * 5000], "from 1 to"),
        (["--suite", "no_such_folder"], "--suite"),
        (["--report", "--quick"], "leave out --quick"),
        (["--report", "--no-save"], "leave out --no-save"),
        (["more"], "more"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(arguments, says, capsys):
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("streamlap")
    assert says in captured.err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert all(name in text for name in suite("groups").GROUPS)


# -- on a GPU


@pytest.mark.gpu
def test_on_a_gpu_every_group_has_its_rows():
    pytest.importorskip("cupy")  # in --require-gpu runs a skip is a failure
    ended = run_bench("--quick", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    found = json.loads(ended.stdout)
    groups = {table["group"] for table in found["tables"]}
    expected = set(suite("groups").GROUPS) - (
        {"two_gpus"} if torch.cuda.device_count() < 2 else set()
    )
    assert groups == expected
    for table in found["tables"]:
        names = {row["row"] for row in table["rows"]}
        if table["group"] == "job":
            assert names == JOB_ON_GPU
        for row in table["rows"]:
            assert row["failed"] is None
            assert row["samples"]
            assert row["checks"] >= 1
    assert found["machine"]["gpus"]
    assert found["versions"]["cupy"]
