"""How a process ends: the status it asked for, nothing on stderr, no hang. Forks and Ctrl-C too."""

import subprocess
import sys

import pytest
from helpers.processes import Server, run_fresh

PRELUDE = """
import gc, os, signal, sys, threading, time, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # forks are what is tested
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # torch, in a thread's first product
import torch, streamlap
from streamlap import _native
where = {where!r}
x = torch.randn(64, 64, device=where)
big = torch.randn(1500, 1500, device=where)
if where == "cpu":
    def held():
        return _native.engine(_native.host_runtime()).copy_stream(0, False).gate()
else:
    def held():
        runtime = _native.cuda_runtime()
        return _native.engine(runtime).copy_stream(0, False).gate()
streamlap.copy_to_cpu(big)
streamlap.copy_to_cpu(x)
"""


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.stop()


def script(where, code):
    return PRELUDE.format(where=where) + code


# name: (code, status, text on stderr or None)
ENDS = {
    "in_flight": ("t = [streamlap.to_cpu(big) for _ in range(20)]", 0, None),
    "in_flight_dropped": ("for _ in range(20): streamlap.to_cpu(big)", 0, None),
    "in_flight_ordinary": ("t = [streamlap.to_cpu(big, pin=False) for _ in range(20)]", 0, None),
    "to_device": ("t = [streamlap.to_device(big.cpu(), where) for _ in range(20)]", 0, None),
    "held_by_a_gate": (
        "g = held()\nt = streamlap.to_cpu(x)\nthreading.Timer(0.1, lambda: g.open()).start()",
        0,
        None,
    ),
    "pool_full": (
        "pool = streamlap.PinnedPool(1 << 20)\n"
        "kept = [streamlap.empty_pinned(1 << 18, torch.uint8, pool) for _ in range(4)]\n"
        "try:\n    streamlap.to_cpu(x, pin=True, pool=pool)\n"
        "except streamlap.PoolExhausted as error:\n    kept.append(error)",
        0,
        None,
    ),
    "thread_waits_for_the_pool": (
        "pool = streamlap.PinnedPool(1 << 20)\n"
        "half = torch.zeros(1 << 19, dtype=torch.uint8, device=where)\n"
        "streamlap.to_cpu(half, pool=pool).result()\n"
        "g = held()\nstreamlap.to_cpu(half, pool=pool), streamlap.to_cpu(half, pool=pool)\n"
        "asked = threading.Event()\n"
        "def go():\n    asked.set()\n    streamlap.to_cpu(half, pool=pool)\n"
        "threading.Thread(target=go, daemon=True).start()\nasked.wait()\ntime.sleep(0.02)\n"
        "threading.Timer(0.1, lambda: g.open()).start()",
        0,
        None,
    ),
    "results_kept": (
        "kept = streamlap.pipelined_run(x, n=20)\nviews = [k[3:] for k in kept]",
        0,
        None,
    ),
    "generator_half_consumed": (
        "g = streamlap.pipelined_map(lambda y: y.mm(y), [x] * 20)\nnext(g)\nnext(g)",
        0,
        None,
    ),
    "generator_in_a_cycle": (
        "class Holder: pass\nh = Holder()\nh.me = h\n"
        "h.g = streamlap.pipelined_map(lambda y: y.mm(y), [big] * 20)\nnext(h.g)\ndel h",
        0,
        None,
    ),
    "prefetcher_half_consumed": (
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(torch.arange(64.0), batch_size=1, num_workers=1)\n"
        "g = iter(streamlap.Prefetcher(loader, where))\nnext(g)\nnext(g)",
        0,
        None,
    ),
    "activations_kept": (
        "y = big.clone().requires_grad_()\n"
        "with streamlap.offload_activations(min_bytes=1):\n"
        "    loss = (y * 2).sin().exp().tanh().sum()",
        0,
        None,
    ),
    "pipeline_unfinished": ("t = streamlap.pipelined_run(big, n=4, wait=False)", 0, None),
    "pipeline_long": ("t = streamlap.pipelined_run(big, n=400, wait=False)", 0, None),
    "pipeline_dropped": ("streamlap.pipelined_run(big, n=20, wait=False)", 0, None),
    "during_fn": (
        "inside = threading.Event()\n"
        "def fn(y):\n    inside.set()\n    time.sleep(0.2)\n    return y.mm(y)\n"
        "def go():\n    streamlap.pipelined_run(x, n=5, fn=fn)\n"
        "threading.Thread(target=go, daemon=True).start()\ninside.wait()",
        0,
        None,
    ),
    "daemon_submits": (
        "started = threading.Event()\n"
        "def go():\n    while True:\n        streamlap.to_cpu(x)\n        started.set()\n"
        "threading.Thread(target=go, daemon=True).start()\nstarted.wait()",
        0,
        None,
    ),
    "daemon_in_torch": (  # a thread that ends within an operation of torch aborts the process
        "inside = threading.Event()\n"
        "def source():\n    while True:\n        inside.set()\n"
        "        for _ in range(50_000): x.view(64, 64)\n        yield x\n"
        "def go():\n    for _ in streamlap.pipelined_map(lambda y: y, source()): pass\n"
        "threading.Thread(target=go, daemon=True).start()\ninside.wait()",
        0,
        None,
    ),
    "daemon_pipelines": (
        "started = threading.Event()\n"
        "def go():\n    while True:\n        streamlap.pipelined_run(x, n=5)\n"
        "        started.set()\n"
        "threading.Thread(target=go, daemon=True).start()\nstarted.wait()",
        0,
        None,
    ),
    "thread_in_result": (
        "g = held()\nt = streamlap.to_cpu(x)\nwaiting = threading.Event()\n"
        "def go():\n    waiting.set()\n    t.result()\n"
        "threading.Thread(target=go, daemon=True).start()\nwaiting.wait()\n"
        "threading.Timer(0.1, lambda: g.open()).start()",
        0,
        None,
    ),
    "unhandled": (
        "t = streamlap.to_cpu(big)\nraise ArithmeticError('deliberate')",
        1,
        "ArithmeticError: deliberate",
    ),
    "unhandled_from_fn": (
        "def fn(y):\n    raise ArithmeticError('deliberate')\n"
        "streamlap.pipelined_run(x, n=5, fn=fn)",
        1,
        "ArithmeticError: deliberate",
    ),
    "error_nobody_asked_for": (
        "def fn(y):\n    raise ArithmeticError('deliberate')\n"
        "try:\n    t = streamlap.pipelined_run(x, n=5, fn=fn, wait=False)\n"
        "except ArithmeticError: pass",  # at once, where the calling thread computes
        0,
        None,
    ),
    "error_at_the_very_end": (
        "inside = threading.Event()\n"
        "def fn(y):\n    inside.set()\n    time.sleep(0.1)\n    raise ArithmeticError\n"
        "def go():\n"
        "    try:\n        streamlap.pipelined_run(x, n=5, fn=fn)\n"
        "    except ArithmeticError:\n        pass\n"
        "threading.Thread(target=go, daemon=True).start()\ninside.wait()",
        0,
        None,
    ),
    "sys_exit": ("t = streamlap.to_cpu(big)\nsys.exit(3)", 3, None),
    "sys_exit_in_fn": (
        "def fn(y):\n    sys.exit(3)\nstreamlap.pipelined_run(x, n=5, fn=fn)",
        3,
        None,
    ),
    "os_exit": ("t = streamlap.to_cpu(big)\nos._exit(4)", 4, None),
    "killed_by_itself": (
        "t = streamlap.to_cpu(big)\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(20)",
        -15,
        None,
    ),
    "used_in_atexit": (
        "import atexit\nkeep = []\natexit.register(lambda: keep.append(streamlap.copy_to_cpu(x)))",
        0,
        None,
    ),
    "callback_pending": (
        "g = held()\nt = streamlap.to_cpu(x)\nt.add_done_callback(lambda t: None)\n"
        "threading.Timer(0.1, lambda: g.open()).start()",
        0,
        None,
    ),
    "nested": (
        "def fn(y):\n    return streamlap.pipelined_run(y, n=2)[0].to(where)\n"
        "streamlap.pipelined_run(x, n=3, fn=fn)",
        0,
        None,
    ),
    "synchronize_in_fn": (
        "def fn(y):\n    streamlap.synchronize()\n    return y.mm(y)\n"
        "streamlap.pipelined_run(x, n=3, fn=fn)",
        0,
        None,
    ),
    "nested_over_devices": (
        "def fn(y):\n    return sum(r[0].to(where) for r in streamlap.pipelined_run([y, y], n=2))\n"
        "streamlap.pipelined_run([x, x], n=3, fn=fn)\nstreamlap.parallel_run([x, x], n=3, fn=fn)",
        0,
        None,
    ),
    "fn_never_ends": (
        "inside = threading.Event()\n"
        "def fn(y):\n    inside.set()\n    while True:\n        time.sleep(0.01)\n"
        "t = streamlap.pipelined_run(torch.ones(2, 2), n=2, fn=fn, wait=False)\n"
        "inside.wait()\nsys.exit(5)",
        5,
        None,
    ),
    "thread_works_on": (
        "def go():\n    results = streamlap.pipelined_run(big, n=10)\n"
        "    os._exit(5 if len(results) == 10 else 6)\n"
        "threading.Thread(target=go).start()",  # no daemon: the interpreter waits for it
        5,
        None,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_it_ends_as_asked(server, where, name, repeats):
    code, status, text = ENDS[name]
    for _ in repeats(where):
        ended = server.run(script(where, code))
        assert ended.status == status, ended
        if text is None:
            assert ended.err == ""
        else:
            assert ended.err.strip().splitlines()[-1].startswith(text) or text in ended.err
            assert "fatal" not in ended.err.lower()
        assert ended.seconds < 20


@pytest.mark.parametrize("name", ["in_flight", "unhandled", "generator_half_consumed"])
def test_a_process_of_its_own_ends_as_asked(where, name):
    code, status, text = ENDS[name]
    ended = run_fresh(script(where, code))
    assert ended.status == status, ended
    assert ended.err == "" if text is None else text in ended.err


INTERRUPTED = {
    "pipelined_run": "streamlap.pipelined_run(x, n=10**6, fn=slow, pin=False)",
    "pipelined_map": "for y in streamlap.pipelined_map(slow, [x] * 10**6): pass",
    "result": "g = held()\n    t = streamlap.to_cpu(x)\n    t.result()",
    "pipeline_result": "streamlap.pipelined_run(x, n=150, fn=slow, wait=False).result()",
    "wait_source": "g = held()\n    t = streamlap.to_cpu(x)\n    t.exception()",
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_arrives_promptly_and_all_goes_on(server, where, name, repeats):
    """KeyboardInterrupt within a second; then the same process works as before."""
    code = f"""
def slow(y):
    time.sleep(0.002)
    return y.mm(y)
threading.Timer(0.2, lambda: print("ready", flush=True)).start()
try:
    {INTERRUPTED[name]}
except KeyboardInterrupt:
    print("interrupted", flush=True)
g = None
expected = x.mm(x).cpu()
for y in streamlap.pipelined_run(x, n=5):
    assert torch.equal(y, expected)
t = y = None
for _ in range(1000):
    gc.collect()
    stats = streamlap.pool_stats(where)
    if stats["live"] == stats["in_flight"] == 0:
        break
    time.sleep(0.005)
print(stats["live"], stats["in_flight"])
"""
    for _ in repeats(where):
        ended = server.run(script(where, code), interrupt_at="ready")
        assert ended.status == 0, ended
        assert ended.err == ""
        assert "interrupted" in ended.out
        assert ended.out.splitlines()[-1] == "0 0"
        assert ended.seconds < 12  # a handle's 150 items are computed to the end all the same


def test_an_interrupt_that_nobody_catches_ends_the_process(server, where):
    code = """
threading.Timer(0.1, lambda: print("ready", flush=True)).start()
streamlap.pipelined_run(x, n=10**6, fn=lambda y: y.mm(y), pin=False)
"""
    ended = server.run(script(where, code), interrupt_at="ready")
    assert ended.status in (-2, 130, 1)
    assert "KeyboardInterrupt" in ended.err.splitlines()  # a note with the item may follow


# -- forks

CHILD = """
def in_child(body):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        {end}
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
"""


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_fork_after_use_is_refused_in_the_child_at_once(server, end, repeats):
    """On the CPU; with CUDA initialised torch itself refuses a forked child."""
    code = (
        CHILD.format(end=end)
        + """
kept = streamlap.to_cpu(big).result()
g = held()
flying = streamlap.to_cpu(big)
pool = streamlap.PinnedPool("1MiB")
mine = streamlap.empty_pinned(1000, pool=pool)
def body():
    global kept, flying, mine, pool
    calls = [
        lambda: streamlap.to_cpu(x),
        lambda: streamlap.copy_to_cpu([x]),
        lambda: streamlap.to_device(x, "cpu"),
        lambda: streamlap.pipelined_run(x, n=2),
        lambda: list(streamlap.pipelined_map(lambda y: y, [x])),
        lambda: streamlap.parallel_run([x], n=2),
        lambda: streamlap.empty_pinned(10),
        lambda: streamlap.synchronize(),
        lambda: flying.result(timeout=0.5),
    ]
    for call in calls:
        try:
            call()
        except streamlap.ForkedProcess as error:
            assert "spawn" in str(error)
        else:
            raise AssertionError(call)
    flying = kept = mine = pool = None
    gc.collect()
status = in_child(body)
assert status == 0, status
g.open()
assert torch.equal(flying.result(), big)
assert torch.equal(kept, big)
assert torch.equal(streamlap.pipelined_run(x, n=2)[1], x.mm(x))
"""
    )
    for _ in repeats():
        ended = server.run(script("cpu", code), timeout=20)
        assert (ended.status, ended.err) == (0, ""), ended


def test_a_fork_while_another_thread_makes_a_result_is_refused(server):
    code = (
        CHILD.format(end="os._exit(0)")
        + """
from streamlap import _native, direct
from streamlap.devices import host_place
place = host_place(0)
streamlap.to_cpu(torch.ones(3)).result()
short, stream = _native.ShortWay(), place.runtime.stream(0, "compute")
short.add(0, place.engine, place.pool._pool(), place)
mine = direct.TensorTransfer(short.start_after(torch.ones(3), None, None, stream.handle))
taken, over = threading.Event(), threading.Event()
def hold():
    with direct._making:
        taken.set()
        over.wait()
thread = threading.Thread(target=hold)
thread.start()
taken.wait()
def body():
    for call in (mine.result, mine.done, lambda: mine.nbytes, lambda: repr(mine)):
        try:
            call()
        except streamlap.ForkedProcess:
            continue
        raise AssertionError(call)
status = in_child(body)
over.set()
thread.join()
assert status == 0, status
assert torch.equal(mine.result(), torch.ones(3))
"""
    )
    ended = server.run(script("cpu", code), timeout=20)
    assert (ended.status, ended.err) == (0, ""), ended


def test_a_child_forked_from_a_pipeline_does_not_hang(server):
    code = (
        CHILD.format(end="sys.exit(0)")
        + """
generator = streamlap.pipelined_map(lambda y: y.mm(y), [x] * 20)
next(generator)
group = streamlap.pipelined_run(big, n=30, wait=False)
pool = streamlap.PinnedPool("1MiB")
pool.stats()
def body():
    global generator, group
    for call in (
        lambda: next(generator),
        lambda: group[29],
        lambda: group.done(),
        lambda: group.add_done_callback(print),
        lambda: pool.stats(),
        lambda: streamlap.PinnedPool().stats(),
    ):
        try:
            call()
        except streamlap.ForkedProcess:
            pass
        else:
            raise AssertionError(call)
    generator = group = None
    gc.collect()
status = in_child(body)
assert status == 0, status
assert len(group.result()) == 30
assert len(list(generator)) == 19
"""
    )
    ended = server.run(script("cpu", code), timeout=40)
    assert (ended.status, ended.err) == (0, ""), ended


def test_a_fork_before_use_works_in_both(server, repeats):
    code = """
import os, sys
import torch, streamlap
pid = os.fork()
x = torch.full((8, 8), 2.0)
assert torch.equal(streamlap.pipelined_run(x, n=3)[2], x.mm(x))
assert torch.equal(streamlap.copy_to_cpu(x), x)
if pid:
    _, status = os.waitpid(pid, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""
    for _ in repeats():
        ended = server.run(code)
        assert (ended.status, ended.err) == (0, ""), ended


FIRST_USES = {
    "run": "streamlap.run(torch.ones(3, 3), n=2)",
    "pinned": "streamlap.empty_pinned(10)",
    "pool": "streamlap.pool_stats('cpu')",
    "own_pool": "streamlap.PinnedPool('1MiB').stats()",
    "no_items": "streamlap.pipelined_run(torch.ones(3, 3), n=0)",
    "empty_tree": "streamlap.to_cpu([])",
    "empty_tensor": "streamlap.to_cpu(torch.empty(0)).result()",
    "timeline": "streamlap.timeline().__enter__()",
}


CHECKED_ENDS = {
    "in_flight": "kept = [streamlap.to_cpu(big) for _ in range(20)]",
    "dropped": "for _ in range(20): streamlap.to_cpu(big)",
    "pipeline": "kept = streamlap.pipelined_run(x, n=20, wait=False)",
    "pipeline_dropped": "streamlap.pipelined_run(x, n=20, wait=False)",
    "inside": "stay = True\nkept = streamlap.pipelined_run(x, n=20, wait=False)",
    "exit_inside": "kept = streamlap.to_cpu(big)\nsys.exit(0)",
}


@pytest.mark.parametrize("name", CHECKED_ENDS)
@pytest.mark.parametrize("how", ["checking()", "use_runtime('sim')"])
def test_a_block_and_its_process_end(server, repeats, where, name, how):
    """Also when the process ends inside it: the block's own workers are waited for."""
    code = f"""
stay = False
block = streamlap.{how}
block.__enter__()
from streamlap.serving import current
landed = current.get().place(0).compute_stream()
landed.launch(lambda: (time.sleep(0.1), os.write(1, b"landed")))
{CHECKED_ENDS[name]}
if not stay:
    block.__exit__(None, None, None)
"""
    for _ in repeats(where):
        ended = server.run(script(where, code))
        assert (ended.status, ended.err) == (0, ""), ended
        if how == "checking()":  # nothing moves a simulation once nobody waits
            assert ended.out == "landed"


@pytest.mark.parametrize("how", ["checking()", "use_runtime('sim')"])
def test_a_fork_in_a_block_and_after_it(server, how):
    code = (
        CHILD.format(end="sys.exit(0)")
        + f"""
def body():
    global kept
    try:
        streamlap.to_cpu(x)
    except streamlap.ForkedProcess:
        kept = None
        gc.collect()
        return
    raise AssertionError("not refused")
with streamlap.{how}:
    # What torch does for the first time in a worker has the C library note functions to be called
    # at the end, under a lock that a child would inherit: sys.exit() would wait for it for ever.
    streamlap.pipelined_run(x, n=5, wait=False).result()
    kept = [streamlap.to_cpu(big), streamlap.pipelined_run(x, n=5, wait=False)]
    assert in_child(body) == 0
    pid = os.fork()
    if not pid:
        kept = None  # and the child leaves the block on its own
if not pid:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert in_child(body) == 0
assert torch.equal(kept[0].result(), big)
kept = None
assert in_child(body) == 0
"""
    )
    ended = server.run(script("cpu", code))
    assert (ended.status, ended.err) == (0, ""), ended


@pytest.mark.parametrize("name", FIRST_USES)
def test_a_fork_after_any_use_is_refused(server, name):
    """Else the child would lack a thread: its callbacks would never run, and no await would end."""
    code = (
        "import os, sys, warnings\nimport torch, streamlap\n"
        "warnings.filterwarnings('ignore', 'This process .* is multi-threaded')\n"
        + CHILD.format(end="os._exit(0)")
        + f"used = {FIRST_USES[name]}\n"
        + """
def body():
    try:
        streamlap.to_cpu(torch.ones(3))
    except streamlap.ForkedProcess:
        return
    raise AssertionError("not refused")
assert in_child(body) == 0
assert torch.equal(streamlap.to_cpu(torch.ones(3)).result(), torch.ones(3))
"""
    )
    ended = server.run(code)
    assert (ended.status, ended.err) == (0, ""), ended


def test_forks_while_other_threads_are_at_work(server, repeats):
    """Whatever lock a thread holds at that moment: the child is refused, frees, and ends."""
    code = (
        CHILD.format(end="sys.exit(0)")
        + """
stop = threading.Event()
shared = streamlap.PinnedPool("256MiB")  # two of the large ones for each thread, and more
def go(number):
    while not stop.is_set():
        kept = streamlap.to_cpu([x, big], pool=shared)
        kept.add_done_callback(lambda t: None)
        streamlap.to_cpu(x)
        streamlap.pipelined_run(x, n=3)
        for y in streamlap.pipelined_map(lambda y: y.mm(y), [x] * 3):
            streamlap.pool_stats(where)
threads = [threading.Thread(target=go, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
mine = streamlap.empty_pinned(1000, pool=shared)
flying = streamlap.to_cpu(big)
def body():
    global mine, flying
    for call in (
        lambda: streamlap.to_cpu(x),
        lambda: streamlap.pipelined_run(x, n=2),
        lambda: streamlap.empty_pinned(10, pool=shared),
        lambda: shared.stats(),
        lambda: shared.trim(),
        lambda: streamlap.synchronize(),
    ):
        try:
            call()
        except streamlap.ForkedProcess:
            continue
        raise AssertionError(call)
    mine = flying = None
    gc.collect()
for _ in range(10):
    status = in_child(body)
    assert status == 0, status
stop.set()
for thread in threads:
    thread.join()
assert torch.equal(flying.result(), big)
"""
    )
    for _ in repeats():
        ended = server.run(script("cpu", code), timeout=60)
        assert (ended.status, ended.err) == (0, ""), ended


def test_a_forked_reader_of_a_copy(server):
    """Pinned results do not travel by fork; a copy of them does."""
    code = (
        CHILD.format(end="os._exit(0)")
        + """
copy = streamlap.to_cpu(x).result().clone()
assert in_child(lambda: copy.sum()) == 0
"""
    )
    ended = server.run(script("cpu", code))
    assert (ended.status, ended.err) == (0, ""), ended


@pytest.mark.gpu
def test_a_child_forked_after_cuda_is_refused_too(server):
    code = (
        CHILD.format(end="os._exit(0)")
        + """
kept = streamlap.to_cpu(big).result()
def body():
    global kept
    for call in (lambda: streamlap.empty_pinned(10), lambda: streamlap.to_cpu(torch.ones(3))):
        try:
            call()
        except streamlap.ForkedProcess:
            pass
        else:
            raise AssertionError(call)
    kept = None
    gc.collect()
assert in_child(body) == 0
assert torch.equal(kept, big.cpu())
assert torch.equal(streamlap.copy_to_cpu(x), x.cpu())
"""
    )
    ended = server.run(script("cuda:0", code))
    assert (ended.status, ended.err) == (0, ""), ended


def test_a_spawned_child_works(tmp_path, where):
    path = tmp_path / "spawning.py"
    path.write_text(f"""
import multiprocessing
import torch, streamlap

def child(queue):
    x = torch.full((8, 8), 2.0, device={where!r})
    queue.put(float(streamlap.pipelined_run(x, n=3)[2][0, 0]))

if __name__ == "__main__":
    streamlap.copy_to_cpu(torch.ones(3, device={where!r}))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == 32.0
    process.join(60)
    assert process.exitcode == 0
""")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
