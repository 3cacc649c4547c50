"""The core's programs on the simulation: how many different schedules they ran in.

``python tests/schedules.py --least 1000`` runs every simulated program of a build tree (default:
the one without CUDA) and counts the pairs of a program and the decisions of a run. ``--seed`` says
where the random schedules start. A program that fails prints the line that replays it. Status 1:
one failed, or fewer were different than ``--least``.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600
COUNTED = re.compile(r"^schedules (\w+): (\d+) runs, (\d+) different$", re.MULTILINE)
NO_TEST = 2
"""The status of a program that has no simulated test."""


def run(program: Path, seed: int, seeds: int) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Run a test program's simulated tests; return runs and different ones by test, and faults."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "STREAMLAP_SCHEDULE"},
        "STREAMLAP_SEED": str(seed),
        "STREAMLAP_SEEDS": str(seeds),
    }
    try:
        done = subprocess.run(
            [program, "sim_"], capture_output=True, text=True, timeout=SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return {}, [f"{program.name} with seed {seed} hangs"]
    counts = {name: (int(runs), int(new)) for name, runs, new in COUNTED.findall(done.stdout)}
    if done.returncode in (0, NO_TEST):
        return counts, []
    lines = [line for line in done.stdout.splitlines() if not re.match("ok |schedules ", line)]
    return counts, [f"{program.name} with seed {seed}, status {done.returncode}:", *lines]


def main(arguments: list[str] | None = None) -> int:
    tag = sysconfig.get_config_var("EXT_SUFFIX").split(".")[1]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT / "build" / f"{tag}-off")
    parser.add_argument("--seed", type=int, default=1, help="of the first random schedule (1)")
    parser.add_argument("--seeds", type=int, default=24, help="random schedules a program (24)")
    parser.add_argument("--least", type=int, default=1, help="how many must be different (1)")
    given = parser.parse_args(arguments)
    programs = sorted(
        path for path in (given.tree / "tests").glob("test_*") if os.access(path, os.X_OK)
    )
    programs = [path for path in programs if path.is_file()]
    counts: dict[str, tuple[int, int]] = {}
    faults: list[str] = []
    for program in programs:
        found, wrong = run(program, given.seed, given.seeds)
        counts |= {f"{program.name}/{name}": count for name, count in found.items()}
        faults += wrong
    for line in faults:
        print(line)
    runs = sum(count[0] for count in counts.values())
    different = sum(count[1] for count in counts.values())
    print(
        f"{different} different schedules in {runs} runs of {len(counts)} programs, "
        f"seeds from {given.seed}"
    )
    if different < given.least:
        print(f"at least {given.least} must be different")
    return 1 if faults or different < given.least else 0


if __name__ == "__main__":
    sys.exit(main())
