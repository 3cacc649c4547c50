"""``streamlap verify``: results held against those of NumPy, stock torch and CuPy."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from streamlap.crosscheck import cupy_pipeline, verify
from streamlap.crosscheck.verify import FAILED, MISSING, OK, PARTS, Finding, Setting
from streamlap.devices import cuda_reason, cuda_runtime
from streamlap.errors import InvalidArgument
from streamlap.info import versions

_DESCRIPTION = """\
Compare copies bit for bit with those of NumPy, stock torch and CuPy, and products with
float64 ones within an error bound, and say which parts this machine can run.
"""
_EXAMPLES = """\
examples:
  streamlap verify                              what this machine can run
  streamlap verify --device cpu                 the runtime on threads only
  streamlap verify --require gpu --require cupy fail where one of them is missing
  streamlap verify --json > verify.json
"""
_MOST_ROWS = 8192
_MOST_ITEMS = 1000


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "verify",
        help="check results against NumPy, stock torch and CuPy",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", type=_device, help="cpu or cuda:N (default: cuda:0 where there is a GPU)"
    )
    parser.add_argument(
        "--size",
        type=lambda text: _number(text, 1, _MOST_ROWS),
        default=256,
        metavar="N",
        help="rows and columns of the matrices (default: 256)",
    )
    parser.add_argument(
        "--n",
        type=lambda text: _number(text, 1, _MOST_ITEMS),
        default=8,
        metavar="N",
        help="items of a pipeline (default: 8)",
    )
    parser.add_argument(
        "--seed",
        type=lambda text: _number(text, 0, 2**63 - 1),
        default=0,
        metavar="N",
        help="of the random data (default: 0)",
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        choices=PARTS,
        metavar="PART",
        help=f"a part that must be there: {', '.join(PARTS)} (repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run_command)


def _number(text: str, least: int, most: int) -> int:
    value = int(text) if re.fullmatch(r"\d{1,19}", text) else -1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least} to {most}")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda:\d{1,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; write cpu or cuda:0")
    return text


def run_command(arguments: argparse.Namespace) -> int:
    """Run the checks; the exit status is 1 when one failed."""
    device = _chosen(arguments.device)
    setting = Setting(device, arguments.size, arguments.n, arguments.seed)
    findings = verify.run(setting, missing_parts(device), arguments.require)
    print(json.dumps(as_json(setting, findings), indent=2) if arguments.json else as_text(findings))
    return 1 if any(finding.outcome == FAILED for finding in findings) else 0


def _chosen(device: str | None) -> str:
    if device is None:
        return "cpu" if cuda_reason() else "cuda:0"
    if device != "cpu":
        reason = cuda_reason()
        if reason:
            raise InvalidArgument(f"{device}: no GPU can be used: {reason}")
        count = cuda_runtime().device_count
        if int(device.removeprefix("cuda:")) >= count:
            raise InvalidArgument(f"no device {device}: GPUs here: {count}")
    return device


def missing_parts(device: str) -> dict[str, str]:
    """Return the parts whose checks cannot run on ``device``, each with the reason."""
    no_gpu = cuda_reason()
    if no_gpu:
        no_gpu = f"no GPU: {no_gpu}"
    elif device == "cpu":
        no_gpu = "--device cpu"
    no_cupy = cupy_pipeline.not_installed() or no_gpu or cupy_pipeline.why_not()
    return {part: why for part, why in (("gpu", no_gpu), ("cupy", no_cupy)) if why}


# -- output


def as_json(setting: Setting, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return everything that was found, ready for JSON."""
    return {
        "versions": _versions(),
        "settings": vars(setting),
        "passed": all(finding.outcome != FAILED for finding in findings),
        "checks": [
            {
                "name": finding.check.name,
                "part": finding.check.part,
                "outcome": finding.outcome,
                "detail": finding.detail,
            }
            for finding in findings
        ],
        "result": sentence(findings),
    }


def _versions() -> dict[str, str]:
    cupy = sys.modules.get("cupy")
    return versions() | ({} if cupy is None else {"cupy": cupy.__version__})


def as_text(findings: Sequence[Finding]) -> str:
    """Return the table for people, the result in its last line."""
    numbers = _versions()
    others = f", CuPy {numbers['cupy']}" if "cupy" in numbers else ""
    lines = [
        f"streamlap {numbers['streamlap']}, torch {torch.__version__}{others}, "
        f"Python {numbers['python']}",
        "",
    ]
    width = max((len(finding.check.name) for finding in findings), default=0)
    for finding in findings:
        told = {OK: f"ok: {finding.detail}", MISSING: f"{MISSING}: {finding.detail}"}
        outcome = told.get(finding.outcome, f"{FAILED}: {finding.detail}")
        lines.append(f"{finding.check.part:<6}{finding.check.name:<{width}}  {outcome}")
    return "\n".join([*lines, "", sentence(findings)])


def sentence(findings: Sequence[Finding]) -> str:
    """Return the result in one line."""
    count = {
        outcome: sum(finding.outcome == outcome for finding in findings)
        for outcome in (OK, FAILED, MISSING)
    }
    words = [f"{count[OK]} checks passed"]
    if count[FAILED]:
        words.append(f"{count[FAILED]} FAILED")
    if count[MISSING]:
        words.append(f"{count[MISSING]} cannot run here")
    return ", ".join(words) + "."
