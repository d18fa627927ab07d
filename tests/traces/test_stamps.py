"""Stamps are read to the exact 100 ns tick, in any year, and refused where the calendar has none such."""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.delimited import line_spans
from traces.stamps import read_stamps, stamp_fault


def ticks_of(*stamps: str) -> list[int]:
    """Read stamps that must all be good."""
    buffer = np.frombuffer("\n".join(stamps).encode(), dtype=np.uint8)
    ticks, good = read_stamps(buffer, line_spans(buffer, 0))
    assert good.all()
    return [int(tick) for tick in ticks]


def is_good(stamp: bytes) -> bool:
    """Tell whether the column reader accepts a stamp."""
    buffer = np.frombuffer(stamp, dtype=np.uint8)
    return bool(read_stamps(buffer, line_spans(buffer, 0))[1].all())


@pytest.mark.parametrize("digits", range(8))
def test_each_number_of_fractional_digits(digits: int) -> None:
    """A fraction of n digits counts tenths, hundredths and so on down to ticks; none counts nothing."""
    fraction = "1234567"[:digits]
    zero, read = ticks_of("2023-11-16 18:15:46", "2023-11-16 18:15:46" + ("." + fraction if fraction else ""))
    assert read - zero == int(fraction.ljust(7, "0"))


def test_one_tick_apart_over_a_year_end() -> None:
    """The last tick of a year and the first of the next differ by one."""
    before, after = ticks_of("2023-12-31 23:59:59.9999999", "2024-01-01 00:00:00.0000000")
    assert after - before == 1


@settings(deadline=None)
@given(st.datetimes(), st.datetimes(), st.integers(0, 9), st.integers(0, 9))
def test_differences_agree_with_the_calendar(a: datetime, b: datetime, a_tick: int, b_tick: int) -> None:
    """Between any two stamps of years 1 to 9999 lie as many ticks as the standard library counts."""
    texts = [f"{a.isoformat(' ', 'microseconds')}{a_tick}", f"{b.isoformat(' ', 'microseconds')}{b_tick}"]
    first, second = ticks_of(*texts)
    assert second - first == (b - a) // timedelta(microseconds=1) * 10 + b_tick - a_tick


@pytest.mark.parametrize(
    "stamp",
    [
        "2023-02-29 00:00:00",
        "1900-02-29 00:00:00",
        "2023-04-31 00:00:00",
        "2023-13-01 00:00:00",
        "2023-00-01 00:00:00",
        "2023-01-00 00:00:00",
        "0000-01-01 00:00:00",
        "2023-01-01 24:00:00",
        "2023-01-01 00:60:00",
        "2023-01-01 00:00:60",
    ],
)
def test_times_that_do_not_exist(stamp: str) -> None:
    """A well-formed stamp outside the calendar or the clock is refused, and the reason says so."""
    assert not is_good(stamp.encode())
    assert "is no time that exists" in (stamp_fault(stamp.encode()) or "")


@pytest.mark.parametrize("stamp", ["2024-02-29 00:00:00", "2000-02-29 23:59:59.9", "0001-01-01 00:00:00"])
def test_times_at_the_edges_of_the_calendar(stamp: str) -> None:
    """Leap days and the first day of the calendar are accepted."""
    assert is_good(stamp.encode())
    assert stamp_fault(stamp.encode()) is None


@settings(deadline=None)
@given(
    st.one_of(
        st.from_regex(rb"\A[0-9]{4}-[01][0-9]-[0-3][0-9] [0-2][0-9]:[0-6][0-9]:[0-6][0-9](\.[0-9]{1,8})?\Z"),
        st.binary(min_size=1, max_size=28).filter(lambda text: not set(text) & set(b"\r\n")),
    )
)
def test_column_reader_and_explainer_agree(stamp: bytes) -> None:
    """The reader refuses a stamp exactly when there is a reason to give."""
    assert is_good(stamp) == (stamp_fault(stamp) is None)
