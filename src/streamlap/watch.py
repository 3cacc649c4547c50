"""The background thread (done callbacks, and what nobody holds any more), and the end of it all.

Every entry point of the library starts with :func:`enter`.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from streamlap import _native
from streamlap.errors import DeviceError

_EXIT_SECONDS = 5.0
_PARK_SECONDS = 1.0

_thread: threading.Thread | None = None
_lock = threading.Lock()


def enter() -> None:
    """Begin a call: refuse a forked child or an ending interpreter; see that the thread runs."""
    if _native.enter() or _thread is None:
        require_alive()
        _start()


def started() -> bool:
    """Return whether the thread runs."""
    return _thread is not None


def require_alive() -> None:
    """Raise in an exit handler that comes too late; park other threads of an ending interpreter.

    A thread that is still at work then is a daemon: its end is the process's, and silent.
    """
    if not _native.ending():
        return
    if threading.current_thread() is threading.main_thread():
        raise DeviceError("the interpreter is exiting, and streamlap has ended")
    _native.park_if_stranded()


def _start() -> None:
    global _thread
    # Before the lock is taken: a child forked from here on has no such thread, and must not wait
    # for the lock either.
    _native.mark_started()
    with _lock:
        if _thread is None:
            thread = threading.Thread(target=_run, name="streamlap-callbacks", daemon=True)
            thread.start()
            _thread = thread


def run_callback(callback: Callable[..., object], *args: Any) -> None:
    """Call back; what it raises is logged, as there is nobody to raise it to."""
    try:
        callback(*args)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is not _thread:
            raise  # meant for the thread that happens to call
        logging.getLogger("streamlap").exception("a done callback raised")


def _run() -> None:
    while (tokens := _native.watch_next()) is not None:
        for token in tokens:
            run_callback(token)
            del token
        del tokens  # nothing may be kept alive by a thread that waits


def _in_our_calls() -> bool:
    """Return whether another thread is between two native calls of a call of ours."""
    outside = {threading.get_ident(), *_native.threads_outside()}
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = None if thread in outside else innermost
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] == "streamlap":
                return True
            frame = frame.f_back
    return False


def _at_exit() -> None:
    """Give what is in flight a moment to land; then leave everything as it is.

    Daemon threads of the user's that are in a call of ours are given one, too, to come to where
    they can be parked: the interpreter ends a thread by unwinding it at its next step, and within
    an operation of torch that aborts the process.
    """
    _native.shutdown(_EXIT_SECONDS)
    if _thread is not None:
        _thread.join(1.0)
    deadline = time.monotonic() + _PARK_SECONDS
    while _in_our_calls() and time.monotonic() < deadline:
        time.sleep(0.001)


atexit.register(_at_exit)
