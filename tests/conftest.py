"""GPU tests: skipped with the runtime's own reason, unless --require-gpu makes a skip a failure."""

import collections
import os
from functools import cache

import pytest

# More hardware queues than the default, so that streams in the tests never share one by accident.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@cache
def cuda_reason() -> str:
    from streamlap import _native

    return _native.cuda_reason()


@cache
def gpu_count() -> int:
    import torch

    return 0 if cuda_reason() else torch.cuda.device_count()


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu", action="store_true", help="a skipped GPU test or test module is a failure"
    )
    parser.addoption("--sim", metavar="SCHEDULE", help="serve CPU tensors by simulations")
    parser.addoption(
        "--require-two-gpus", action="store_true", help="fail the tests of two GPUs without two"
    )
    parser.addoption(
        "--repeats",
        type=int,
        help="how often each exit, fork and interrupt is tried (3 on a CPU, 1 on a GPU)",
    )
    parser.addoption(
        "--seed", type=int, default=0, help="where random data and random delays start (0)"
    )


def pytest_configure(config):
    repeats = config.getoption("--repeats")
    if repeats is not None and repeats < 1:
        raise pytest.UsageError(f"--repeats {repeats}: at least 1, or nothing would be tried")
    if config.getoption("--seed"):
        from helpers.data import start_at

        start_at(config.getoption("--seed"))


CHECKED = collections.Counter()
"""How many tests the order checker has served, how many not, and the accesses that it has seen."""


@pytest.fixture(autouse=True)
def served_by(request, monkeypatch):
    """Serve each test under the order checker; with --sim SCHEDULE by a simulation of its own."""
    from helpers.streams import forget_sides
    from helpers.threads import hand_over

    import streamlap

    schedule = request.config.getoption("--sim")
    if schedule is None and request.node.get_closest_marker("unchecked"):
        CHECKED["unchecked"] += 1
        yield None
        forget_sides()
        return
    block = (
        streamlap.checking()
        if schedule is None
        else streamlap.use_runtime("sim", schedule=schedule)
    )
    with block as serving:
        hand_over(monkeypatch)
        yield serving
        forget_sides()
    CHECKED["tests"] += 1
    CHECKED["accesses"] += serving.accesses


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # one of several processes
        session.config.workeroutput["checked"] = dict(CHECKED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    CHECKED.update(getattr(node, "workeroutput", {}).get("checked", {}))


def pytest_terminal_summary(terminalreporter):
    if CHECKED["tests"]:
        terminalreporter.write_line(
            f"the order checker looked on at {CHECKED['accesses']} accesses in {CHECKED['tests']} "
            f"tests; {CHECKED['unchecked']} ran unchecked"
        )


def pytest_collection_modifyitems(config, items):
    for item in items:
        unchecked = item.get_closest_marker("unchecked")
        if unchecked is not None and not unchecked.args:
            raise pytest.UsageError(f"{item.nodeid}: unchecked without a reason")
    repeats = config.getoption("--repeats")
    if repeats and config.pluginmanager.hasplugin("timeout"):
        for item in items:  # the limit of one test is for a few repeats
            if "repeats" in item.fixturenames:
                item.add_marker(pytest.mark.timeout(max(120, 40 * repeats)))
    if gpu_count() >= 2 or config.getoption("--require-two-gpus"):
        return
    left_out = [item for item in items if item.get_closest_marker("two_gpus")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("two_gpus")]


def pytest_runtest_setup(item):
    if item.get_closest_marker("two_gpus") and gpu_count() < 2:
        pytest.fail(f"--require-two-gpus: there are {gpu_count()}", pytrace=False)
    if item.get_closest_marker("gpu"):
        if cuda_reason():
            pytest.skip(cuda_reason())
        use_every_gpu()


@cache
def use_every_gpu() -> None:
    """Make each GPU start and load what most tests need: neither must happen behind a gate.

    CUDA loads a kernel when it is launched first, and may then wait for the device, where a test
    holds a stream.
    """
    import torch

    import streamlap

    for index in range(gpu_count()):
        x = torch.randn(64, 64, device=f"cuda:{index}")
        for made in (x.mm(x), x.clone().fill_(1), x + 1, x.t().contiguous(), x.to(torch.float64)):
            assert torch.equal(streamlap.to_cpu(made).result(), made.cpu())
        streamlap.to_device(x.cpu(), x.device).result()
        torch.cuda.synchronize(index)


def fail_if_skipped(report):
    """Turn a skip into a failure that gives the skip's reason; xfail is none."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.config.getoption("--require-gpu") and item.get_closest_marker("gpu"):
        fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if collector.config.getoption("--require-gpu"):
        fail_if_skipped(report)
    return report


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def where(request) -> str:
    """The device under test: the host runtime's, then the first GPU."""
    return request.param


@pytest.fixture
def repeats(request):
    """How often to try again, given a device: a process that uses CUDA takes seconds to start."""

    def of(device: str = "cpu") -> range:
        given = request.config.getoption("--repeats")
        return range(given or (3 if device == "cpu" else 1))

    return of


@pytest.fixture
def seed(request) -> int:
    return request.config.getoption("--seed")


@pytest.fixture
def nothing_left(where):
    """After the test no pinned block is held and no abandoned transfer is in flight."""
    from helpers.streams import engine_of, let_go

    import streamlap

    def held():
        stats = streamlap.pool_stats(where)
        return stats["live"], stats["live_blocks"]

    def is_clean():
        now = held()
        stats = streamlap.pool_stats(where)
        less = now[0] <= before[0] and now[1] <= before[1]
        return less and stats["in_flight"] == 0 and engine_of(where).abandoned() == 0

    before = held()
    yield
    assert let_go(is_clean), (before, streamlap.pool_stats(where))
