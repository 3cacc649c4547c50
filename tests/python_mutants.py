"""The mutation gate of the Python layer: each statement that orders something is left out once.

    python tests/python_mutants.py [--cuda] [SITE ...]

A statement that ends in ``# site: NAME`` is a mutant: a wait, a record, a keep-alive, a drain. In a
copy of the package it is replaced by nothing (an argument by None or an empty list), and the test
that tests/mutants.toml names must fail, or not come to an end. The test is run once with nothing
left out, too. A site that is not in the table and an entry without a site fail the gate;
tests/test_layout.py finds calls that order something and are no site. With --cuda those sites are
run that only a GPU reaches.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import os
import py_compile
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "streamlap"
TRIES = 3
"""How often a killer may look on; one that has to is told in the line."""
PATIENCE = "4"
"""Seconds that a killer waits for what is right, which without a mutant came soon."""
SLOW = 5.0
"""Seconds from which on a line says how many it took."""
MARK = re.compile(r"# site: ([\w.]+)$")
LIMIT = {"python": 60.0, "python_cuda": 120.0}


def sites() -> dict[str, tuple[Path, int]]:
    """Return where each site is: its file and line (from 1)."""
    found: dict[str, tuple[Path, int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := MARK.search(line):
                if match[1] in found:
                    raise SystemExit(f"two sites have one name: {match[1]}")
                found[match[1]] = (path, number)
    return found


def without(path: Path, number: int, instead: str | None) -> str:
    """Return the file's text with what is marked on a line left out, or something instead."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        argument = isinstance(node, ast.keyword) and node.lineno == number
        statement = isinstance(node, ast.stmt) and node.end_lineno == number
        if argument or (statement and not hasattr(node, "body")):
            break
    else:
        if instead is None:
            raise SystemExit(f"{path.name}:{number} is marked, but no statement ends there")
        lines = text.splitlines(keepends=True)
        lines[number - 1] = re.match(r"\s*", lines[number - 1])[0] + instead + "\n"
        return "".join(lines)
    target = node.value if argument else node
    if instead is None:
        instead = ("[]" if node.arg == "after" else "None") if argument else "pass"
    lines = text.splitlines(keepends=True)
    first, last = target.lineno - 1, target.end_lineno - 1
    before = lines[first].encode()[: target.col_offset].decode()
    after = lines[last].encode()[target.end_col_offset :].decode()
    lines[first : last + 1] = [before + instead + after]
    return "".join(lines)


def run(
    tests: list[str], folder: Path, limit: float, environment: dict[str, str]
) -> tuple[str, str]:
    """Run tests against the package in ``folder``, in a fork that has torch loaded already."""
    log = folder / "log"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            file = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.path.insert(0, str(folder))
            os.environ.update(environment, PYTHONPATH=str(folder))
            os.chdir(ROOT)
            import pytest

            code = pytest.main(["-q", "-x", "-rfEs", "-p", "no:cacheprovider", "--tb=line", *tests])
        finally:
            os._exit(int(code))
    deadline = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs", ""
        time.sleep(0.02)
    said = log.read_text(errors="replace")
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}", said
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ("skipped" if " passed" not in said else "passes"), said
    # 1: tests failed. Anything else is no answer of a test: a name that is not there, say.
    named = code == 1 and any(
        f"{word} {test}" in said for word in ("FAILED", "ERROR") for test in tests
    )
    return ("fails" if named else f"pytest ended with {code}"), said


def compiled(folder: Path) -> Path:
    """Return a copy of the package whose byte code needs no look at the sources."""
    copy = folder / "streamlap"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    with contextlib.redirect_stdout(None):
        compileall.compile_dir(copy, quiet=2, invalidation_mode=mode)
    return copy


def judge(
    package: Path, changed: tuple[Path, str] | None, tests: list[str], limit: float
) -> tuple[str, str]:
    """Run tests against a copy of the package with one file changed."""
    with tempfile.TemporaryDirectory(prefix="streamlap-mutant-") as name:
        folder = Path(name)
        copy = folder / "streamlap"
        shutil.copytree(package, copy)
        for module in PACKAGE.glob("*.so"):
            (copy / module.name).symlink_to(module)
        if changed is not None:
            path = copy / changed[0].relative_to(PACKAGE)
            path.write_text(changed[1])
            for code in path.parent.glob(f"__pycache__/{path.stem}.*"):
                code.unlink()
        hurried = {} if changed is None else {"STREAMLAP_PATIENCE": PATIENCE}
        return run(tests, folder, limit, hurried)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sites", nargs="*")
    parser.add_argument("--cuda", action="store_true", help="the sites that only a GPU reaches")
    given = parser.parse_args()
    # Loaded once, before the forks; streamlap is not.
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    table = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    kind = "python_cuda" if given.cuda else "python"
    killers, equivalent = table[kind], table["equivalent"]["python"]
    other = table["python" if given.cuda else "python_cuda"]
    instead = table["instead"]
    found = sites()
    begin = time.monotonic()
    known = killers.keys() | equivalent.keys() | other.keys()
    wrong = [
        f"{name}: a site without an entry in tests/mutants.toml" for name in found.keys() - known
    ]
    wrong += [f"{name}: in tests/mutants.toml, not in src" for name in known - found.keys()]
    names = sorted(name for name in killers if name in found)
    names = [name for name in names if not given.sites or name in given.sites]

    with tempfile.TemporaryDirectory(prefix="streamlap-mutants-") as folder:
        sys.dont_write_bytecode = False  # the tests' serves from one fork to the next
        package = compiled(Path(folder))
        killed = gate(package, found, names, killers, instead, LIMIT[kind], given.cuda)
    if killed is None:
        return 1
    if not given.cuda:
        for name, proof in sorted(equivalent.items()):
            print(f"  {name:36} equivalent: {proof}")
    for line in sorted(wrong):
        print(line)
    print(
        f"{killed} of {len(names)} Python mutants killed, {len(names) - killed} alive, "
        f"in {time.monotonic() - begin:.0f} s"
    )
    return 1 if wrong or killed < len(names) else 0


def gate(
    package: Path,
    found: dict[str, tuple[Path, int]],
    names: list[str],
    killers: dict[str, str],
    instead: dict[str, str],
    limit: float,
    alone: bool,
) -> int | None:
    """Return how many mutants are killed; None if a killer fails without a mutant."""
    baseline, said = judge(package, None, sorted({killers[name] for name in names}), 300.0)
    if baseline != "passes":
        print(f"with nothing left out the killers' run {baseline}:\n{said[-3000:]}")
        return None

    def one(name: str) -> tuple[str, str, float]:
        begin = time.monotonic()
        path, number = found[name]
        changed = (path, without(path, number, instead.get(name)))
        # Threads may happen to come in the right order without what orders them.
        ends = [judge(package, changed, [killers[name]], limit)[0]]
        while ends[-1] == "passes" and len(ends) < TRIES:
            ends.append(judge(package, changed, [killers[name]], limit)[0])
        end = ends[-1] if len(ends) == 1 else f"{ends[-1]} at try {len(ends)}"
        return name, end, time.monotonic() - begin

    killed = 0
    with ThreadPoolExecutor(1 if alone else 2) as pool:
        for name, end, seconds in pool.map(one, names):
            dead = end.startswith(("fails", "hangs", "signal"))
            killed += dead
            how = "" if end == "fails" else f" ({end})"
            how += f" in {seconds:.0f} s" if seconds > SLOW else ""
            print(
                f"  {name:36} {'killed by' if dead else 'ALIVE:'} {killers[name]}{how}", flush=True
            )
    return killed


if __name__ == "__main__":
    sys.exit(main())
