"""Each kernel alone under compute-sanitizer: memcheck, racecheck and initcheck.

    python tests/gpu_kernels.py              every kernel under every tool; status 0 if clean
    python tests/gpu_kernels.py strided      one kernel

What runs is the kernel's part of tests/cpp/test_moves.cpp, which knows no torch: whatever a tool
finds is ours. A tool that is missing, or that fails with a program that does nothing but ask for
the devices, is said in one line, and is no failure.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOUND = 86  # the tool's status when it has found something
SECONDS = 600
TOOLS = ("memcheck", "racecheck", "initcheck")
KERNELS = {
    "gather": "cuda_a_gather_comes_after,cuda_ragged_tensors",
    "scatter": "cuda_ragged_tensors",
    "cast": "cuda_elements_are_cast,cuda_one_pass,cuda_many_pieces",
    "strided": "cuda_what_lies_apart",
    "checksum": "cuda_a_checksum",
}
NOTHING = "cuda_memory_that_a_kernel_cannot_reach"


def sanitizer() -> str | None:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=f"{home}/bin"
    )


def program() -> Path | None:
    """Return the newest test program of a build with CUDA."""
    built = sorted(ROOT.glob("build/*-on/tests/test_moves"), key=lambda path: path.stat().st_mtime)
    return built[-1] if built else None


def under(tool: str, name: str, tests: str, test_moves: Path) -> subprocess.CompletedProcess[str]:
    command = [tool, "--tool", name, "--error-exitcode", str(FOUND), str(test_moves), tests]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        print(f"no kernel {unknown[0]!r}; there is {', '.join(KERNELS)}")
        return 2
    test_moves = program()
    if test_moves is None:
        print("kernels: FAILED: no test program; build it with: python setup.py ctest")
        return 1
    tool = sanitizer()
    if tool is None:
        print("kernels: not run under tools: there is no compute-sanitizer")
        return 0
    failed = 0
    for name in TOOLS:
        try:
            tried = under(tool, name, NOTHING, test_moves)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"{name}: not run: {tool} does not work here: {error}")
            continue
        if tried.returncode not in (0, FOUND):
            said = (tried.stdout + tried.stderr).strip().splitlines() or ["no output"]
            reason = next((line for line in said if "rror" in line), said[-1]).strip()
            print(f"{name}: not run: {reason}")
            continue
        for kernel in names or KERNELS:
            done = under(tool, name, KERNELS[kernel], test_moves)
            clean = done.returncode == 0 and " 0 failed, 0 skipped" in done.stdout
            print(f"{name} {kernel}: {'clean' if clean else 'FAILED'}")
            if not clean:
                print(done.stdout + done.stderr)
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
