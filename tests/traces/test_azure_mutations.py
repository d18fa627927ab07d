"""Damaged at random, an Azure file is read as a plain second reader reads it, or refused at the same row."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harli_core.errors import TraceError
from tests.traces.azure import COLUMNS, parse_azure
from traces.content import TraceContent
from traces.schema import RequestTrace

HEADER = ",".join(COLUMNS).encode()
CELLS = tuple(
    (f"2023-11-16 18:{minute:02}:46.{minute * 131071 % 10**7:07}".encode(), str(minute + 1).encode(), b"44")
    for minute in range(0, 48, 4)
)
STAMP = re.compile(rb"([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,7}))?")


class RowError(Exception):
    """What the second reader raises: the row that it cannot read."""


def read_row(line: bytes) -> tuple[int, int, int]:
    """Read one row in the obvious way: ticks, prompt tokens, output tokens."""
    stamp, *tokens = line.split(b",")
    match = STAMP.fullmatch(stamp)
    if len(tokens) != 2 or match is None or not all(re.fullmatch(rb"[0-9]{1,9}", token) for token in tokens):
        raise ValueError(line)
    seconds = datetime.strptime(match[1].decode(), "%Y-%m-%d %H:%M:%S") - datetime(1, 1, 1)
    ticks = seconds // timedelta(seconds=1) * 10**7 + int((match[2] or b"").ljust(7, b"0"))
    prompt_tokens, output_tokens = (int(token) for token in tokens)
    if not (prompt_tokens and output_tokens):
        raise ValueError(line)
    return ticks, prompt_tokens, output_tokens


def read_plainly(content: bytes) -> RequestTrace:
    """Read a whole file row by row; raises `RowError` with the first faulty row."""
    lines = [line.removesuffix(b"\r") for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    while len(lines) > 1 and not lines[-1]:
        lines.pop()
    if lines[0] != HEADER:
        raise RowError(1)
    rows: list[tuple[int, int, int]] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            row = read_row(line)
        except ValueError:
            raise RowError(number) from None
        if rows and row[0] < rows[-1][0]:
            raise RowError(number)
        rows.append(row)
    if not rows:
        raise RowError(2)
    ticks, prompt_tokens, output_tokens = zip(*rows, strict=True)
    return RequestTrace.of(
        [float(tick - ticks[0]) / 10**7 for tick in ticks], prompt_tokens, output_tokens, source="plain"
    )


def check(content: bytes) -> None:
    """Both readers must agree: the same trace, or the same faulty row in one line. Packed files are another test's."""
    if content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return
    try:
        expected: RequestTrace | int = read_plainly(content)
    except RowError as refused:
        expected = refused.args[0]
    if isinstance(expected, RequestTrace):
        assert parse_azure(TraceContent.of("damaged", content))[0] == expected
        return
    with pytest.raises(TraceError, match=rf"damaged: row {expected}[,:] ") as caught:
        parse_azure(TraceContent.of("damaged", content))
    assert str(caught.value).isprintable()


cell_texts = st.one_of(
    st.binary(max_size=30),
    st.text(max_size=12).map(str.encode),
    st.integers().map(lambda number: str(number).encode()),
    st.integers(0, 2 * 10**9).map(lambda number: str(number).encode()),
    st.floats().map(lambda number: str(number).encode()),
    st.datetimes().map(lambda stamp: str(stamp).encode()),
    st.from_regex(rb"\A2023-11-16 18:[0-6][0-9]:[0-6][0-9](\.[0-9]{0,8})?\Z"),
    st.sampled_from([b"nan", b"-inf", b"1e3", b"0", b"00", b"1_0", b"+1", b"\xff", b"\0", b"12,3", b"4\n4", b"4\r"]),
)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(CELLS) - 1), st.integers(0, 2), cell_texts, st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_one_cell_replaced(row: int, column: int, text: bytes, line_end: bytes, final: bool) -> None:
    """Any text in any cell is an equal parse or an error in the right row."""
    rows = [list(cells) for cells in CELLS]
    rows[row][column] = text
    lines = [HEADER, *(b",".join(cells) for cells in rows)]
    check(line_end.join(lines) + (line_end if final else b""))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_bytes_overwritten_inserted_or_cut(data: st.DataObject) -> None:
    """Bytes changed anywhere in the file, header, commas and line ends included, are never taken for something else."""
    content = b"\r\n".join((HEADER, *(b",".join(cells) for cells in CELLS)))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = min(len(content), start + data.draw(st.integers(0, 3)))
        new = data.draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([b",", b"\n", b"\r", b"\r\n", b"-", b".", b"9"]))
        )
        content = content[:start] + new + content[end:]
    check(content)


@pytest.mark.parametrize("length", range(1, 90))
def test_cut_off_anywhere(length: int) -> None:
    """A file cut off after any byte is refused, or read as far as whole rows go."""
    lines = (HEADER, *(b",".join(cells) for cells in CELLS[:2]))
    check(b"\r\n".join(lines)[:length])
