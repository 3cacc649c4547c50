"""GPU tests: skipped with the runtime's own reason, unless --require-gpu makes a skip a failure."""

import os
from functools import cache

import pytest

# More hardware queues than the default, so that streams in the tests never share one by accident.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@cache
def cuda_reason() -> str:
    from streamlap import _native

    return _native.cuda_reason()


def pytest_addoption(parser):
    parser.addoption(
        "--require-gpu", action="store_true", help="a skipped GPU test or test module is a failure"
    )


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and cuda_reason():
        pytest.skip(cuda_reason())


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
