"""One line on stderr that says what is being done, where a person watches."""

from __future__ import annotations

import sys

_WIDTH = 100
_BAR = 20


class Progress:
    def __init__(self, steps: int) -> None:
        self._shown = sys.stderr.isatty()
        self._steps = steps
        self._done = 0

    def step(self) -> None:
        """A table is finished."""
        self._done += 1

    def show(self, line: str) -> None:
        filled = _BAR * self._done // max(1, self._steps)
        self._write(f"[{'#' * filled}{'.' * (_BAR - filled)}] {line}"[:_WIDTH])

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()
