"""The mutation gate of the C++ core: each thing that orders something is left out once.

    python tests/mutants.py [--cuda] [--tree BUILD_TREE] [--record] [SITE ...]

Every ``Site`` in csrc is a mutant: a wait, a record, a lock, a keep-alive, a rule of the checker.
tests/mutants.toml names the test that must fail without it, or proves that nothing changes. That
test is run with the site and without: a site that is not in the table, a killer that passes, a
killer that fails anyway and an entry without a site all fail the gate. With --record every test
is tried for the sites that have no killer, and what is found is printed.

``python setup.py mutants`` builds the programs. The sites of csrc/cuda need a GPU and are run with
--cuda alone; without a GPU that says so and fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
HOST_FOLDERS = ("base", "check", "host", "runtime", "transfer")
CUDA_FOLDERS = ("cuda",)
PROGRAMS = ("test_order_checker", "test_locks", "test_pinned_pool", "test_copy_engine")
PROGRAMS += ("test_staging",)
PROGRAMS += ("test_worker", "test_runtime_contract", "test_cuda_order", "test_cuda_context")
HANG = {"host": 8.0, "cuda": 30.0}
"""Seconds after which a program has noticed: with the site it ends in far less."""


class Ran(NamedTuple):
    """One run of a program: which tests failed, how it ended, and what it said."""

    failed: list[str]
    passed: list[str]
    end: str  # "", "hangs" or "signal N"
    text: str

    def noticed(self, test: str) -> bool:
        """Whether ``test`` failed, or did not come to its end."""
        return test in self.failed or (bool(self.end) and test not in self.passed)


def sites(folders: tuple[str, ...]) -> list[str]:
    """Return the names of all sites in these folders of csrc."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / "csrc" / folder).rglob("*.cpp")):
            found += re.findall(r'constexpr Site \w+\{\s*"([\w.]+)"\}', path.read_text())
    double = {name for name in found if found.count(name) > 1}
    if double:
        raise SystemExit(f"two sites have one name: {', '.join(sorted(double))}")
    return sorted(found)


def run(tree: Path, program: str, tests: str, site: str | None, limit: float) -> Ran:
    """Run tests of a program, without one site's calls if one is given."""
    environment = dict(os.environ)
    environment.pop("STREAMLAP_WITHOUT_SITE", None)
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if site is not None:
        environment["STREAMLAP_WITHOUT_SITE"] = site
    end = ""
    with subprocess.Popen(
        [tree / "mutants" / program, tests],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            end = "hangs"
    if not end and process.returncode < 0:
        end = f"signal {-process.returncode}"
    words = re.findall(r"^(FAIL|ok) +(\w+) \(", text, re.MULTILINE)
    return Ran(
        [name for word, name in words if word == "FAIL"],
        [name for word, name in words if word == "ok"],
        end,
        text,
    )


def judge(tree: Path, site: str, killer: str, limit: float) -> tuple[bool, str]:
    """Run one mutant against its recorded killer."""
    program, _, test = killer.partition("/")
    ran = run(tree, program, test, site, limit)
    how = ran.end if ran.end else "fails"
    return ran.noticed(test), f"killed by {killer}" + (f" ({how})" if ran.end else "")


def search(tree: Path, site: str, programs: list[str]) -> list[str]:
    """Return the tests that fail without a site, those of simulations first."""
    found = []
    for program in programs:
        ran = run(tree, program, "", site, 60.0)
        found += [f"{program}/{name}" for name in ran.failed]
        if ran.end:
            found.append(f"{program}/? ({ran.end} after {len(ran.passed)} tests)")
    return sorted(found, key=lambda name: ("/sim_" not in name, "?" in name))


def baseline(tree: Path, killers: list[str]) -> list[str]:
    """Return the killers that fail, skip or do not exist although nothing is left out."""
    by_program = defaultdict(set)
    for killer in killers:
        program, _, test = killer.partition("/")
        by_program[program].add(test)
    wrong = []
    for program, tests in sorted(by_program.items()):
        ran = run(tree, program, ",".join(sorted(tests)), None, 120.0)
        reason = re.search(r"^skip .*?: (.*)$", ran.text, re.MULTILINE)
        for test in sorted(tests - set(ran.passed)):
            why = ran.end or ("fails" if test in ran.failed else "is not there")
            if reason and test not in ran.failed:
                why = f"is skipped: {reason[1]}"
            wrong.append(f"{program}/{test} {why}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sites", nargs="*")
    parser.add_argument("--cuda", action="store_true", help="the sites of csrc/cuda")
    parser.add_argument("--tree", type=Path, help="the build tree")
    parser.add_argument("--record", action="store_true", help="look for killers that are missing")
    given = parser.parse_args()
    tag = sysconfig.get_config_var("EXT_SUFFIX").split(".")[1]
    tree = given.tree or ROOT / "build" / f"{tag}-{'on' if given.cuda else 'off'}"
    table = tomllib.loads(TABLE.read_text())
    kind = "cuda" if given.cuda else "host"
    killers, equivalent = table[kind], table["equivalent"][kind]
    names = sites(CUDA_FOLDERS if given.cuda else HOST_FOLDERS)
    begin = time.monotonic()

    wrong = [f"{name}: in tests/mutants.toml, not in csrc" for name in killers.keys() - set(names)]
    wrong += [
        f"{name}: in tests/mutants.toml, not in csrc" for name in equivalent.keys() - set(names)
    ]
    wrong += [f"{name}: has a killer and a proof" for name in killers.keys() & equivalent.keys()]
    names = [name for name in names if not given.sites or name in given.sites]
    failing = baseline(tree, [killers[name] for name in names if name in killers])
    if failing:
        print("\n".join(f"with nothing left out {line}" for line in failing))
        return 1

    def one(name: str) -> tuple[str, bool, str]:
        if name in equivalent:
            return name, True, f"equivalent: {equivalent[name]}"
        killed, text = (
            judge(tree, name, killers[name], HANG[kind]) if name in killers else (False, "")
        )
        if killed:
            return name, True, text
        if not given.record:
            why = f"{killers[name]} passes" if name in killers else "no killer is recorded"
            return name, False, f"ALIVE: {why}"
        programs = [program for program in PROGRAMS if (tree / "mutants" / program).exists()]
        return name, False, f"would be killed by {search(tree, name, programs) or 'NOTHING'}"

    # Simulated programs keep one core busy; on a GPU they would share its queues.
    with ThreadPoolExecutor(1 if given.cuda else min(2, os.cpu_count() or 1)) as pool:
        results = []
        for name, fine, text in pool.map(one, names):
            results.append(fine)
            print(f"  {name:44} {text}", flush=True)
    for line in wrong:
        print(line)
    alive = results.count(False)
    proofs = sum(name in equivalent for name in names)
    print(
        f"{len(names) - alive - proofs} of {len(names)} mutants killed, {proofs} equivalent, "
        f"{alive} alive, in {time.monotonic() - begin:.0f} s"
    )
    return 1 if alive or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
