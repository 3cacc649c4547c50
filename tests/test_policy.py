"""The policy: its defaults, what configure() takes and refuses, and what follows it."""

import dataclasses
import json
import threading

import pytest
import torch
from helpers.data import random_bits, random_numbers, same_tree

import streamlap
from streamlap import Policy, _native, cli, configure, graphs, panels, tune
from streamlap import policy as policy_in_force
from streamlap.checks import LARGEST
from streamlap.policy import KIB, MIB, for_machine
from streamlap.sizes import default_pinned_limit

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _restored():
    before = policy_in_force()
    yield
    configure(**dataclasses.asdict(before))


@pytest.mark.parametrize("cores", [1, 2, 3, 16, 128])
@pytest.mark.parametrize("limit", [4 * KIB, 64 * KIB, MIB, 100 * MIB, 2 * GIB, 500 * GIB])
def test_defaults_suit_any_machine(cores, limit):
    made = for_machine(cores, limit)
    assert 1 <= made.stage_threads <= max(1, cores // 2)
    assert 1 <= made.populate_threads <= cores
    assert 1 <= made.slab_threads <= cores
    assert made.stage_slots >= 2
    ring = made.stage_slots * made.stage_slot_bytes
    assert ring <= max(limit // 2, 8 * KIB)
    assert made.stage_slot_bytes % (4 * KIB) == 0


def test_a_large_machine_has_the_usual_numbers():
    assert for_machine(16, 64 * GIB) == Policy()


def test_a_small_machine_has_smaller_ones():
    made = for_machine(2, 256 * MIB)
    assert (made.stage_threads, made.populate_threads, made.slab_threads) == (1, 2, 2)
    assert made.stage_slots * made.stage_slot_bytes == 16 * MIB


def test_a_plain_call_stays_and_a_block_restores():
    before = policy_in_force()
    configure(depth=7)
    assert policy_in_force() == dataclasses.replace(before, depth=7)
    with configure(depth=2, chunk_bytes="3MiB") as now:
        assert now is policy_in_force()
        assert (now.depth, now.chunk_bytes) == (2, 3 * MIB)
        configure(panels=3)
    # What the block changed is as before it; what somebody else changed stays.
    assert policy_in_force() == dataclasses.replace(before, depth=7, panels=3)
    with pytest.raises(ArithmeticError), configure(depth=1):
        raise ArithmeticError
    assert policy_in_force().depth == 7


def test_every_field_can_be_set():
    for field in dataclasses.fields(Policy):
        value = getattr(policy_in_force(), field.name)
        with configure(**{field.name: value}) as now:
            assert getattr(now, field.name) == value


def test_an_unknown_name_is_told_what_there_is():
    with pytest.raises(
        streamlap.InvalidArgument, match="no 'chunks'; there is cast_blocks, chunk_bytes, depth"
    ):
        configure(chunks=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chunk_bytes", 0),
        ("chunk_bytes", -1),
        ("chunk_bytes", "many"),
        ("depth", 0),
        ("depth", 1 << 40),
        ("stage_slots", 1),
        ("stage_slot_bytes", 100),
        ("stage_threads", 0),
        ("stage_threads", 1000),
        ("populate_threads", -4),
        ("slab_threads", 0),
        ("timed_bytes", -1),
        ("slab_bytes", 0),
        ("tiny_item_bytes", -1),
        ("small_leaf_bytes", "-1MiB"),
        ("graph_item_bytes", -5),
        ("panels", 0),
        ("panels", "some"),
    ],
)
def test_a_value_that_makes_no_sense(name, value):
    before = policy_in_force()
    with pytest.raises(streamlap.InvalidArgument, match=name):
        configure(**{"depth": 3, name: value} if name != "depth" else {name: value})
    assert policy_in_force() == before


@pytest.mark.parametrize(("name", "value"), [("depth", 2.5), ("chunk_bytes", None), ("panels", [])])
def test_a_value_of_the_wrong_type(name, value):
    with pytest.raises(streamlap.InvalidType, match=name):
        configure(**{name: value})


def test_a_ring_or_a_slab_beyond_the_limit_is_refused():
    limit = default_pinned_limit()
    before = policy_in_force()
    with pytest.raises(streamlap.InvalidArgument, match="a ring of 2 slots"):
        configure(stage_slots=2, stage_slot_bytes=limit)
    with pytest.raises(streamlap.InvalidArgument, match="a slab"):
        configure(slab_bytes=limit + 1)
    assert policy_in_force() == before
    with pytest.raises(streamlap.InvalidArgument, match="each way"):
        configure(stage_slots=33, stage_slot_bytes="2MiB")
    assert policy_in_force() == before
    configure(stage_slots=2, stage_slot_bytes=min(limit // 2, 32 * MIB))


def test_the_limit_of_the_environment_counts(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("STREAMLAP_PINNED_LIMIT", "1MiB")
        with pytest.raises(streamlap.InvalidArgument, match="1048576"):
            configure(stage_slots=16, stage_slot_bytes="1MiB")


def test_threads_lose_no_change():
    names = ["depth", "chunk_bytes", "stage_threads", "populate_threads"]
    start = threading.Barrier(len(names))

    def work(name):
        start.wait()
        for value in range(2, 50):
            configure(**{name: value})

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [getattr(policy_in_force(), name) for name in names] == [49] * 4


# -- who follows it


def test_copies_are_cut_as_configured(where):
    source = random_bits(1000, where=where)
    with configure(chunk_bytes=1000):
        assert streamlap.to_cpu(source).stats()["chunks"] == 4
        assert streamlap.to_device(source.cpu(), where).stats()["chunks"] == 4
        assert streamlap.to_cpu(source, chunk_bytes=500).stats()["chunks"] == 8
    assert streamlap.to_cpu(source).stats()["chunks"] == 1


def test_pipelines_are_as_deep_as_configured():
    ahead = []

    def items():
        for index in range(12):
            ahead.append(index)
            yield index

    with configure(depth=2):
        results = streamlap.pipelined_map(lambda index: torch.tensor([index]), items())
    assert next(results).item() == 0
    assert len(ahead) <= 3
    results.close()
    x = random_numbers((16, 16))
    with configure(depth=1):
        assert same_tree(streamlap.pipelined_run(x, n=5), [x.mm(x)] * 5)


def test_small_leaves_share_a_block_up_to_the_size_configured(where):
    tree = [random_bits(100, where=where) for _ in range(3)]
    pool = streamlap.PinnedPool(MIB)
    transfer = streamlap.to_cpu(tree, pool=pool)
    assert pool.stats()["live_blocks"] == 1
    with configure(small_leaf_bytes=0):
        other = streamlap.to_cpu(tree, pool=pool)
        assert pool.stats()["live_blocks"] == 4
    assert same_tree(transfer.result(), other.result())


def test_small_blocks_are_cut_from_slabs_of_the_size_configured():
    def slabs():
        pool = streamlap.PinnedPool("64MiB")
        held = [pool.empty(1, torch.uint8) for _ in range(100)]
        assert len(held) == pool.stats()["live_blocks"]
        return pool.stats()["slabs"]

    usual = slabs()
    with configure(slab_bytes="4KiB"):
        assert slabs() == 100
    assert slabs() == usual < 100


def test_pages_are_made_present_by_the_threads_configured():
    before = _native.populate_threads()
    with configure(slab_threads=before + 3):
        assert _native.populate_threads() == before + 3
    assert _native.populate_threads() == policy_in_force().slab_threads


def test_items_are_captured_up_to_the_size_configured():
    assert graphs.is_small(2 * MIB, 50)
    with configure(graph_item_bytes=1000):
        assert graphs.is_small(1000, 50)
        assert not graphs.is_small(1001, 50)
    with configure(graph_item_bytes=0):
        assert not graphs.is_small(1, 50)


def test_ends_are_cut_as_configured():
    assert panels.resolved(None, 12) == 0
    with configure(panels=3):
        assert panels.resolved(None, 12) == 3
        assert panels.resolved(None, 13) == 1
        assert panels.resolved(panels.as_panels("auto"), 12) == 0
        assert panels.resolved(4, 12) == 4


def test_plans_are_as_deep_as_configured():
    with configure(depth=3):
        plan = streamlap.Pipeline(like=torch.ones(2, 2), n=2)
    assert plan._depth == 3
    assert streamlap.Pipeline(like=torch.ones(2, 2), n=2, depth=5)._depth == 5


@pytest.mark.gpu
def test_products_go_in_groups_up_to_the_size_configured(monkeypatch):
    from streamlap import product

    taken = []
    real = product.grouped_products
    monkeypatch.setattr(
        product, "grouped_products", lambda x, *rest: taken.append(1) or real(x, *rest)
    )
    x = random_numbers((64, 64), where="cuda:0")
    expected = [x.mm(x).cpu()] * 6
    streamlap.copy_to_cpu(x)
    assert same_tree(streamlap.pipelined_run(x, n=6), expected)
    with configure(depth=1):
        assert same_tree(streamlap.pipelined_run(x, n=6), expected)
    assert taken == [1, 1]
    with configure(tiny_item_bytes=0):
        assert same_tree(streamlap.pipelined_run(x, n=6), expected)
    assert taken == [1, 1]


# -- tune


def test_tune_prints_a_call_that_can_be_made(capsys):
    assert cli.main(["bench", "tune", "--quick"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    line = said.out.splitlines()[-1]
    eval(line, {"streamlap": streamlap})
    chosen = line[line.index("(") + 1 : -1].split(", ")
    for pair in chosen:
        name, value = pair.split("=")
        assert getattr(policy_in_force(), name) == int(value)
        assert f"{name} = {value}: " in said.out  # and why
    assert "memcpy" in said.out
    if not torch.cuda.is_available():
        assert said.out.count("needs a GPU") == 3
        assert {pair.split("=")[0] for pair in chosen} == {"stage_threads", "populate_threads"}


def test_tune_as_json(capsys):
    assert cli.main(["bench", "tune", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {trial["what"] for trial in found["trials"]} >= {"memcpy", "populate"}
    assert all(trial["rate"] > 0 for trial in found["trials"])
    assert found["configure"].startswith("streamlap.configure(")


@pytest.mark.gpu
def test_tune_with_a_gpu_chooses_sizes(capsys):
    assert cli.main(["bench", "tune", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out"] == []
    assert {"chunk_bytes", "stage_slot_bytes"} <= {choice["name"] for choice in found["choices"]}
    assert {trial["what"] for trial in found["trials"]} >= {"to host by chunk", "register"}


def test_the_smallest_setting_that_is_good_enough_is_chosen():
    assert tune._smallest({1: 9.7, 4: 34.0, 8: 53.0, 16: 52.0}) == 8
    assert tune._smallest({1: 51.0, 2: 53.0, 4: 53.1}) == 1
    found = tune.Tuning([], [], [])
    copied = {1: 9.7, 4: 34.0, 8: 56.0, 16: 65.0}
    tune._choose_threads(found, copied, {1: 5.9, 4: 20.4, 8: 10.9}, 54.0)
    assert found.line() == "streamlap.configure(stage_threads=8, populate_threads=4)"


@pytest.mark.parametrize("arguments", [["--rounds", "3"], ["--group", "job"], ["more"]])
def test_tune_takes_no_options_of_the_suite(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "tune", *arguments])
    assert ended.value.code == 2
    assert "streamlap" in capsys.readouterr().err


def test_copies_that_nobody_reads_in_pieces_are_cut_into_larger_ones():
    policy = policy_in_force()
    assert policy.bulk_chunk_bytes == 4 * policy.chunk_bytes
    largest = dataclasses.replace(policy, chunk_bytes=LARGEST)
    assert largest.bulk_chunk_bytes == LARGEST  # and no more than can be counted
