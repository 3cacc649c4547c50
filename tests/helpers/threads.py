"""Threads of the tests' own, under the order checker: whoever starts one or joins it hands over."""

import contextvars
import functools
import threading

from streamlap import _native

OURS = "streamlap-callbacks"
"""The library's own thread, which may start inside a test but does not belong to it."""


def _run(thread, context, run):
    _native.acquired(id(thread))
    try:
        context.run(run)
    finally:
        thread.__dict__.pop("run", None)  # or it would keep itself
        _native.released(id(thread))


def hand_over(monkeypatch) -> None:
    """Let threads started from here on know what their starter did, and be served by the same.

    Python's threads begin with an empty context, and the checker sees neither start nor join.
    """
    start, join = threading.Thread.start, threading.Thread.join

    @functools.wraps(start)
    def start_told(thread):
        if thread.name != OURS:
            thread.run = functools.partial(_run, thread, contextvars.copy_context(), thread.run)
            _native.released(id(thread))
        start(thread)

    @functools.wraps(join)
    def join_told(thread, timeout=None):
        join(thread, timeout)
        if not thread.is_alive():
            _native.acquired(id(thread))

    monkeypatch.setattr(threading.Thread, "start", start_told)
    monkeypatch.setattr(threading.Thread, "join", join_told)


def spawn(work, errors: list) -> threading.Thread:
    """Start a thread; what it raises is appended to ``errors``."""

    def body():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread
