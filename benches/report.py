"""Writes ``docs/performance.md`` from the results. The same results give the same page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamlap.errors import InvalidArgument

from . import binary_report
from .groups import GROUPS
from .suite import FOLDER, RESULTS
from .table import commit, header, rate, rate_heading, ratio, seconds

_NEEDED = ("date", "machine", "versions", "commit", "dirty", "settings", "notes", "tables")
PAGE = FOLDER.parent / "docs" / "performance.md"

_INTRODUCTION = """\
# Performance

streamlap beside its peers. This page is made by `make bench-report` from the files in
`benches/results/`; do not edit it. To measure again:

```sh
make bench                     # everything that means something on this machine; keeps the result
streamlap bench --group job    # one group; --help names the other options
make bench-report              # this page
```

In a table all rows were run in turn, once in every round, each from an idle machine until its
results could be read on the host. Times are medians. Results were compared bit for bit in the first
round and in the last, outside the clock. An absolute time holds for its machine and its run; the
ratio says more.

- *x limit* is the time divided by the longer of compute alone and copy alone.
- *x best peer* is the time divided by that of the fastest row that is not streamlap's. A row that
  is there as a bound, like the wire, is no peer.
- **Bold** rows are streamlap's.
"""


def documents(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return all results, the newest first. Quick ones are no measurement."""
    found = [_document(path) for path in sorted(folder.glob("*.json"))]
    kept = [document for document in found if not document["settings"]["quick"]]
    return sorted(kept, key=lambda document: str(document["date"]), reverse=True)


def _document(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        return {name: document[name] for name in _NEEDED} | document
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path.name} is no result of the bench suite ({error})") from error


def page(found: list[dict[str, Any]], binary: Path = RESULTS / "binary") -> str:
    """Return the page: a section for each kind of machine, GPUs first, then the bench binary's."""
    kinds = {document["machine"]["kind"]: not document["machine"]["gpus"] for document in found}
    lines = [_INTRODUCTION]
    for kind in sorted(kinds, key=lambda kind: (kinds[kind], kind)):
        lines += _section(kind, [one for one in found if one["machine"]["kind"] == kind])
    if not kinds:
        lines.append("Nothing has been measured yet.\n")
    lines += binary_report.lines(binary)
    return "\n".join(lines)


def _section(kind: str, found: list[dict[str, Any]]) -> list[str]:
    newest = found[0]
    lines = [f"## {kind}", "", "; ".join(header(newest)) + ".", ""]
    notes = dict.fromkeys(note for note in newest["notes"])
    lines += [*[f"- {note}" for note in notes], ""] if notes else []
    for name, group in GROUPS.items():
        # Tables, not files: a run of one group does not hide the others of an earlier run.
        tables: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        for document in found:
            for table in document["tables"]:
                if table["group"] == name:
                    tables.setdefault(table["title"], (document, table))
        if tables:
            lines += [f"### {group.TITLE}", "", group.ABOUT, ""]
            for title in sorted(tables, key=lambda title: _place(title, tables[title])):
                lines += _table(*tables[title], newest)
    return lines


def _place(title: str, found: tuple[dict[str, Any], dict[str, Any]]) -> tuple[int, str]:
    document, _ = found
    return [table["title"] for table in document["tables"]].index(title), title


def _table(document: dict[str, Any], table: dict[str, Any], newest: dict[str, Any]) -> list[str]:
    heading = rate_heading(table)
    columns = ["", "median", "min", "max", *([heading] if heading else []), f"x {table['against']}"]
    measured = f"{document['date'][:10]}, {commit(document)}, {table['rounds']} rounds"
    if header(document) != header(newest):
        measured += f"; {'; '.join(header(document))}"
    lines = [
        f"{table['title'][0].upper()}{table['title'][1:]} ({measured}):",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' + '---:|' * (len(columns) - 1)}",
    ]
    for row in table["rows"]:
        name = f"**{row['row']}**" if row["kind"] == "ours" else row["row"]
        if row["failed"]:
            reason = row["failed"].replace("|", "\\|")
            cells = [name, f"failed: {reason}", *[""] * (len(columns) - 2)]
        else:
            times = [seconds(row[key]) for key in ("seconds", "min", "max")]
            rates = [rate(table, row)] if heading else []
            cells = [name, *times, *rates, ratio(row)]
        lines.append(f"| {' | '.join(cells)} |")
    fewer = [
        f"{row['row']}: {len(row['samples'])} rounds"
        for row in table["rows"]
        if not row["failed"] and len(row["samples"]) < table["rounds"]
    ]
    return [*lines, "", *([f"{'; '.join(fewer)}.", ""] if fewer else [])]


def write(path: Path = PAGE, folder: Path = RESULTS) -> int:
    """Write the page; return how many results it is made of."""
    found = documents(folder)
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(found, folder / "binary"))
    return len(found)


if __name__ == "__main__":
    write()
