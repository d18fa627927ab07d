"""Whole numbers written in decimal digits, read for all rows of a column at once, and named where they are wrong."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from traces.content import quoted
from traces.delimited import Spans

MAX_DIGITS = 9
"""Longest token count accepted: larger ones are damage, and sums of these fit 64 bits."""

_RIGHT = f"expected a whole number from 1 to {10**MAX_DIGITS - 1}"
_WHOLE = re.compile(rb"-?[0-9]+")
_NOT_FINITE = re.compile(rb"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_REAL = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


def read_digits(
    buffer: NDArray[np.uint8], starts: NDArray[np.int64], widths: int | NDArray[np.int64], upto: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read ``widths[i]`` (at most ``upto``) digits from ``starts[i]`` on; returns values and which rows were digits."""
    values = np.zeros(starts.size, dtype=np.int64)
    good = np.ones(starts.size, dtype=np.bool_)
    for place in range(upto):
        digit = buffer.take(starts + place, mode="clip") - np.uint8(48)
        inside = place < widths
        good &= (digit < 10) | ~np.asarray(inside)
        values = np.where(inside, values * 10 + digit, values)
    return values, good


def read_positive(buffer: NDArray[np.uint8], spans: Spans) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read a column of whole numbers from 1 to ``10**MAX_DIGITS - 1``; returns values and which rows hold one."""
    widths = spans.ends - spans.starts
    upto = min(MAX_DIGITS, int(widths.max(initial=0)))
    values, good = read_digits(buffer, spans.starts, widths, upto)
    return values, good & (widths >= 1) & (widths <= MAX_DIGITS) & (values >= 1)


def positive_fault(value: bytes) -> str | None:
    """Say why a field is not what `read_positive` accepts; `None` where it is."""
    if not value:
        return f"the field is empty; {_RIGHT}"
    shown = quoted(value)
    unreadable = text_fault(value)
    if unreadable is not None:
        return f"{shown} {unreadable}; {_RIGHT}"
    if _WHOLE.fullmatch(value):
        if value.startswith(b"-") or not value.strip(b"0"):
            return f"{shown} is not positive; {_RIGHT}"
        return f"{shown} is too large; {_RIGHT}" if len(value) > MAX_DIGITS else None
    if _NOT_FINITE.fullmatch(value):
        return f"{shown} is not a finite number; {_RIGHT}"
    if _REAL.fullmatch(value):
        return f"{shown} is not a whole number in plain digits; {_RIGHT}"
    return f"{shown} is not a number; {_RIGHT}"


def text_fault(value: bytes) -> str | None:
    """Say what makes a field unreadable as text; `None` where it is readable."""
    if b"\0" in value:
        return "holds a NUL byte"
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return "holds bytes that are not UTF-8 text"
    return None
