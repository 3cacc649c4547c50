"""Calls of ours in functions that torch.compile looks at: as they stand, the same bytes."""

import warnings

import pytest
import torch
from helpers.data import random_numbers, same_tree

import streamlap


def leaves(x):
    return [x * 2, (x * 3).sum(0), (x * 4).sum(1), x.t() * 5, (x + 1).view(-1)]


def copied(x):
    made = leaves(x)
    return made, streamlap.to_cpu(made).result()


def copied_twice(x):
    made = leaves(x)
    return made, streamlap.to_device(streamlap.to_cpu(made).result(), x.device).result()


def multiplied(x):
    return [x @ x] * 3, streamlap.pipelined_run(x, 3)


def prefetched(x):
    items = [x, x + 1, x + 2]
    return items, [batch * 1 for batch in streamlap.Prefetcher([i.cpu() for i in items], x.device)]


def mapped(x):
    items = [x, x + 1, x + 2]
    return [i * 2 for i in items], list(streamlap.pipelined_map(lambda y: y * 2, items))


def planned(x):
    made = leaves(x)[:3]
    return made, streamlap.TreeCopy(like=made)(made).result()


def repeated(x):
    return [x @ x] * 2, streamlap.Pipeline(like=x, n=2, graph=False)(x)


def filled(x):
    out = streamlap.empty_pinned(x.shape, x.dtype)
    streamlap.prewarm(1 << 16)
    return [x], [streamlap.to_cpu(x, out=out).result()]


CALLS = [copied, copied_twice, multiplied, prefetched, mapped, planned, repeated, filled]


@pytest.mark.parametrize("call", CALLS)
def test_the_bytes_are_right_and_nothing_of_ours_is_compiled(where, call):
    compiled = torch.compile(call, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(4, 9):
            expected, given = compiled(random_numbers((size, size), where=where))
            assert same_tree([e.cpu() for e in expected], [g.cpu() for g in given])
    torch._dynamo.reset()


def test_a_compiled_function_is_still_compiled_in_a_pipeline(where):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    double = torch.compile(lambda x: x * 2, backend=backend)
    x = random_numbers((3, 4), where=where)
    results = streamlap.pipelined_run(x, 2, fn=double)
    assert same_tree([x.cpu() * 2] * 2, results)
    assert len(graphs) == 1
    torch._dynamo.reset()
