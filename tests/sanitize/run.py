"""The C++ tests and the host runtime's Python tests under one sanitizer after the other.

``python tests/sanitize/run.py [thread] [address] [undefined] [-- PYTEST_ARGS]``. Builds without
CUDA, in build trees of its own. A run counts only if its sanitizer reports a deliberate fault, in a
program and in Python, under the same options. Status 1: a test failed, something was reported, or
a fault was not. Only g++'s sanitizers: their runtimes are shared libraries that Python can be
started with.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "sanitize"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
HUNG = 1500  # seconds for a step; what takes longer hangs

# The Python tests that drive the native module, mostly from several threads. Left out are those
# that only start other programs, and those of arguments, of sizes and of the bench; and tests that
# fork, because a thread sanitizer ends a child that makes a thread.
FILES = [
    "test_threads.py",
    "test_transfer.py",
    "test_order.py",
    "test_pinned.py",
    "test_pipeline.py",
    "test_mapping.py",
    "test_product.py",
    "test_grouped.py",
    "test_direct.py",
    "test_plan.py",
    "test_panels.py",
    "test_devices.py",
    "test_timeline.py",
    "test_errors.py",
    "test_staging.py",
    "test_host_products.py",
    "test_kernels.py",
    "test_tree_copy.py",
    "test_rows.py",
    "test_prefetcher.py",
]

# name: (runtime libraries for Python, option variables, what a report of a fault looks like)
RUNTIMES = {
    "thread": ["libtsan.so"],
    # The interpreter itself has no C++ runtime, in which the sanitizer must find __cxa_throw.
    "address": ["libasan.so", "libstdc++.so.6"],
    "undefined": ["libubsan.so"],
}
FAULTS = {
    "thread": {"thread": "data race"},
    "address": {"address": "heap-use-after-free", "leak": "detected memory leaks"},
    "undefined": {"undefined": "signed integer overflow"},
}
# In Python: the module at work, then the fault, in the library given as an argument.
FAULT_IN_PYTHON = """
import ctypes, sys, threading
import torch, streamlap
x = torch.rand(32, 32)
assert torch.equal(streamlap.pipelined_run(x, n=3)[2], x.mm(x))
library = ctypes.CDLL(sys.argv[1])
if sys.argv[2] == "thread":
    threads = [threading.Thread(target=library.fault_count) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
else:
    getattr(library, "fault_" + sys.argv[2])()
"""


class FailureError(Exception):
    """A step went wrong; the message says which, and where its output is."""


def options(kind: str, reports: Path) -> dict[str, str]:
    """Return the environment of everything that runs under this sanitizer."""
    common = f"log_path={reports}/report:exitcode=66"
    supp = f"suppressions={HERE}"
    if kind == "thread":
        return {"TSAN_OPTIONS": f"{common}:{supp}/tsan.supp:print_suppressions=0:history_size=7"}
    if kind == "address":
        return {
            "ASAN_OPTIONS": f"{common}:detect_leaks=1:detect_stack_use_after_return=1",
            "LSAN_OPTIONS": f"{supp}/lsan.supp:print_suppressions=0",
            # Python's own allocator hides from the leak check what its objects hold.
            "PYTHONMALLOC": "malloc",
        }
    return {"UBSAN_OPTIONS": f"{common}:print_stacktrace=1"}


class Run:
    """One sanitizer: its trees, its environment, its steps."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.folder = ROOT / "build" / "sanitize" / kind
        self.package = self.folder / "package"
        self.reports = self.folder / "reports"
        self.tree = ROOT / "build" / f"{SUFFIX.split('.')[1]}-off-{kind}"
        shutil.rmtree(self.reports, ignore_errors=True)
        self.reports.mkdir(parents=True)
        self.build_env = os.environ | {"STREAMLAP_CUDA": "OFF", "STREAMLAP_SANITIZE": kind}
        self.env = self.build_env | options(kind, self.reports)
        self.env.pop("STREAMLAP_REQUIRE_GPU", None)

    def call(self, step: str, command: list, env: dict[str, str]) -> tuple[int | None, str]:
        """Run a step with its output in a file; return status and output."""
        log = self.folder / f"{step}.log"
        with log.open("w") as file:
            try:
                status = subprocess.run(
                    [str(part) for part in command],
                    env=env,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=HUNG,
                ).returncode
            except subprocess.TimeoutExpired:
                status = None
        return status, log.read_text(errors="replace")

    def taken_reports(self) -> str:
        """Return what was reported since the last look."""
        text = ""
        for path in sorted(self.reports.iterdir()):
            text += path.read_text(errors="replace")
            path.unlink()
        return text

    def check(self, step: str, status: int | None, said: str) -> None:
        reported = self.taken_reports()
        if reported:
            (self.folder / f"{step}.reports").write_text(reported)
            heads = re.findall(r"SUMMARY: .*|.*runtime error: .*", reported)
            raise FailureError(
                f"{len(heads)} reports in {step}: see {self.folder / step}.reports\n"
                + "\n".join(sorted(set(heads)))
            )
        if status != 0:
            tail = "\n".join(said.splitlines()[-30:])
            raise FailureError(f"{step} ended with status {status}:\n{tail}")

    def build(self) -> None:
        setup = [sys.executable, "setup.py", "-q"]
        command = [*setup, "build", "--build-lib", self.package]
        self.check("build", *self.call("build", command, self.build_env))

    def cpp_tests(self) -> str:
        command = [sys.executable, "setup.py", "-q", "ctest"]
        self.check("cpp", *self.call("cpp", command, self.env))
        log = (self.tree / "Testing" / "Temporary" / "LastTest.log").read_text(errors="replace")
        counts = re.findall(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", log, re.MULTILINE)
        return f"C++ {sum(int(passed) for passed, _, _ in counts)} passed"

    def python_env(self) -> dict[str, str]:
        compiler = shlex.split(os.environ.get("CXX") or "g++")
        libraries = []
        for name in RUNTIMES[self.kind]:
            answer = subprocess.run(
                [*compiler, f"-print-file-name={name}"],
                capture_output=True,
                text=True,
                check=True,
            )
            found = Path(answer.stdout.strip())
            if not found.is_absolute():
                raise FailureError(
                    f"{shlex.join(compiler)} has no {name}: install g++'s sanitizers"
                )
            libraries.append(str(found.resolve()))
        return self.env | {
            "LD_PRELOAD": ":".join(libraries),
            "PYTHONPATH": str(self.package),
            # Threads of OpenMP synchronise in ways that the sanitizer cannot see.
            "OMP_NUM_THREADS": "1",
        }

    def deliberate_faults(self) -> str:
        """See that each fault is reported, in a program and in Python."""
        tests = self.tree / "tests"
        library = tests / "libfaults.so"
        for fault, text in FAULTS[self.kind].items():
            for step, command, env in (
                (f"fault-{fault}", [tests / "faults", fault], self.env),
                (
                    f"fault-{fault}-python",
                    [sys.executable, "-c", FAULT_IN_PYTHON, library, fault],
                    self.python_env(),
                ),
            ):
                status, said = self.call(step, command, env)
                reported = self.taken_reports()
                (self.folder / f"{step}.reports").write_text(reported)
                if status == 0 or text not in reported or "fault_" not in reported:
                    raise FailureError(
                        f"the deliberate fault of {step} was not reported (status {status}): "
                        f"this run proves nothing\n{said}{reported}"
                    )
        return f"{2 * len(FAULTS[self.kind])} deliberate faults reported"

    def python_tests(self, arguments: list[str]) -> str:
        env = self.python_env()
        where = "import streamlap._native as n; print(n.__file__)"
        status, said = self.call("module", [sys.executable, "-c", where], env)
        self.check("module", status, said)
        if str(self.package) not in said:
            raise FailureError(f"Python took another module: {said}")
        files = [ROOT / "tests" / name for name in FILES]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [
            "-m",
            "not gpu and not forks",
            "-rs",
            "-o",
            "timeout=300",
            *(arguments or files),
        ]
        status, said = self.call("python", command, env)
        self.check("python", status, said)
        return "Python " + re.findall(r"^(\d+ passed.*?)(?: in .*)?$", said, re.MULTILINE)[-1]


def main() -> int:
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    kinds, arguments = given[:cut] or list(RUNTIMES), given[cut + 1 :]
    unknown = set(kinds) - set(RUNTIMES)
    if unknown:
        print(f"no such sanitizer: {', '.join(sorted(unknown))}; there are {', '.join(RUNTIMES)}")
        return 2
    failed = 0
    for kind in kinds:
        begin = time.monotonic()
        try:
            run = Run(kind)
            run.build()
            parts = [run.cpp_tests(), run.deliberate_faults(), run.python_tests(arguments)]
            line = f"clean: {'; '.join(parts)}"
        except FailureError as error:
            failed += 1
            line = f"FAILED: {error}"
        print(f"sanitize {kind}: {line} ({time.monotonic() - begin:.0f} s)", flush=True)
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
