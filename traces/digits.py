"""Numbers written in decimal digits, read for all rows of a column at once, and named where they are wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from traces.content import quoted
from traces.delimited import Spans

MAX_DIGITS = 9
"""Longest token count accepted: larger ones are damage, and sums of these fit 64 bits."""

MAX_SECONDS = 1e10
"""Times are below this: larger ones are damage (seconds since 1970 are under 2e9)."""

_QUICK_BYTES, _QUICK_DIGITS, _PLAIN_BYTES, _LONGEST_BYTES = 16, 15, 26, 48
_POINT, _CHUNK_ROWS = 46, 1 << 16
_WHOLE = re.compile(rb"-?[0-9]+")
_NOT_FINITE = re.compile(rb"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_REAL = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_UNSIGNED = re.compile(rb"[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?")


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


def read_whole(buffer: NDArray[np.uint8], spans: Spans, least: int = 1) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read a column of whole numbers from ``least`` to ``10**MAX_DIGITS - 1``; returns values and which rows hold one."""
    widths = spans.ends - spans.starts
    upto = min(MAX_DIGITS, int(widths.max(initial=0)))
    values, good = read_digits(buffer, spans.starts, widths, upto)
    return values, good & (widths >= 1) & (widths <= MAX_DIGITS) & (values >= least)


def _unreadable(value: bytes, right: str) -> str | None:
    """What is wrong with a field that shows no text at all, or none that can be read; `None` where there is some."""
    if not value:
        return f"the field is empty; {right}"
    fault = text_fault(value)
    return None if fault is None else f"{quoted(value)} {fault}; {right}"


def whole_fault(value: bytes, least: int = 1) -> str | None:
    """Say why a field is not what `read_whole` accepts; `None` where it is."""
    right = f"expected a whole number from {least} to {10**MAX_DIGITS - 1}"
    unreadable = _unreadable(value, right)
    if unreadable is not None:
        return unreadable
    shown = quoted(value)
    if _WHOLE.fullmatch(value):
        if value.startswith(b"-") or (least and not value.strip(b"0")):
            return f"{shown} is {'not positive' if least else 'negative'}; {right}"
        return f"{shown} is too large; {right}" if len(value) > MAX_DIGITS else None
    if _NOT_FINITE.fullmatch(value):
        return f"{shown} is not a finite number; {right}"
    if _REAL.fullmatch(value):
        return f"{shown} is not a whole number in plain digits; {right}"
    return f"{shown} is not a number; {right}"


def read_seconds(text: bytes, buffer: NDArray[np.uint8], spans: Spans) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Read a column of times of 0 or more, below ``MAX_SECONDS``, each the float64 nearest to what is written.

    Up to sixteen bytes (fifteen digits and a point) are read at once: such a number is a whole one
    below 2**53 over a power of ten that float64 holds, so one division rounds once. Others are read one by one.
    """
    widths = spans.ends - spans.starts
    upto = min(_PLAIN_BYTES, int(widths.max(initial=0)))
    mantissa = np.zeros(len(spans), dtype=np.int64)
    places = np.zeros(len(spans), dtype=np.int8)
    pointed = np.zeros(len(spans), dtype=np.bool_)
    plain = (widths >= 1) & (widths <= _PLAIN_BYTES)
    for place in range(upto):
        byte = buffer.take(spans.starts + place, mode="clip")
        inside = place < widths
        point = inside & (byte == _POINT)
        digit = byte - np.uint8(48)
        is_digit = inside & (digit < 10)
        plain &= ~inside | is_digit | (point & ~pointed & (place > 0) & (place + 1 < widths))
        pointed |= point
        if place < _QUICK_BYTES:
            mantissa = np.where(is_digit, mantissa * 10 + digit, mantissa)
            places += is_digit & pointed
    quick = plain & (widths <= _QUICK_DIGITS + pointed)
    values = mantissa / 10.0**places
    for rows in _chunks(np.flatnonzero(plain & ~quick)):
        bounds = zip(spans.starts[rows].tolist(), spans.ends[rows].tolist(), strict=True)
        values[rows] = [float(text[start:end]) for start, end in bounds]
    good = plain & (values < MAX_SECONDS)
    for row in np.flatnonzero(~plain).tolist():
        value = text[spans.slice(row)]
        if seconds_fault(value) is None:
            values[row], good[row] = float(value), True
    values[~good] = 0.0
    return values, good


def _chunks(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """So many rows at a time that their texts take little memory."""
    for at in range(0, rows.size, _CHUNK_ROWS):
        yield rows[at : at + _CHUNK_ROWS]


def seconds_fault(value: bytes) -> str | None:
    """Say why a field is not what `read_seconds` accepts; `None` where it is."""
    right = f"expected a time from 0 to under {MAX_SECONDS:.0e} s"
    unreadable = _unreadable(value, right)
    if unreadable is not None:
        return unreadable
    shown = quoted(value)
    if len(value) <= _LONGEST_BYTES and _UNSIGNED.fullmatch(value):
        return None if float(value) < MAX_SECONDS else f"{shown} is too large; {right}"
    if _NOT_FINITE.fullmatch(value):
        return f"{shown} is not a finite number; {right}"
    if value.startswith(b"-") and _REAL.fullmatch(value):
        return f"{shown} is negative; {right}"
    return f"{shown} is not a time in plain digits; {right}"


def text_fault(value: bytes) -> str | None:
    """Say what makes a field unreadable as text; `None` where it is readable."""
    if b"\0" in value:
        return "holds a NUL byte"
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return "holds bytes that are not UTF-8 text"
    return None
