"""Who may know whom: includes between the folders of csrc, and imports of the outer packages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_KNOW = {
    "base": set(),
    "moves": {"base"},
    "runtime": {"moves", "base"},
    "host": {"runtime", "moves", "base"},
    "cuda": {"runtime", "moves", "base"},
    "sim": {"runtime", "moves", "base"},
    "check": {"runtime", "moves", "base"},
    "transfer": {"runtime", "moves", "base"},
    "bindings": {"transfer", "check", "sim", "runtime", "moves", "base"},
}
# Headers from outside, and the one folder that may include them (None: no folder may).
CUDA = r"cuda|cublas|cub/|thrust/|nvtx|cooperative_groups|driver_types\.h|vector_types\.h"
OUTSIDE = {CUDA: "cuda", r"pybind11/|Python\.h": "bindings", r"torch/|ATen/|c10/": None}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
PUBLIC_ONLY = ("training", "crosscheck")
# Arguments and devices are checked as everywhere, and frames kept from torch.compile; there are no
# public names for that.
ALSO = {"training": {"checks", "devices", "sizes", "uncompiled"}, "crosscheck": set()}
# What orders something in the Python layer is a site of the mutation gate.
PLAIN_LOCK = re.compile(r"std::(lock_guard|unique_lock|scoped_lock|shared_lock)")
ORDERS = {
    *("wait_on_stream", "hold_stream", "sync", "leaf_sync", "chunk_sync", "synchronize", "wait"),
    *("record", "record_use", "wait_source", "release_source", "release_all", "_settle", "settle"),
    *("source_sync", "wait_source_on_stream", "_wait_read"),
    *("_hold", "_drain", "_wait_done", "_release_done", "complete", "wait_stream"),
}
ORDERING_ARGUMENTS = {"after", "keep_source", "keep_destination", "staged", "finish"}
ORDERING_MODULES = {
    *("transfer", "copies", "lanes", "plan_host", "plan_device", "product", "pipeline"),
    *("mapping", "batch", "pinned", "group", "devices", "direct", "grouped"),
    *("panels", "plan", "graphs", "static_memory", "host_products", "moving", "tree_copy"),
    "checksums",
    *("training/prefetch", "training/activations", "training/offloaded", "training/pace"),
    *("training/gradients", "training/ddp", "training/step", "training/arrival", "training/passes"),
}


def include_faults(csrc: Path) -> list[str]:
    faults = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SOURCES):
        name = path.relative_to(csrc)
        folder = name.parts[0]
        if folder not in MAY_KNOW:
            faults.append(f"{name}: no rule for this folder")
            continue
        if path.suffix in {".cu", ".cuh"} and folder != "cuda":
            faults.append(f"{name}: CUDA sources belong in cuda")
        for kind, header in INCLUDE.findall(path.read_text()):
            ours = None
            if kind == '"':
                places = [path.parent / header, csrc / header]
                found = next((p.resolve() for p in places if p.exists()), None)
                if found is None or not found.is_relative_to(csrc.resolve()):
                    faults.append(f"{name}: {header} is not in csrc")
                    continue
                ours = found.relative_to(csrc.resolve()).parts[0]
            if ours and ours != folder and ours not in MAY_KNOW[folder]:
                faults.append(f"{name}: {folder} may not know {header}")
            if not ours:
                faults += [
                    f"{name}: {header} may be included only in {home or 'no folder'}"
                    for pattern, home in OUTSIDE.items()
                    if re.match(pattern, header) and home != folder
                ]
    return faults


def site_faults(name: str, text: str) -> list[str]:
    """What orders something in a module of the Python layer and has no name for the gate."""
    lines = text.splitlines()
    faults = []
    for node in ast.walk(ast.parse(text)):
        what = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            what = node.func.attr if node.func.attr in ORDERS else None
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("native"):
            what = node.attr if node.attr in ORDERS else None  # handed to another function
        elif isinstance(node, ast.keyword):
            what = node.arg if node.arg in ORDERING_ARGUMENTS else None
        shown = "\n".join(lines[node.lineno - 1 : node.end_lineno]) if what else ""
        if what and "# site: " not in shown:
            faults.append(f"{name}:{node.lineno}: {what} orders something and is no site")
    return faults


def import_faults(package: Path, public: set[str], also: set[str] = frozenset()) -> list[str]:
    """What the modules of `package` take from streamlap that is neither public nor their own.

    `also` are modules that they may know beside it.
    """
    faults = []
    own = f"streamlap.{package.name}"
    for path in sorted(package.rglob("*.py")):
        home = ["streamlap", *path.relative_to(package.parent).parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text())):
            taken = []
            if isinstance(node, ast.Import):
                taken = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = home[: len(home) + 1 - node.level] if node.level else []
                source = ".".join([*base, *filter(None, [node.module])])
                taken = [f"{source}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                taken = [f"{node.value.id}.{node.attr}"] if node.attr.startswith("_") else []
            faults += [
                f"{path.relative_to(package.parent)}:{node.lineno}: {name} is not public"
                for name in taken
                if name.startswith("streamlap.")
                and not f"{name}.".startswith(f"{own}.")
                and name.removeprefix("streamlap.") not in public
                and name.split(".")[1] not in also
                and name not in {"streamlap.__all__", "streamlap.__version__"}
            ]
    return faults


def public_names(init: Path) -> set[str]:
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]):
            return set(ast.literal_eval(node.value))
    return set()


def test_folders_of_csrc_know_only_what_they_may():
    assert (ROOT / "csrc").is_dir()
    assert include_faults(ROOT / "csrc") == []


@pytest.mark.parametrize("name", PUBLIC_ONLY)
def test_outer_packages_use_the_public_names_only(name):
    src = ROOT / "src" / "streamlap"
    assert import_faults(src / name, public_names(src / "__init__.py"), ALSO[name]) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("base/a.h", '#include "runtime/runtime.h"'),
        ("host/a.cpp", '#include "cuda/a.h"'),
        ("runtime/a.cpp", '#include "../host/a.h"'),
        ("transfer/a.cpp", "#include <cuda_runtime.h>"),
        ("cuda/a.cpp", "#  include <torch/extension.h>"),
        ("cuda/kernels/a.cu", "#include <pybind11/pybind11.h>"),
        ("host/a.cu", ""),
        ("base/a.h", '#include "no_such.h"'),
        ("elsewhere/a.h", ""),
    ],
)
def test_a_forbidden_include_is_found(tmp_path, file, line):
    for name in ("runtime/runtime.h", "cuda/a.h", "host/a.h", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / file).write_text(line + "\n")
    assert len(include_faults(tmp_path)) == 1


def test_permitted_includes_pass(tmp_path):
    for name in ("base/a.h", "cuda/a.h", "cuda/kernels/a.cu", "bindings/a.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#include <vector>\n")
    (tmp_path / "cuda/kernels/a.cu").write_text(
        '#include <cuda_runtime.h>\n#include "../a.h"\n#include "base/a.h"\n'
    )
    (tmp_path / "bindings/a.cpp").write_text("#include <pybind11/pybind11.h>\n")
    assert include_faults(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "faults"),
    [
        ("import streamlap\nstreamlap.to_cpu", 0),
        ("from streamlap import to_cpu", 0),
        ("from .. import to_cpu\nfrom .other import thing\nfrom . import other", 0),
        ("from streamlap.training.other import thing", 0),
        ("from streamlap import _native", 1),
        ("from ..transfer import Transfer", 1),
        ("import streamlap.pinned", 1),
        ("import streamlap\nstreamlap._native", 1),
    ],
)
def test_import_faults(tmp_path, code, faults):
    package = tmp_path / "training"
    package.mkdir()
    (package / "module.py").write_text(code + "\n")
    assert len(import_faults(package, {"to_cpu"})) == faults


@pytest.mark.parametrize("name", sorted(ORDERING_MODULES))
def test_what_orders_something_is_a_site(name):
    assert site_faults(name, (ROOT / "src" / "streamlap" / f"{name}.py").read_text()) == []


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("stream.wait(event)", 1),
        ("self._call(part.native.sync, left)", 1),
        ("submit(after=[stream])", 1),
        ("stream.wait(event)  # site: a.name", 0),
        ("observe.stream_waits(stream)", 0),
    ],
)
def test_a_call_that_is_no_site_is_found(line, faults):
    assert len(site_faults("module", line + "\n")) == faults


def test_every_lock_of_a_transfer_is_a_site():
    for path in sorted((ROOT / "csrc" / "transfer").glob("*")):
        assert PLAIN_LOCK.findall(path.read_text()) == [], f"{path.name}: use an OrderLock"
