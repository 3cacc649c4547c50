"""Arguments that several functions take, checked once: what is refused, and with which error."""

from __future__ import annotations

import operator
from typing import Any

import torch

from streamlap.errors import InvalidArgument, InvalidType, UnsupportedTensor

# torch has more: quantized ones, whose bytes are not their values, and several values to a byte.
_CONVERTIBLE = {
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
}

LARGEST = 1 << 62
"""Bytes or counts: room for sums in 64 bits."""


def as_count(value: object, what: str, least: int = 0) -> int:
    """Return an int (NumPy's too) of at least ``least``."""
    try:
        if isinstance(value, (bool, torch.Tensor)):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidType(f"{what} must be an int, not {value!r}") from None
    if count < least:
        wanted = "not be negative" if least == 0 else f"be at least {least}"
        raise InvalidArgument(f"{what} must {wanted}, not {count}")
    if count > LARGEST:
        raise InvalidArgument(f"{what} of {count} is beyond what can be counted")
    return count


def as_flag(value: object, what: str) -> bool:
    """Return a bool that is one."""
    if not isinstance(value, bool):
        raise InvalidType(f"{what} must be True or False, not {value!r}")
    return value


def as_pin(value: object) -> bool | None:
    """Return the ``pin`` argument."""
    return None if value is None else as_flag(value, "pin")


def as_dtype(value: object, *, convert: bool = True) -> torch.dtype | None:
    """Return a dtype that memory can be had in and, if ``convert``, values can be converted to."""
    if value is None:
        return None
    if not isinstance(value, torch.dtype):
        raise InvalidType(f"dtype must be a torch.dtype, not {value!r}")
    name = str(value).removeprefix("torch.")
    if name.startswith("q") or (convert and name not in _CONVERTIBLE):
        raise UnsupportedTensor(f"{value} is no dtype that values can be converted to")
    return value


def as_seconds(value: object, what: str = "timeout") -> float:
    """Return a time in seconds."""
    if isinstance(value, (bool, str, torch.Tensor)):
        raise InvalidType(f"{what} must be seconds, not {value!r}")
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidType(f"{what} must be seconds, not {value!r}") from None
    except OverflowError:
        raise InvalidArgument(f"{what} of {value} is beyond what can be counted") from None
    if not seconds >= 0:
        raise InvalidArgument(f"{what} must not be negative, not {value}")
    return seconds


def as_callable(value: Any, what: str) -> Any:
    """Return something that can be called."""
    if not callable(value):
        raise InvalidType(f"{what} must be callable, not {value!r}")
    return value
