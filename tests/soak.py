"""The tests that depend on chance, again and again with new seeds.

``python tests/soak.py --minutes 10`` or ``--rounds 100``. A round runs every part once, in a fresh
process, with a seed of its own. A failure does not stop it: a line says how to replay that run, and
its output is kept in build/soak. The last line counts. Status 1: something failed.
"""

import argparse
import collections
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "soak"
HUNG = 1800
"""Seconds after which a run is said to hang; a test's own limit is far below."""


@dataclass(frozen=True)
class Part:
    """Something to repeat: a command that takes a seed and ends with status 0 if all is well."""

    name: str
    arguments: tuple[str, ...]  # of Python; {seed} is put in

    def command(self, seed: int) -> list[str]:
        return [sys.executable, *(argument.format(seed=seed) for argument in self.arguments)]


def of_pytest(name: str, *files: str) -> Part:
    options = ("-q", "-x", "-p", "no:cacheprovider", "--repeats", "1", "--seed", "{seed}")
    return Part(name, ("-m", "pytest", *options, *(f"tests/{file}" for file in files)))


PARTS = [
    of_pytest("exit", "test_exit.py"),
    of_pytest("interrupts", "test_interrupts.py"),
    of_pytest("threads", "test_threads.py"),
    of_pytest("programs", "test_programs.py"),
    of_pytest("stateful", "test_stateful.py"),
    # Needs the C++ tests built without CUDA: `make cpp-test`.
    Part("schedules", ("tests/schedules.py", "--seed", "{seed}")),
]


def run(part: Part, seed: int) -> bool:
    """Run a part; on failure print the line that replays it."""
    log = LOGS / f"{part.name}-{seed}.log"
    begin = time.monotonic()
    with log.open("w") as file:
        try:
            status = subprocess.run(
                part.command(seed), cwd=ROOT, stdout=file, stderr=file, timeout=HUNG
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    if status == 0:
        log.unlink()
        return True
    seconds = time.monotonic() - begin
    end = f"status {status}" if status is not None else "it hung"
    print(f"soak: FAILED: {part.name}, {end} after {seconds:.0f} s; see {log.relative_to(ROOT)}")
    print(f"soak: replay: {shlex.join(part.command(seed))}", flush=True)
    return False


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def main(arguments: list[str] | None = None, parts: list[Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="start no run after these")
    parser.add_argument(
        "--rounds", type=whole, help="how often every part runs (100 without --minutes)"
    )
    parser.add_argument("--seed", type=int, help="of the first round (default: of the clock)")
    parser.add_argument("--part", action="append", choices=[part.name for part in parts])
    given = parser.parse_args(arguments)
    chosen = [part for part in parts if given.part is None or part.name in given.part]
    rounds = given.rounds or (100 if given.minutes is None else None)
    seed = given.seed if given.seed is not None else time.time_ns() % 1_000_000_000
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    LOGS.mkdir(parents=True, exist_ok=True)
    print(f"soak: {', '.join(part.name for part in chosen)}; first seed {seed}", flush=True)

    passed: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    done = 0
    while rounds is None or done < rounds:
        for part in chosen:
            # The first round is whole, so that no part is passed over however short the time is.
            if done > 0 and end is not None and time.monotonic() > end:
                rounds = done
                break
            (passed if run(part, seed) else failed)[part.name] += 1
        else:
            done += 1
            seed += 1
    counts = ", ".join(
        f"{part.name} {passed[part.name]} passed {failed[part.name]} failed" for part in chosen
    )
    print(f"soak: {done} whole rounds: {counts}", flush=True)
    return failed.total() != 0


if __name__ == "__main__":
    sys.exit(main())
