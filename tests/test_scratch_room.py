"""How much scratch memory transfers may have together: the bookkeeping, which needs no GPU."""

import gc

import torch

from streamlap import scratch


def test_what_is_taken_comes_back_when_the_memory_dies():
    in_use = scratch._InUse()
    number = in_use.reserve(6, 10)
    assert number is not None
    assert in_use.reserve(6, 10) is None
    memory = torch.empty(6, dtype=torch.uint8)
    in_use.take(number, memory)
    in_use.settle(number, False)
    assert in_use.reserve(6, 10) is None
    del memory
    gc.collect()
    assert in_use.reserve(6, 10) is not None


def test_a_reservation_that_came_to_nothing_is_no_more():
    in_use = scratch._InUse()
    number = in_use.reserve(10, 10)
    assert number is not None
    in_use.settle(number, False)
    assert in_use.reserve(10, 10) is not None


def test_after_the_device_had_no_memory_it_is_left_alone_for_a_while(monkeypatch):
    in_use = scratch._InUse()
    number = in_use.reserve(1, 10)
    assert number is not None
    in_use.settle(number, True)
    assert in_use.reserve(1, 10) is None
    later = scratch.time.monotonic() + scratch.PAUSE + 1
    monkeypatch.setattr(scratch.time, "monotonic", lambda: later)
    assert in_use.reserve(1, 10) is not None


def test_asking_inside_of_asking_is_no_deadlock():
    """A collection of garbage may come at any moment, and run a destructor that copies."""
    in_use = scratch._InUse()
    inside: list[bool] = []
    asked: list[int | None] = []

    class Odd(dict):
        def items(self):
            if not inside:
                inside.append(True)
                asked.append(in_use.reserve(1, 10))
            return super().items()

    in_use._taken = Odd()
    first = in_use.reserve(4, 10)
    assert first is not None
    assert asked[0] is not None
    assert asked[0] != first
    assert in_use.reserve(6, 10) is None
    assert in_use.reserve(5, 10) is not None
