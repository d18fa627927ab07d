"""Time stamps of the Azure traces as exact whole ticks of 100 ns: ``YYYY-MM-DD HH:MM:SS[.fffffff]``.

    0         1         2
    012345678901234567890123456
    2023-11-16 18:15:46.6805900

That is 19 bytes without a fraction, and 21 to 27 with one. The traces of 2023 have no time zone, later ones end in
``+00:00``; which of the two is told for a whole file (``zone``).
"""

from __future__ import annotations

import re
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from traces.content import quoted
from traces.delimited import Spans
from traces.digits import read_digits, text_fault

TICKS_PER_S = 10_000_000
"""One tick is the last of the seven fractional digits: 100 ns."""

_FRACTION_DIGITS = 7
_PLAIN_BYTES = 19
_SEPARATORS = ((4, "-"), (7, "-"), (10, " "), (13, ":"), (16, ":"))
_MONTH_DAYS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], dtype=np.int64)
_RIGHT = "expected a stamp like '2023-11-16 18:15:46.6805900' (no time zone, at most 7 fractional digits)"
_RIGHT_ZONED = "expected a stamp like '2024-05-10 00:00:00.009930+00:00' (zone +00:00, at most 7 fractional digits)"
_STAMP = re.compile(rb"([0-9]{4})-([0-9]{2})-([0-9]{2}) ([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]{1,7})?")


def read_stamps(
    buffer: NDArray[np.uint8], spans: Spans, zone: bytes = b""
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read a column of stamps; returns ticks (from a fixed, unnamed zero) and which rows hold a stamp that exists."""
    widths = spans.ends - spans.starts - len(zone)
    fraction_digits = widths - _PLAIN_BYTES - 1
    plain = widths == _PLAIN_BYTES
    good = plain | ((fraction_digits >= 1) & (fraction_digits <= _FRACTION_DIGITS))
    good &= plain | (buffer.take(spans.starts + _PLAIN_BYTES, mode="clip") == ord("."))
    for at, separator in _SEPARATORS:
        good &= buffer.take(spans.starts + at, mode="clip") == ord(separator)
    for at, expected in enumerate(zone, start=-len(zone)):
        good &= buffer.take(spans.ends + at, mode="clip") == expected

    parts = []
    for at, width in ((0, 4), (5, 2), (8, 2), (11, 2), (14, 2), (17, 2)):
        values, digits = read_digits(buffer, spans.starts + at, width, width)
        good &= digits
        parts.append(values)
    year, month, day, hour, minute, second = parts
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    month_days = _MONTH_DAYS.take(month, mode="clip") + (leap & (month == 2))
    good &= (year >= 1) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= month_days)
    good &= (hour < 24) & (minute < 60) & (second < 60)

    fraction, digits = read_digits(buffer, spans.starts + _PLAIN_BYTES + 1, fraction_digits, _FRACTION_DIGITS)
    good &= digits
    fraction *= 10 ** np.clip(_FRACTION_DIGITS - fraction_digits, 0, _FRACTION_DIGITS)
    seconds = ((_day_number(year, month, day) * 24 + hour) * 60 + minute) * 60 + second
    return seconds * TICKS_PER_S + fraction, good


def stamp_fault(value: bytes, zone: bytes = b"") -> str | None:
    """Say why a field is not what `read_stamps` accepts; `None` where it is."""
    right = _RIGHT if not zone else _RIGHT_ZONED
    if not value:
        return f"the field is empty; {right}"
    shown = quoted(value)
    unreadable = text_fault(value)
    if unreadable is not None:
        return f"{shown} {unreadable}; {right}"
    match = _STAMP.fullmatch(value.removesuffix(zone)) if value.endswith(zone) else None
    if match is None:
        return f"{shown} is not a time stamp; {right}"
    try:
        datetime(*(int(part) for part in match.groups()))  # type: ignore[arg-type]  # six fields, never tzinfo
    except ValueError as error:
        return f"{shown} is no time that exists ({error}); {right}"
    return None


def _day_number(year: NDArray[np.int64], month: NDArray[np.int64], day: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count days in the Gregorian calendar; the year starts in March, so that the leap day comes last."""
    march_year = year - (month <= 2)
    march_month = (month + 9) % 12
    leap_days = march_year // 4 - march_year // 100 + march_year // 400
    return march_year * 365 + leap_days + (153 * march_month + 2) // 5 + day
