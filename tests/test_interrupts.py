"""Ctrl-C at random moments: the process ends with the status of an interrupt, at once and quietly.

The delays come from ``--seed``, and each failure names its own.
"""

import gc
import importlib
import pkgutil
import random
import re
import sys

import pytest
from helpers.processes import Ended, Server

import streamlap

LIFE = 0.6
"""Seconds for which a program works."""

PRELUDE = """
import threading, time
import torch, streamlap
from streamlap import _native
print("ready", flush=True)
begin = time.monotonic()
where = {where!r}
def going():
    return time.monotonic() < begin + {life}
def product(y):
    return y.mm(y)
x = torch.randn(64, 64, device=where)
big = torch.randn(700, 700, device=where)
"""

PROGRAMS = {
    "transfer": """
while going():
    transfers = [streamlap.to_cpu(big) for _ in range(3)]
    streamlap.to_device(transfers[0].result(), where).result()
    transfers[1].wait_source()
""",
    "ordinary": """
while going():
    streamlap.to_cpu({"a": big, "b": [x, x.t()]}, pin=False).result()
""",
    "dropped": """
while going():
    streamlap.to_cpu([x, big])
""",
    "chunks": """
while going():
    for _ in streamlap.to_cpu(big, chunk_bytes=1 << 18).chunks():
        pass
""",
    "callbacks": """
seen = []
while going():
    transfer = streamlap.to_cpu(big)
    transfer.add_done_callback(lambda t: seen.append(1))
    transfer.result()
""",
    "asyncio": """
import asyncio
async def work():
    while going():
        await streamlap.to_cpu(big)
asyncio.run(work())
""",
    "pipeline": """
while going():
    streamlap.pipelined_run(x, n=20)
""",
    "pipeline_fn": """
while going():
    streamlap.pipelined_run(x, n=20, fn=product, pin=False)
""",
    "pipeline_handle": """
while going():
    group = streamlap.pipelined_run(x, n=20, fn=product, wait=False)
    group[3]
    group.result()
""",
    "pipelines": """
while going():
    streamlap.pipelined_run([x, x], n=10)
    streamlap.parallel_run([x, x], n=10)
""",
    "map": """
while going():
    for _ in streamlap.pipelined_map(product, [x] * 20, depth=2):
        pass
""",
    "map_left_early": """
while going():
    for _ in streamlap.pipelined_map(product, [x] * 20):
        break
""",
    "pool_wait": """
pool = streamlap.PinnedPool(1 << 20)
half = torch.zeros(1 << 19, dtype=torch.uint8, device=where)
streamlap.to_cpu(half, pool=pool).result()
runtime = _native.host_runtime() if where == "cpu" else _native.cuda_runtime()
gate = _native.engine(runtime).copy_stream(0, False).gate()
opener = threading.Timer(LIFE, gate.open)
opener.daemon = True
opener.start()
while going():
    streamlap.to_cpu(half, pool=pool)
""".replace("LIFE", str(LIFE)),
    "timeline": """
while going():
    with streamlap.timeline():
        streamlap.pipelined_run(x, n=5)
""",
    "prefetcher": """
while going():
    for batch in streamlap.Prefetcher([big.cpu()] * 9, where):
        batch + 1
""",
    "activations": """
saving = streamlap.offload_activations(min_bytes=1)
y = big.clone().requires_grad_()
while going():
    with saving:
        loss = (y * 2).sin().exp().tanh().sum()
    loss.backward()
""",
    "synchronize": """
while going():
    streamlap.pipelined_run(x, n=5, wait=False)
    streamlap.synchronize()
""",
}


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.stop()


PLAIN = (
    r"Traceback \(most recent call last\):|KeyboardInterrupt|streamlap: raised by item \d+|"
    r"During handling of the above exception, another exception occurred:|"
    r"The above exception was the direct cause of the following exception:|"
    r"asyncio\.exceptions\.CancelledError"
)
# Once the program is over: Python's own words for an interrupt that meets an exit handler. Later
# yet, when Python has put the signal's default back, the process dies without a word.
AT_EXIT = r"Exception ignored in( atexit callback)?: <.*>|KeyboardInterrupt: "


def fault(ended: Ended) -> str | None:
    """What is wrong with the end of a program that was interrupted, perhaps too late; or None."""
    over = "end" in ended.out.split()
    if ended.status is None:
        return "it hung"
    if ended.seconds > 8:
        return "it took too long"
    if ended.status not in ((0, -2) if over else (-2,)):
        return "the status is wrong"
    allowed = f"(?:{PLAIN}|{AT_EXIT})" if over else f"(?:{PLAIN})"
    for line in ended.err.splitlines():
        if line and not line.startswith(" ") and not re.fullmatch(allowed, line):
            return f"this has no place on stderr: {line}"
    if not over and "KeyboardInterrupt" not in ended.err.splitlines():
        return "KeyboardInterrupt is missing"
    return None


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_at_any_moment_ends_the_program(server, where, name, seed, repeats):
    start = PRELUDE.format(where=where, life=LIFE)
    span = LIFE if where == "cpu" else LIFE + 4  # until CUDA is there
    for number in repeats(where):
        delay = random.Random(f"{seed} {name} {number}").uniform(0, span + 0.1)
        code = start + PROGRAMS[name] + 'print("end", flush=True)\n'
        ended = server.run(code, 60, "ready", delay)
        assert fault(ended) is None, (fault(ended), f"seed {seed}, delay {delay:.4f} s", ended)


def finalizers() -> list[type]:
    """Return every class of the package that has a ``__del__`` of its own."""
    found = []
    for module in pkgutil.iter_modules(streamlap.__path__, "streamlap."):
        if module.name.rpartition(".")[2].strip("_") in ("main", "native"):
            continue
        members = vars(importlib.import_module(module.name)).values()
        found += [one for one in members if isinstance(one, type) and one.__module__ == module.name]
    return [one for one in found if "__del__" in vars(one)]


def test_what_an_interrupt_left_half_made_dies_quietly(monkeypatch):
    # An interrupt may come before the first line of __init__; __del__ runs all the same.
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    classes = finalizers()
    assert classes
    for one in classes:
        one.__new__(one)
        gc.collect()
        assert not told, one


TRACEBACK = "Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n"


@pytest.mark.parametrize(
    ("ended", "wrong"),
    [
        (Ended(-2, "ready", TRACEBACK, 0.1), False),
        (Ended(0, "ready\nend", "", 0.1), False),
        (Ended(0, "ready\nend", "Exception ignored in: <module>\n" + TRACEBACK, 0.1), False),
        (Ended(-2, "ready\nend", "", 0.1), False),
        (Ended(None, "ready", "", 60.0), True),
        (Ended(-2, "ready", TRACEBACK, 20.0), True),
        (Ended(0, "ready", "", 0.1), True),  # swallowed
        (Ended(-11, "ready", "", 0.1), True),
        (Ended(1, "ready\nend", "", 0.1), True),
        (Ended(-2, "ready", "", 0.1), True),
        (Ended(-2, "ready", "Exception ignored in: <x>\n" + TRACEBACK, 0.1), True),
        (Ended(-2, "ready", TRACEBACK + "ValueError: x\n", 0.1), True),
        (Ended(-2, "ready", TRACEBACK + "terminate called\n", 0.1), True),
    ],
)
def test_a_bad_end_is_told_from_a_good_one(ended, wrong):
    assert (fault(ended) is not None) == wrong
