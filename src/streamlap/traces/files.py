"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os


def replace(name: str, content: bytes) -> None:
    """Write a file beside the old one and put it in its place; raise OSError."""
    beside = f"{name}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            file.write(content)
        os.replace(beside, name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
