"""The one background thread: runs done callbacks, and lets go of what nobody holds any more."""

from __future__ import annotations

import atexit
import logging
import threading

from streamlap import _native

_EXIT_SECONDS = 5.0

_thread: threading.Thread | None = None
_lock = threading.Lock()


def ensure_started() -> None:
    """Start the thread unless it runs."""
    if _thread is None:
        _start()


def _start() -> None:
    global _thread
    with _lock:
        if _thread is None and not _native.closing():
            _native.require_usable()
            thread = threading.Thread(target=_run, name="streamlap-callbacks", daemon=True)
            thread.start()
            _thread = thread


def _run() -> None:
    while (tokens := _native.watch_next()) is not None:
        for token in tokens:
            try:
                token()
            except BaseException:
                logging.getLogger("streamlap").exception("a done callback raised")
            del token
        del tokens  # nothing may be kept alive by a thread that waits


def _at_exit() -> None:
    """Give what is in flight a moment to land; then leave everything as it is."""
    _native.shutdown(_EXIT_SECONDS)
    if _thread is not None:
        _thread.join(1.0)


atexit.register(_at_exit)
