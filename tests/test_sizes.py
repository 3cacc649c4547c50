"""Sizes in bytes, and how much memory there is to share."""

import pytest

from streamlap import StreamlapError
from streamlap.sizes import default_pinned_limit, format_size, memory_total, parse_size


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("17B", 17),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        (" 3KiB ", 3072),
        ("1TiB", 1 << 40),
        ("1kb", 1000),
        ("1MB", 10**6),
        ("2GB", 2 * 10**9),
        ("1TB", 10**12),
        ("0.5KiB", 512),
        ("1.5MiB", 3 << 19),
        (str(2**62), 2**62),
    ],
)
def test_sizes(size, expected):
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (-1, ValueError),
        ("-1", ValueError),
        ("", ValueError),
        ("GiB", ValueError),
        ("2 parsecs", ValueError),
        ("2GiBs", ValueError),
        ("1e9", ValueError),
        ("1.2.3MB", ValueError),
        ("\u0662MiB\u00b2", ValueError),
        (1.5, TypeError),
        (True, TypeError),
        (None, TypeError),
        (b"2GiB", TypeError),
    ],
)
def test_what_is_no_size(size, kind):
    with pytest.raises(kind, match="the thing") as caught:
        parse_size(size, "the thing")
    assert isinstance(caught.value, StreamlapError)


def test_an_unknown_unit_is_named_and_the_known_ones_listed():
    with pytest.raises(ValueError, match=r"'2 parsecs'.*GiB"):
        parse_size("2 parsecs")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (61 << 20, "61.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_sizes_for_people(size, text):
    assert format_size(size) == text


def machine(tmp_path, total_kb=1000, group="", **limits):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal:       {total_kb} kB\nMemFree: 5 kB\n")
    (proc / "self/cgroup").write_text(f"0::/{group}\n")
    (cgroup / group).mkdir(parents=True)
    for path, value in limits.items():
        (cgroup / path.replace("__", "/") / "memory.max").write_text(f"{value}\n")
    return proc, cgroup


def test_memory_without_a_limit(tmp_path):
    assert memory_total(*machine(tmp_path)) == 1000 * 1024


def test_the_tightest_group_counts(tmp_path):
    proc, cgroup = machine(tmp_path, group="a/b", a=5000, a__b=7000)
    assert memory_total(proc, cgroup) == 5000
    (cgroup / "a/memory.max").write_text("max\n")
    assert memory_total(proc, cgroup) == 7000
    (cgroup / "a/b/memory.max").write_text("max\n")
    assert memory_total(proc, cgroup) == 1000 * 1024


def test_the_root_s_limit_counts_inside_a_container(tmp_path):
    proc, cgroup = machine(tmp_path)
    (cgroup / "memory.max").write_text("4000\n")
    assert memory_total(proc, cgroup) == 4000


def test_version_1_of_cgroups(tmp_path):
    proc, cgroup = machine(tmp_path)
    (proc / "self/cgroup").write_text("5:memory:/docker/x\n")
    (cgroup / "memory").mkdir()
    (cgroup / "memory/memory.limit_in_bytes").write_text("3000\n")
    assert memory_total(proc, cgroup) == 3000


def test_a_limit_above_the_machine_s_memory(tmp_path):
    proc, cgroup = machine(tmp_path)
    (cgroup / "memory.max").write_text(f"{1 << 60}\n")
    assert memory_total(proc, cgroup) == 1000 * 1024


def test_no_meminfo_at_all(tmp_path):
    proc, cgroup = machine(tmp_path)
    (proc / "meminfo").write_text("nothing\n")
    with pytest.raises(OSError, match="MemTotal"):
        memory_total(proc, cgroup)


def test_the_default_limit(monkeypatch):
    monkeypatch.delenv("STREAMLAP_PINNED_LIMIT", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = default_pinned_limit()
    assert 0.2 * memory_total() < whole <= memory_total() / 4 + 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert abs(default_pinned_limit() - whole / 8) < whole / 50
    for odd in ("0", "nonsense", "-2"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", odd)
        assert abs(default_pinned_limit() - whole) < whole / 50
    monkeypatch.setenv("STREAMLAP_PINNED_LIMIT", "3MiB")
    assert default_pinned_limit() == 3 << 20


@pytest.mark.parametrize("value", ["lots", "-5", "2 parsecs"])
def test_a_bad_limit_in_the_environment_is_named(monkeypatch, value):
    monkeypatch.setenv("STREAMLAP_PINNED_LIMIT", value)
    with pytest.raises(ValueError, match="STREAMLAP_PINNED_LIMIT"):
        default_pinned_limit()
