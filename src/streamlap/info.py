"""``streamlap info``: what this machine and this build have, and why something is missing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
from typing import Any

import torch

from streamlap import _native
from streamlap._version import __version__
from streamlap.devices import cuda_reason, cuda_runtime, devices
from streamlap.pinned import PinnedPool, pool_stats
from streamlap.serving import host_runtime
from streamlap.sizes import format_size

_TRIAL_BYTES = 64 << 20

_EXAMPLES = """\
examples:
  streamlap info
  streamlap info --json
"""


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "info",
        help="show devices, build, versions and pinned memory",
        description="Show the devices, which runtime serves them, the build, and pinned memory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Print what there is."""
    found = collect()
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))
    return 0


def versions() -> dict[str, str]:
    """Return the versions of what matters."""
    return {
        "streamlap": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def collect() -> dict[str, Any]:
    """Return everything that the command shows, ready for JSON."""
    probe = _native.cuda_probe()
    pools = {"cpu": pool_stats("cpu")}
    how = {"cpu": host_runtime().pinned_how}
    if not cuda_reason():
        with contextlib.suppress(MemoryError):  # one large block, so that it is known how fast
            PinnedPool(_TRIAL_BYTES).empty(_TRIAL_BYTES, torch.uint8)
        pools["cuda"] = pool_stats("cuda")
        how["cuda"] = cuda_runtime().pinned_how
    return {
        "versions": versions(),
        "devices": [vars(device) for device in devices()],
        "no_gpu_reason": cuda_reason(),
        "build": {
            "cuda": bool(probe["built"]),
            "cuda_version": _cuda_version(int(probe["runtime_version"])),
            "architectures": [name for name in str(probe["architectures"]).split(",") if name],
            "driver_cuda_version": _cuda_version(int(probe["driver_version"])),
        },
        "pools": pools,
        "pools_made_of": how,
        "pool_limit_from": _limit_source(),
    }


def _cuda_version(number: int) -> str | None:
    """Return CUDA's version from its number, as 13000 is 13.0; None for none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _limit_source() -> str:
    if os.environ.get("STREAMLAP_PINNED_LIMIT"):
        return "STREAMLAP_PINNED_LIMIT"
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    shared = ""
    if processes.isdecimal() and int(processes) > 0:
        shared = f", divided by LOCAL_WORLD_SIZE={processes}" if int(processes) > 1 else ""
    elif processes:
        shared = f" (LOCAL_WORLD_SIZE={processes!r} is no positive number and was ignored)"
    return f"a quarter of the memory{shared}; STREAMLAP_PINNED_LIMIT overrides it"


def as_text(found: dict[str, Any]) -> str:
    """Return it for people."""
    numbers, build = found["versions"], found["build"]
    lines = [
        f"streamlap {numbers['streamlap']}, torch {numbers['torch']}, Python {numbers['python']}",
        "",
        "devices",
    ]
    for device in found["devices"]:
        lines.append(
            f"  {device['name']:<8}{device['runtime']:<6}{device['description']}, "
            f"{format_size(device['memory'])}"
        )
    if found["no_gpu_reason"]:
        lines.append(f"  no GPU: {found['no_gpu_reason']}")
    if build["cuda"]:
        driver = build["driver_cuda_version"]
        built = f"with CUDA {build['cuda_version']} for {', '.join(build['architectures'])}"
        built += f"; the driver knows CUDA {driver}" if driver else "; there is no driver"
    else:
        built = "without CUDA"
    lines += ["", "build", f"  {built}", "", "pinned memory"]
    for name, stats in found["pools"].items():
        lines.append(
            f"  {name:<8}limit {format_size(stats['limit'])}, held {format_size(stats['live'])}, "
            f"cached {format_size(stats['cached'])}, peak {format_size(stats['peak'])}; "
            f"large blocks: {found['pools_made_of'][name]}"
        )
    lines.append(f"  the limit is {found['pool_limit_from']}")
    return "\n".join(lines)
