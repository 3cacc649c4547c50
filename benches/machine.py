"""What was measured on, and with what: no host name, no user, no path."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

from streamlap.info import versions as own_versions
from streamlap.sizes import memory_total

_SMI_FIELDS = (
    "driver_version,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max"
)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the machine; call it after the work, because an idle PCIe link slows down."""
    cores = len(os.sched_getaffinity(0))
    cpu = _cpu_model()
    found: dict[str, Any] = {"cpu": cpu, "cores": cores, "memory_bytes": memory_total()}
    if device.type != "cuda":
        counted = "1 core" if cores == 1 else f"{cores} cores"
        return {"kind": f"{cpu}, {counted}", "gpus": [], "driver": None, "pcie": None, **found}
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    kind = names[device.index or 0] + (f", {count} GPUs" if count > 1 else "")
    return {"kind": kind, "gpus": names, **_driver(device), **found}


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = match[1] if match else platform.machine()
    return " ".join(re.sub(r"\((?:R|TM)\)", "", model).split())


def _driver(device: torch.device) -> dict[str, Any]:
    nothing = {"driver": None, "pcie": None}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    # torch and nvidia-smi may number GPUs differently.
    which = [f"--id=GPU-{uuid}"] if uuid is not None else []
    command = ["nvidia-smi", *which, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return nothing
    fields = [field.strip() for field in done.stdout.partition("\n")[0].split(",")]
    if done.returncode or len(fields) != 5:
        return nothing
    driver, gen, gen_max, width, width_max = fields
    pcie = {"gen": gen, "gen_max": gen_max, "width": width, "width_max": width_max}
    return {"driver": driver, "pcie": pcie}


def versions(device: torch.device) -> dict[str, str | None]:
    """Return the versions of what takes part; None for what is not there."""
    found: dict[str, str | None] = {**own_versions(), "numpy": numpy.__version__}
    found["cuda"] = torch.version.cuda
    found["cupy"] = None
    if device.type == "cuda":
        try:
            import cupy
        except Exception:  # its rows say why
            return found
        found["cupy"] = cupy.__version__
    return found


def commit(folder: Path) -> dict[str, Any]:
    """Return the commit of the sources: from STREAMLAP_COMMIT, from git, or ``unknown``.

    Sources that were copied to another machine may lie in a checkout of another commit there.
    """
    named = os.environ.get("STREAMLAP_COMMIT")
    if named:
        return {"commit": named, "dirty": None}
    found = _git(folder, "rev-parse", "HEAD")
    if found:
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return {"commit": found, "dirty": None if changed is None else bool(changed)}
    return {"commit": "unknown", "dirty": None}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
