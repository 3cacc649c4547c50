"""``streamlap bench``: the suite in ``benches/``, which stays in the source checkout."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from streamlap import tune
from streamlap.errors import InvalidArgument

_DESCRIPTION = """\
Measure streamlap beside its peers: stock PyTorch, streams by hand, CuPy. The rows of a
table run in turn, in every round, and their results are compared bit for bit. A row
that fails says why; the others go on, and the exit status is 1.
"""
_EXAMPLES = """\
examples:
  streamlap bench                      everything that means something on this machine
  streamlap bench --quick              small sizes, few rounds: does it work?
  streamlap bench --group job --dtype bf16 --json > job.json
  streamlap bench --report             write docs/performance.md from benches/results
  streamlap bench tune                 measure this machine; print the policy that suits it
"""
_MOST_ROUNDS = 1000


_PARTS = {
    "suite": ("setting", "measure", "save", "require_folder", "failures", "as_json"),
    "report": ("write", "PAGE"),
    "table": ("as_text",),
}


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure streamlap beside its peers",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME",
        help="only this group, may be given again: job, first, ordinary, pinned, tiny, small, "
        "gradients, kernels, two_gpus (default: all)",
    )
    parser.add_argument(
        "--dtype", metavar="NAME", help="fp32, tf32 or bf16 (default: by the group)"
    )
    parser.add_argument("--rounds", type=_rounds, metavar="N", help="(default: 9; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is kept")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda:N (default: a GPU if any)")
    parser.add_argument("--json", action="store_true", help="print the document instead")
    parser.add_argument(
        "--save",
        action=argparse.BooleanOptionalAction,
        help="keep the result in the suite's folder results (default: yes, but not of --quick)",
    )
    parser.add_argument("--report", action="store_true", help="write the page; measure nothing")
    parser.add_argument("--suite", type=Path, metavar="DIR", help="where the suite is")
    parser.set_defaults(run=run_command)
    tune.add_parser(parser.add_subparsers(title="instead of the suite", metavar="COMMAND"))


def _rounds(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= _MOST_ROUNDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {_MOST_ROUNDS}")
    return int(text)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the suite, or write its page; the exit status is 1 when a row failed."""
    if arguments.report:
        _require_nothing_else(arguments)
        report = load("report", arguments.suite)
        print(f"wrote {report.PAGE.name} from {report.write()} results")
        return 0
    suite = load("suite", arguments.suite)
    chosen = suite.setting(arguments.device, arguments.dtype, arguments.rounds, arguments.quick)
    keep = not arguments.quick if arguments.save is None else arguments.save
    if keep:
        suite.require_folder()  # before minutes are spent
    document = suite.measure(chosen, list(dict.fromkeys(arguments.group)))
    saved = suite.save(document) if keep else None
    if arguments.json:
        print(suite.as_json(document))
    else:
        print(load("table", arguments.suite).as_text(document))
        if saved is not None:
            print(f"\nkept in {saved.parent.parent.name}/{saved.parent.name}/{saved.name}")
    failed = suite.failures(document)
    if failed:
        print(f"streamlap: {len(failed)} failed; the first: {failed[0]}", file=sys.stderr)
    return 1 if failed else 0


def _require_nothing_else(arguments: argparse.Namespace) -> None:
    others = ("group", "dtype", "rounds", "quick", "device", "json")
    given = [name for name in others if getattr(arguments, name)]
    if arguments.save is not None:
        given.append("save" if arguments.save else "no-save")
    if given:
        raise InvalidArgument(f"--report measures nothing: leave out --{given[0]}")


def load(module: str, folder: Path | None = None) -> Any:
    """Import a module of the suite.

    Args:
        module: its name in the suite's folder.
        folder: the suite; None: the one beside this package, in a source checkout.

    Raises:
        InvalidArgument: there is no suite.
    """
    # In a checkout this file is src/streamlap/bench.py.
    place = (folder or Path(__file__).parents[2] / "benches").resolve()
    if not (place / "suite.py").is_file() or not place.name.isidentifier():
        where = (
            f"{str(folder)!r} is no bench suite" if folder else "the bench suite is not installed"
        )
        raise InvalidArgument(f"{where}: give the folder benches of a source checkout with --suite")
    parent = str(place.parent)
    if parent not in sys.path:
        sys.path.insert(0, parent)
    package = importlib.import_module(place.name)
    if package.__file__ is None:
        raise InvalidArgument(f"{str(folder)!r} is no bench suite: it has no __init__.py")
    if Path(package.__file__).resolve().parent != place:
        raise InvalidArgument(
            f"another package is called {place.name!r}: rename the suite's folder"
        )
    found = importlib.import_module(f"{place.name}.{module}")
    missing = [name for name in _PARTS.get(module, ()) if not hasattr(found, name)]
    if missing:
        raise InvalidArgument(f"{str(folder)!r} is no bench suite: {module} has no {missing[0]}()")
    return found
