"""The arithmetic, the trace file and the picture of a timeline, on spans made by hand."""

import json
import math
import sys
from xml.etree import ElementTree

import pytest

import streamlap
from streamlap.traces import perfetto, picture
from streamlap.traces.spans import Span, both, lanes_of, length, union
from streamlap.traces.summary import overlap, summarize

WORDS = ("title", "desc")


def compute(begin, end, device="cuda:0", lane=""):
    return Span("compute", "fn", lane or f"{device} compute", begin, end, 0, device)


def copy(begin, end, device="cuda:0", path="direct", nbytes=1000):
    return Span("copy", "copy", f"{device} to host", begin, end, nbytes, device, "", path)


def wait(who, whom, begin, end):
    return Span("wait", f"waits for {whom}", who, begin, end, waits_for=whom)


# Four products of 2 s, the copies of 1 s behind them: 9 s, three of four copies hidden.
JOB = [
    *[compute(2.0 * index, 2.0 * index + 2.0) for index in range(4)],
    *[copy(2.0 * index + 2.0, 2.0 * index + 3.0) for index in range(4)],
]


def test_intervals():
    spans = [compute(3, 4), compute(0, 1), compute(0.5, 2), compute(2, 2.5)]
    assert union(spans) == [(0, 2.5), (3, 4)]
    assert length(union(spans)) == 3.5
    assert both([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert both([], [(1, 2)]) == []
    assert both([(0, 1)], [(1, 2)]) == []


def test_the_figures_of_a_job():
    found = summarize(JOB)
    assert found.seconds == 9
    assert (found.compute_seconds, found.copy_seconds, found.limit) == (8, 4, 8)
    assert found.overlap_fraction == 3 / 4
    assert found.over_limit == 9 / 8
    assert found.copied_bytes == 4000
    gaps = {idle.lane: (idle.gaps, idle.seconds, idle.longest) for idle in found.idle}
    assert gaps == {"cuda:0 compute": (0, 0, 0), "cuda:0 to host": (3, 3, 1)}
    assert found.advice.startswith("advice: compute-bound")
    assert "9.0000 s, 1.125 x the limit (12.0000 s one by one, 75.0% hidden)" in str(found)
    assert overlap(JOB) == {"cuda:0": [(2, 3), (4, 5), (6, 7)]}


def test_devices_overlap_with_themselves_only():
    apart = [compute(0, 1), copy(0, 1, device="cuda:1")]
    assert math.isnan(summarize(apart).overlap_fraction)
    pair = [*JOB, compute(0, 1, "cuda:1"), copy(1, 2, "cuda:1")]
    assert summarize(pair).overlap_fraction == 3 / 5
    assert summarize(pair).limit == 8


def test_who_waited_for_whom_is_added_up():
    spans = [*JOB, wait("a", "b", 0, 1), wait("a", "b", 3, 3.5), wait("b", "a", 0, 2)]
    assert summarize(spans).waits == {("a", "b"): 1.5, ("b", "a"): 2}
    assert "a waited 1.5000 s for b" in str(summarize(spans))


@pytest.mark.parametrize(
    ("spans", "word"),
    [
        ([], "nothing of streamlap ran"),
        (JOB, "compute-bound"),
        ([compute(0, 1), copy(0, 2), copy(2, 4)], "copy-bound"),
        ([compute(0, 1), copy(1, 2), compute(2, 3), copy(3, 4)], "2.00 x the limit"),
        ([compute(0, 1), copy(1, 2), wait("a", "b", 0, 2)], "a waited 2.000 s for b"),
        ([*JOB, Span("growth", "g", "thread", 0, 3)], "cold pool"),
        ([compute(0, 4), copy(0, 4, path="staged")], "ordinary memory"),
        ([compute(0, 1)], "only compute"),
        ([copy(0, 1)], "only copies"),
    ],
)
def test_advice_is_one_line_that_fits(spans, word):
    found = summarize(spans)
    assert word in found.advice
    assert "\n" not in found.advice
    assert found.advice in str(found)


def test_an_empty_timeline_has_no_figures():
    found = summarize([])
    assert found.limit == 0
    assert math.isnan(found.over_limit)
    assert math.isnan(found.overlap_fraction)
    assert str(found).startswith("nothing was recorded")


def test_lanes_are_in_the_order_that_people_read():
    spans = [
        wait("thread Main", "x", 0, 1),
        Span("copy", "c", "cuda:0 to device", 0, 1, 1, "cuda:0"),
        copy(0, 1),
        compute(0, 1, lane="cuda:0 compute 2"),
        compute(0, 1),
        compute(0, 1, "cuda:1"),
    ]
    assert lanes_of(spans) == [
        "cuda:0 compute",
        "cuda:0 compute 2",
        "cuda:0 to host",
        "cuda:0 to device",
        "cuda:1 compute",
        "thread Main",
    ]


def test_a_trace_has_every_span_in_microseconds(tmp_path):
    spans = [*JOB, wait("thread Main", "cuda:0 to host", 0, 9)]
    perfetto.save(spans, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    assert [(e["ts"], e["dur"], e["cat"]) for e in timed] == [
        (span.begin * 1e6, span.seconds * 1e6, span.kind) for span in spans
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[e["pid"], e["tid"]] for e in timed] == [span.lane for span in spans]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(processes.values()) == {"cuda:0", "threads"}
    assert timed[-1]["args"] == {"waits_for": "cuda:0 to host"}
    with pytest.raises(streamlap.InvalidArgument, match=r"\.json"):
        perfetto.save(spans, tmp_path / "t.txt")


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures_are_written(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    picture.plot(JOB, path)
    assert path.stat().st_size > 1000
    if suffix == ".svg":
        text = path.read_text()
        for word in ("cuda:0 compute", "cuda:0 to host", "limit", "both at once"):
            assert f"<!-- {word} -->" in text
        root = ElementTree.parse(path).getroot()
        found = {name: root.find(f"{{http://www.w3.org/2000/svg}}{name}").text for name in WORDS}
        assert found == {"title": summarize(JOB).headline(), "desc": str(summarize(JOB))}


def test_a_picture_of_many_items_and_one_of_microseconds(tmp_path):
    many = [compute(index * 1e-6, (index + 0.5) * 1e-6) for index in range(1000)]
    picture.plot(many, tmp_path / "many.png", "a title")
    assert (tmp_path / "many.png").exists()


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    with pytest.raises(streamlap.InvalidArgument, match=r"\.png"):
        picture.plot(JOB, tmp_path / "t.jpeg")
    with pytest.raises(streamlap.InvalidArgument, match="nothing to draw"):
        picture.plot([wait("a", "b", 0, 1)], tmp_path / "t.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(streamlap.StreamlapError, match=r"streamlap\[viz\]"):
        picture.plot(JOB, tmp_path / "t.png")
    assert list(tmp_path.iterdir()) == []


def test_files_may_be_named_in_every_way_and_are_whole_or_not_there(tmp_path, monkeypatch):
    for name in (tmp_path / "a.JSON", str(tmp_path / "b.json"), bytes(tmp_path / "c.json")):
        perfetto.save(JOB, name)
    picture.plot(JOB, bytes(tmp_path / "d.SVG"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.JSON",
        "b.json",
        "c.json",
        "d.SVG",
    ]
    before = (tmp_path / "d.SVG").read_bytes()
    picture.plot(JOB, tmp_path / "d.SVG")
    assert (tmp_path / "d.SVG").read_bytes() == before  # the same spans, the same file
    (tmp_path / "e.json").mkdir()
    with pytest.raises(OSError, match=r"e\.json"):
        perfetto.save(JOB, tmp_path / "e.json")
    with pytest.raises(OSError, match="nowhere"):
        perfetto.save(JOB, tmp_path / "nowhere" / "e.json")
    assert len(list(tmp_path.iterdir())) == 5


def test_the_legend_names_no_overlap_where_there_is_none(tmp_path):
    picture.plot([compute(0, 1), copy(1, 2)], tmp_path / "t.svg")
    assert "both at once" not in (tmp_path / "t.svg").read_text()
