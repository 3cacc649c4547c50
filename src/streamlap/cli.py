"""The command line. Each command is a file with ``add_parser``; this one names them."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch

from streamlap import bench, demo, info, verify_command
from streamlap._version import __version__
from streamlap.errors import InvalidArgument, StreamlapError
from streamlap.traces import command as timeline_command

_COMMANDS = (demo, bench, timeline_command, verify_command, info)
_EXAMPLES = """\
examples:
  streamlap info             what this machine and this build have
  streamlap demo             the experiment, on all GPUs or on the CPU
  streamlap timeline         what runs when: a trace, a picture, a summary
  streamlap bench --quick    does the bench suite work here?
  streamlap verify           results against NumPy, stock torch and CuPy
  streamlap demo --help      its options
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (try '{self.prog} --help')\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="streamlap",
        description="Hide copies between devices and host behind compute.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamlap {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0: done; 1: it failed; 2: bad arguments; 130: interrupted. One line on stderr says why.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            # Without a driver a CUDA build of torch warns; the commands say it in their own words.
            warnings.filterwarnings("ignore", message="CUDA initialization")
            status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except InvalidArgument as error:
        return _failed(error, 2)
    except (StreamlapError, torch.OutOfMemoryError) as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except OSError as error:
        # Nothing more can be written; what Python still has to flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A reader that has left is no news to anybody.
        return 1 if isinstance(error, BrokenPipeError) else _failed(error, 1)


def _failed(reason: object, status: int) -> int:
    line = " ".join(str(reason).split())
    print(f"streamlap: {line}", file=sys.stderr)
    return status
