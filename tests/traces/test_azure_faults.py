"""Every way in which an Azure file can be wrong is one line that names file, row, field and value."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harli_core.errors import TraceError
from tests.traces.azure import load_azure

AzureFile = Callable[[bytes], Path]

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
GOOD = b"2023-11-16 18:15:46.6805900,374,44\r\n"
LATER = b"2023-11-16 18:15:50.9951690,396,109\r\n"


def message_of(path: str | Path) -> str:
    """Load a file that must be refused; the message must be one line."""
    with pytest.raises(TraceError) as caught:
        load_azure(path)
    message = str(caught.value)
    assert message.isprintable(), message
    assert "expected" in message
    return message


STAMPS = {
    "nothing": (b"", "is empty"),
    "word": (b"noon", "'noon' is not a time stamp"),
    "seconds": (b"12.5", "'12.5' is not a time stamp"),
    "negative": (b"-3", "'-3' is not a time stamp"),
    "negative-year": (b"-023-11-16 18:15:47", "is not a time stamp"),
    "nan": (b"nan", "'nan' is not a time stamp"),
    "eight-digits": (b"2023-11-16 18:15:47.12345678", "at most 7 fractional digits"),
    "bare-point": (b"2023-11-16 18:15:47.", "is not a time stamp"),
    "zone": (b"2023-11-16 18:15:47.123456+00:00", "no time zone"),
    "letter-t": (b"2023-11-16T18:15:47", "is not a time stamp"),
    "day-31": (b"2023-11-31 18:15:47", "is no time that exists"),
    "hour-25": (b"2023-11-16 25:15:47", "is no time that exists"),
    "blank-before": (b" 2023-11-16 18:15:47", "is not a time stamp"),
    "quotes": (b'"2023-11-16 18:15:47"', "is not a time stamp"),
    "again-the-header": (b"TIMESTAMP", "'TIMESTAMP' is not a time stamp"),
    "nul": (b"2023-11-16 18:15:47\0", "holds a NUL byte"),
    "latin-1": (b"2023-11-16 18:15:4\xff", r"'2023-11-16 18:15:4\xff' holds bytes that are not UTF-8 text"),
    "carriage-return": (b"2023-11-16\r18:15:47", r"'2023-11-16\r18:15:47' is not a time stamp"),
}
TOKENS = {
    "nothing": (b"", "is empty"),
    "word": (b"many", "'many' is not a number"),
    "zero": (b"0", "'0' is not positive"),
    "zeros": (b"000", "'000' is not positive"),
    "negative": (b"-5", "'-5' is not positive"),
    "fraction": (b"12.5", "'12.5' is not a whole number"),
    "whole-fraction": (b"12.0", "'12.0' is not a whole number"),
    "exponent": (b"1e3", "'1e3' is not a whole number"),
    "plus": (b"+7", "'+7' is not a whole number in plain digits"),
    "nan": (b"NaN", "'NaN' is not a finite number"),
    "infinity": (b"-inf", "'-inf' is not a finite number"),
    "ten-digits": (b"1000000000", "'1000000000' is too large; expected a whole number from 1 to 999999999"),
    "twenty-digits": (b"18446744073709551617", "'18446744073709551617' is too large"),
    "blank": (b" 44", "' 44' is not a number"),
    "colon": (b"4:4", "'4:4' is not a number"),
    "slash": (b"4/4", "'4/4' is not a number"),
    "underscore": (b"1_000", "'1_000' is not a number"),
    "hexadecimal": (b"0x10", "'0x10' is not a number"),
    "quotes": (b'"44"', "is not a number"),
    "arabic-digits": ("٣".encode(), "'٣' is not a number"),
    "nul": (b"4\x004", r"'4\x004' holds a NUL byte"),
    "latin-1": (b"4\xe9", r"'4\xe9' holds bytes that are not UTF-8 text"),
    "long": (b"9" * 5000, "'" + "9" * 48 + "'... is too large"),
}
CELLS = [
    pytest.param(column, field, *case, id=f"{field}-{name}")
    for column, field, cases in ((0, "TIMESTAMP", STAMPS), (1, "ContextTokens", TOKENS), (2, "GeneratedTokens", TOKENS))
    for name, case in cases.items()
]


@pytest.mark.parametrize("row", [2, 3, 5])
@pytest.mark.parametrize(("column", "field", "value", "words"), CELLS)
def test_cells(azure_file: AzureFile, row: int, column: int, field: str, value: bytes, words: str) -> None:
    """A bad cell is named by row and field wherever it stands: in the first, a middle or the last row."""
    cells = [b"2023-11-16 18:15:47", b"10", b"20"]
    cells[column] = value
    rows = [GOOD, LATER, LATER, LATER]
    rows[row - 2] = b",".join(cells) + b"\r\n"
    path = azure_file(HEADER + b"".join(rows))
    message = message_of(path)
    assert message.startswith(f"{path}: row {row}, {field}: ")
    assert words in message


ROWS = {
    "two-fields": (
        b"2023-11-16 18:15:47,10\n",
        3,
        "GeneratedTokens: is missing, '2023-11-16 18:15:47,10' has 2 fields",
    ),
    "one-field": (b"2023-11-16 18:15:47\n", 3, "ContextTokens: is missing, '2023-11-16 18:15:47' has 1 field;"),
    "four-fields": (
        b"2023-11-16 18:15:47,1,2,3\n",
        3,
        "after GeneratedTokens: '2023-11-16 18:15:47,1,2,3' has 4 fields",
    ),
    "comma-at-the-end": (b"2023-11-16 18:15:47,1,2,\n", 3, "after GeneratedTokens: "),
    "semicolons": (b"2023-11-16 18:15:47;1;2\n", 3, "ContextTokens: is missing"),
    "blank": (b"\n" + LATER, 3, "TIMESTAMP: the line is blank"),
    "blank-crlf": (b"\r\n" + LATER, 3, "TIMESTAMP: the line is blank"),
    "header-again": (HEADER + LATER, 3, "TIMESTAMP: 'TIMESTAMP' is not a time stamp"),
    "cut-in-the-stamp": (LATER + b"2023-11-16 18:1", 4, "ContextTokens: is missing, '2023-11-16 18:1' has 1 field"),
    "cut-after-a-field": (LATER + b"2023-11-16 18:15:51,20", 4, "GeneratedTokens: is missing"),
    "cut-after-a-comma": (LATER + b"2023-11-16 18:15:51,20,", 4, "GeneratedTokens: the field is empty"),
}


@pytest.mark.parametrize(("rows", "row", "words"), ROWS.values(), ids=ROWS)
def test_rows(azure_file: AzureFile, rows: bytes, row: int, words: str) -> None:
    """A row with too few or too many fields is named, and so is what it lacks."""
    path = azure_file(HEADER + GOOD + rows)
    assert message_of(path).startswith(f"{path}: row {row}, {words}")


@pytest.mark.parametrize("rows", [rows for name, (rows, _, _) in ROWS.items() if name.startswith("cut")])
def test_a_cut_off_file_is_suspected(azure_file: AzureFile, rows: bytes) -> None:
    """When the last line is the faulty one and has no end, the message asks whether the file is cut off."""
    assert "cut off" in message_of(azure_file(HEADER + GOOD + rows))


def test_no_suspicion_where_the_file_goes_on(azure_file: AzureFile) -> None:
    """A faulty line with a line end is no sign of a file that is cut off."""
    assert "cut off" not in message_of(azure_file(HEADER + GOOD + b"2023-11-16 18:15:47,10\n"))
    assert "cut off" not in message_of(azure_file(HEADER + b"2023-11-16 18:15:47,10\n" + LATER.rstrip()))


HEADERS = {
    "other-names": b"arrived_at,num_prefill_tokens,num_decode_tokens",
    "one-missing": b"TIMESTAMP,ContextTokens",
    "one-more": b"TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
    "other-case": b"timestamp,contexttokens,generatedtokens",
    "no-header": b"2023-11-16 18:15:46.6805900,374,44",
    "blank-line-first": b"\r\nTIMESTAMP,ContextTokens,GeneratedTokens",
    "undecodable": b"\xff\xfeT\0I\0",
    "returns-alone": b"TIMESTAMP,ContextTokens,GeneratedTokens\r2023-11-16 18:15:46.6805900,374,44",
    "mark-twice": b"\xef\xbb\xbf\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers(azure_file: AzureFile, header: bytes) -> None:
    """Other columns are refused in row 1, with those that were seen and those that belong there."""
    path = azure_file(header + b"\r\n" + GOOD)
    message = message_of(path)
    assert message.startswith(f"{path}: row 1: the columns are ")
    assert "TIMESTAMP,ContextTokens,GeneratedTokens" in message


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbf", b"\n", b" \r\n\r\n"], ids=["bytes", "mark", "line", "blanks"]
)
def test_empty_files(azure_file: AzureFile, content: bytes) -> None:
    """A file without any text is called empty."""
    path = azure_file(content)
    assert message_of(path).startswith(f"{path}: the file is empty")


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r\n\r\n"], ids=["nothing", "lf", "crlf", "blank-line"])
def test_header_only(azure_file: AzureFile, end: bytes) -> None:
    """A header without requests is refused, at the row where the first one should be."""
    path = azure_file(HEADER.rstrip() + end)
    assert message_of(path).startswith(f"{path}: row 2: the file ends after its header")


def test_missing_file(tmp_path: Path) -> None:
    """A path that leads nowhere is told as such."""
    path = tmp_path / "nowhere.csv"
    assert message_of(path).startswith(f"{path}: no such file")


def test_directory(tmp_path: Path) -> None:
    """A directory is told from a file."""
    assert message_of(tmp_path).startswith(f"{tmp_path}: is a directory")


def test_file_below_a_file(azure_file: AzureFile) -> None:
    """Whatever else the system refuses is given with its reason."""
    assert "Not a directory" in message_of(azure_file(HEADER) / "requests.csv")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_unreadable_file(azure_file: AzureFile) -> None:
    """A file without permission is told with the reason."""
    path = azure_file(HEADER + GOOD)
    path.chmod(0)
    assert "Permission denied" in message_of(path)


@pytest.mark.parametrize("name", ["two\nlines.csv", "nul\0.csv"], ids=["line-feed", "nul"])
def test_strange_paths(tmp_path: Path, name: str) -> None:
    """A path with a line feed or a NUL byte still gives one printable line."""
    message_of(f"{tmp_path}/{name}")


def test_strange_name_of_a_faulty_file(tmp_path: Path) -> None:
    """A fault inside a file whose name holds a line feed is one line too."""
    path = tmp_path / "two\nlines.csv"
    path.write_bytes(HEADER + b"noon,1,1\n")
    assert r"two\nlines.csv': row 2, TIMESTAMP" in message_of(path)
