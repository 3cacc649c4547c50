"""Spans as a picture: time from left to right, one lane a stream or thread."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Sequence
from os import PathLike
from typing import Any

from streamlap.errors import InvalidArgument, StreamlapError
from streamlap.traces.files import replace
from streamlap.traces.spans import Span, lanes_of
from streamlap.traces.summary import overlap, summarize

_SUFFIXES = (".png", ".svg", ".pdf")

# Dark, middle and light, and hatched: told apart in grey too.
_LOOKS: dict[str, dict[str, Any]] = {
    "compute": {"facecolor": "#1f4e79", "edgecolor": "white"},
    "copy": {"facecolor": "#f4b860", "edgecolor": "#8a5a10"},
    "staging": {"facecolor": "#cfe3c8", "edgecolor": "#4d7a43", "hatch": "...."},
    "growth": {"facecolor": "#e3b3b3", "edgecolor": "#8a2f2f", "hatch": "xxxx"},
    "wait": {"facecolor": "#b0b0b0", "edgecolor": "#b0b0b0"},
}
_WORDS = {
    "compute": "compute",
    "copy": "copy",
    "staging": "last step after a copy",
    "growth": "memory from the system",
    "wait": "waits",
}
_SHADE = "#e6eef6"
_HEIGHT = 0.62  # of a bar, where a lane is 1
_WAIT_HEIGHT = 0.1
_MANY = 400  # bars in a lane; more of them are drawn without edges
_LABEL_SHARE = 0.018  # of the whole time: a bar this wide has room for its number


def plot(spans: Sequence[Span], path: str | PathLike[str], title: str | None = None) -> None:
    """Draw spans into a file; see ``Timeline.plot``."""
    name = os.fsdecode(path)
    if not name.lower().endswith(_SUFFIXES):
        raise InvalidArgument(f"a picture is a {', '.join(_SUFFIXES)} file, not {name!r}")
    if not any(span.device for span in spans):
        raise InvalidArgument("there is nothing to draw: no compute and no copy was recorded")
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StreamlapError('pictures need matplotlib: pip install "streamlap[viz]"') from error

    lanes = lanes_of(spans)
    figure = Figure(figsize=(10, 1.7 + 0.5 * len(lanes)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    work = [span for span in spans if span.device]
    first, last = min(s.begin for s in work), max(s.end for s in work)
    unit, word = _unit(last - first)
    scale = 1 / unit

    for intervals in overlap(spans).values():
        for begin, end in intervals:
            axes.axvspan(
                (begin - first) * scale, (end - first) * scale, color=_SHADE, zorder=0, lw=0
            )
    for row, lane in enumerate(lanes):
        own = [span for span in spans if span.lane == lane]
        for kind in dict.fromkeys(span.kind for span in own):
            _draw(axes, row, [s for s in own if s.kind == kind], kind, first, last, scale)

    summary = summarize(spans)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_xlim(min(0.0, min(s.begin for s in spans) - first) * scale, None)
    axes.set_xlabel(word)
    _mark_end(axes, summary.limit * scale, (last - first) * scale)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        summary.headline() if title is None else title, loc="left", fontsize=10, wrap=True
    )
    _legend(figure, {span.kind for span in spans}, any(overlap(spans).values()))
    suffix = name.lower().rpartition(".")[2]
    drawn = io.BytesIO()
    # The same spans give the same file.
    with rc_context({"svg.hashsalt": "streamlap"}):
        figure.savefig(drawn, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    content = drawn.getvalue()
    if suffix == "svg":
        words = axes.get_title(loc="left"), str(summary)
        content = _described(content.decode(), *words).encode()
    replace(name, content)


def _described(svg: str, title: str, text: str) -> str:
    """Return an SVG with words for those who do not see it."""
    start = svg.index(">", svg.index("<svg")) + 1
    words = f"\n <title>{html.escape(title)}</title>\n <desc>{html.escape(text)}</desc>"
    return svg[:start] + words + svg[start:]


def _draw(
    axes: Any,
    row: int,
    spans: list[Span],
    kind: str,
    first: float,
    last: float,
    scale: float,
) -> None:
    look = dict(_LOOKS[kind])
    height = _WAIT_HEIGHT if kind == "wait" else _HEIGHT
    if len(spans) > _MANY:
        look["edgecolor"] = look["facecolor"]
    axes.broken_barh(
        [((span.begin - first) * scale, span.seconds * scale) for span in spans],
        (row - height / 2, height),
        linewidth=0.6,
        zorder=1 if kind == "wait" else 2,
        **look,
    )
    if kind not in ("compute", "copy"):
        return
    last_end = -1.0
    number = -1
    for span in spans:
        if span.end <= last_end:
            continue  # inside another: a range within a range
        number += 1
        last_end = span.end
        if span.seconds > _LABEL_SHARE * (last - first):
            axes.text(
                (span.begin + span.end - 2 * first) / 2 * scale,
                row,
                str(number),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if kind == "compute" else "black",
                zorder=3,
            )


def _mark_end(axes: Any, limit: float, end: float) -> None:
    """Draw the limit, and where all was done."""
    axes.axvline(limit, color="black", linestyle=(0, (4, 3)), linewidth=1.2, zorder=4)
    axes.annotate(
        "limit",
        (limit, 0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axes.axvline(end, color="black", linewidth=1.2, zorder=4)
    axes.annotate(
        "done",
        (end, 0),
        xycoords=("data", "axes fraction"),
        xytext=(4, 4),
        textcoords="offset points",
        ha="left",
        fontsize=8,
    )


def _legend(figure: Any, kinds: set[str], overlapped: bool) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(label=_WORDS[kind], linewidth=0.6, **look)
        for kind, look in _LOOKS.items()
        if kind in kinds
    ]
    if overlapped:
        patches.append(Patch(label="both at once", facecolor=_SHADE))
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=len(patches),
        frameon=False,
        fontsize=8,
    )


def _unit(seconds: float) -> tuple[float, str]:
    if seconds >= 2:
        return 1.0, "seconds"
    return (1e-3, "milliseconds") if seconds >= 2e-3 else (1e-6, "microseconds")
