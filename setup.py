"""Build the native module with CMake.

The build tree `build/<tag>` lasts, one for each Python, CUDA mode and sanitizer, so that a
rebuild costs only what changed. What CMake and the compilers say is in its configure.log and
build.log, and shown if they fail or warn. Read from the environment: STREAMLAP_CUDA,
STREAMLAP_SANITIZE, STREAMLAP_WERROR, STREAMLAP_TESTS, STREAMLAP_BENCH, STREAMLAP_CUBLAS_ROOT,
CMAKE_CUDA_ARCHITECTURES, CMAKE_BUILD_PARALLEL_LEVEL, and the compilers that CMake reads (CXX,
CUDACXX, ...).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
MODULE = "_native" + sysconfig.get_config_var("EXT_SUFFIX")
OPTIONS = {
    "STREAMLAP_CUDA": "AUTO",
    "STREAMLAP_SANITIZE": "",
    "STREAMLAP_WERROR": "OFF",
    # Where they are there: one configuration then serves the module, the tests and the bench. The
    # module's build does not compile the others.
    "STREAMLAP_TESTS": "ON" if (ROOT / "tests" / "cpp").is_dir() else "OFF",
    "STREAMLAP_BENCH": "ON" if (ROOT / "benches" / "cpp").is_dir() else "OFF",
    "STREAMLAP_CUBLAS_ROOT": "",
}
COMPILERS = ("CC", "CXX", "CUDACXX", "CUDAHOSTCXX", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS")


def tool(name: str) -> str | None:
    """Find `name` beside this Python, else on PATH; one that does not run is passed over.

    In an isolated build the scripts beside this Python cannot see their own packages.
    """
    for folder in (sysconfig.get_path("scripts"), *os.get_exec_path()):
        found = shutil.which(name, path=folder)
        if found and not subprocess.run([found, "--version"], capture_output=True).returncode:
            return found
    return None


def required(name: str) -> str:
    found = tool(name)
    if not found:
        raise CompileError(f"{name} is missing: pip install cmake, or use your system's package")
    return found


def python() -> str:
    """Return this Python by one name: it was started as python by make, as python3 by pip."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    full = Path(sys.executable).with_name(name)
    return str(full) if full.exists() and full.samefile(sys.executable) else sys.executable


def run(*command: str | Path, log: Path | None = None) -> None:
    """Run a command; with a log, what it says goes there, and is shown if it fails or warns."""
    jobs = str(len(os.sched_getaffinity(0)))
    env = {"CMAKE_BUILD_PARALLEL_LEVEL": jobs} | os.environ
    said = ""
    if log is None:
        status = subprocess.run(command, env=env).returncode
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            status = subprocess.run(command, env=env, stdout=file, stderr=file).returncode
        said = log.read_text(errors="replace")
    if status or re.search(r"\bwarning\b[ :]", said, re.IGNORECASE):
        print(said, end="", flush=True)
    if status:
        raise CompileError(f"{' '.join(map(str, command))} ended with status {status}")


def tree_of(options: dict[str, str]) -> Path:
    parts = [MODULE.split(".")[1], options["STREAMLAP_CUDA"], options["STREAMLAP_SANITIZE"]]
    return ROOT / "build" / "-".join(part.lower() for part in parts if part)


def configure(options: dict[str, str], tree: Path) -> str:
    """Make the build tree ready; return CMake."""
    try:
        import pybind11
    except ImportError as error:
        raise CompileError("pybind11 is missing: pip install pybind11") from error

    cmake, ninja = required("cmake"), tool("ninja")
    defines = options | {
        "Python_EXECUTABLE": python(),
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "CMAKE_CUDA_ARCHITECTURES": os.environ.get("CMAKE_CUDA_ARCHITECTURES", ""),
    }
    command = [cmake, "-S", str(ROOT), "-B", str(tree)]
    if ninja:
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    command += [f"-D{name}={value}" for name, value in defines.items() if value]

    # The cache must not outlive what it was made with: pip's isolated builds find CMake, Ninja
    # and pybind11 in another place each time. Objects survive, so that little is compiled again.
    key = json.dumps([command, shutil.which("nvcc"), [os.environ.get(c) for c in COMPILERS]])
    stamp = tree / "configured.json"
    if not stamp.exists() or stamp.read_text() != key:
        stamp.unlink(missing_ok=True)
        (tree / "CMakeCache.txt").unlink(missing_ok=True)
        for folder in tree.glob("CMakeFiles/[0-9]*"):
            shutil.rmtree(folder)
        run(*command, log=tree / "configure.log")
        stamp.write_text(key)
    return cmake


def native(target: str, **options: str) -> Path:
    """Build one target and return its build tree."""
    given = {name: os.environ.get(name) or default for name, default in OPTIONS.items()}
    tree = tree_of(given | options)
    log = tree / "build.log"
    print(f"building {target} (log: {log.relative_to(ROOT)})", flush=True)
    cmake = configure(given | options, tree)
    run(cmake, "--build", tree, "--target", target, log=log)
    return tree


class CleanBuild(build):
    """The usual build, without modules left over from an earlier one."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Let CMake build the module; setuptools puts it in its place."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new time stamp: setuptools copies in place only what is newer than what is there,
        # and the module there may come from another build tree.
        shutil.copyfile(native("_native") / MODULE, target)


class CppTests(Command):
    """Build the C++ tests in the module's build tree and run them."""

    description = "build and run the C++ tests"
    user_options = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        tree = native("streamlap_tests", STREAMLAP_TESTS="ON")
        how = ("--output-on-failure", "--no-tests=error", "--parallel", "2")
        run(required("ctest"), "--test-dir", tree, *how)


class Mutants(Command):
    """Build the programs that tests/mutants.py runs, in the module's build tree."""

    description = "build the programs that tests/mutants.py runs"
    user_options = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        native("streamlap_mutants", STREAMLAP_TESTS="ON")


class BenchBinary(Command):
    """Build the bench binary in the module's build tree; build/streamlap-bench leads there."""

    description = "build the bench binary, build/streamlap-bench"
    user_options = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        tree = native("streamlap-bench", STREAMLAP_BENCH="ON")
        link = ROOT / "build" / "streamlap-bench"
        new = link.with_suffix(f".{os.getpid()}")
        new.symlink_to(tree.relative_to(link.parent) / link.name)
        new.replace(link)
        print(f"built {link.relative_to(ROOT)}", flush=True)


setup(
    ext_modules=[Extension("streamlap._native", sources=[])],
    cmdclass={
        "build": CleanBuild,
        "build_ext": CMakeBuild,
        "ctest": CppTests,
        "mutants": Mutants,
        "bench": BenchBinary,
    },
)
