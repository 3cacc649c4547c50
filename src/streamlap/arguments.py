"""What the commands share: types of arguments, and the line that shows progress."""

from __future__ import annotations

import argparse
import re
import sys

_MOST = 10_000


def positive(text: str) -> int:
    """Return a number from 1 up."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up to 999999999")
    return int(text)


def count(text: str) -> int:
    """Return a number of products, or of rounds."""
    value = positive(text)
    if value > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is too many; the most is {_MOST}")
    return value


def device(text: str) -> str:
    """Return the name of a device, or ``all``."""
    if not re.fullmatch(r"all|cpu|cuda:[0-9]{1,3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is unknown; write all, cpu or cuda:0")
    return text


class Progress:
    """One line on stderr that says what is being done, where a person watches."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def show(self, line: str) -> None:
        """Put ``line`` in place of the last one."""
        if self._shown:
            sys.stderr.write(f"\r\033[K{line[:100]}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Leave the line empty."""
        self.show("")
