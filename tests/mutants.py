"""The mutation gate: the C++ tests must notice when any one ordering call is left out.

    python tests/mutants.py [BUILD_TREE]

Every ``Site`` under csrc/transfer is a mutant: the calls at it are skipped, on worker threads and
in simulations. The programs that fail are its killers; a mutant that no program kills fails the
gate. Without an argument the tests of the build without CUDA are run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("test_copy_engine", "test_staging", "test_pinned_pool", "test_order_checker")
SECONDS = 60.0
"""A program that hangs without a call has noticed."""

# Left out, these change no order. Each has its reason.
EQUIVALENT = {
    "engine.record_begin": "a time stamp; it orders nothing, and elapsed() tells its absence",
    "staging.copy_out_after_populate": "pages that are not present come with the first write",
    "staging.record_populated": "as above",
}


def sites(folder: Path = ROOT / "csrc" / "transfer") -> list[str]:
    """Return the names of all sites, in order of their names."""
    found = []
    for path in sorted(folder.glob("*.cpp")):
        found += re.findall(r'constexpr Site \w+\{"([\w.]+)"\}', path.read_text())
    assert len(found) == len(set(found)), "two sites have one name"
    return sorted(found)


def killers(tree: Path, site: str | None) -> list[str]:
    """Return the tests that fail without a site's calls (None: with all of them)."""
    failed = []
    environment = dict(os.environ)
    environment.pop("STREAMLAP_WITHOUT_SITE", None)
    if site is not None:
        environment["STREAMLAP_WITHOUT_SITE"] = site
    for program in PROGRAMS:
        path = tree / "tests" / program
        try:
            done = subprocess.run(
                [path], capture_output=True, text=True, timeout=SECONDS, env=environment
            )
        except subprocess.TimeoutExpired:
            failed.append(f"{program} (hangs)")
            continue
        names = re.findall(r"^FAIL (\w+)", done.stdout, re.MULTILINE)
        failed += [f"{program}/{name}" for name in names]
        if done.returncode < 0:
            failed.append(f"{program} (signal {-done.returncode})")
        if failed:
            break  # one killer is enough
    return failed


def main() -> int:
    tag = sysconfig.get_config_var("EXT_SUFFIX").split(".")[1]
    tree = Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT / "build" / f"{tag}-off"
    begin = time.monotonic()
    alive = []
    if found := killers(tree, None):
        print(f"without any mutant {found[0]} fails")
        return 1
    names = sites()
    for site in names:
        found = killers(tree, site)
        if site in EQUIVALENT:
            print(f"  {site:44} equivalent: {EQUIVALENT[site]}")
        elif found:
            print(
                f"  {site:44} killed by {found[0]}"
                + (f" and {len(found) - 1} more" * (len(found) > 1))
            )
        else:
            alive.append(site)
            print(f"  {site:44} ALIVE")
        sys.stdout.flush()
    killed = len(names) - len(alive) - len(EQUIVALENT)
    seconds = time.monotonic() - begin
    print(
        f"{killed} of {len(names)} mutants killed, {len(EQUIVALENT)} equivalent, "
        f"{len(alive)} alive, in {seconds:.0f} s"
    )
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
