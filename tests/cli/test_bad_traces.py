"""Traces that cannot be used: the line names file, row and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Harli

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:15:46.6805900,374,44\n"

BAD_TRACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty file": ("", ("the file is empty",)),
    "header only": (HEADER, ("row 2", "after its header")),
    "wrong columns": ("a,b,c\n1,2,3\n", ("row 1", "'a,b,c'", "TIMESTAMP,ContextTokens,GeneratedTokens")),
    "too few columns": (HEADER + GOOD + "2023-11-16 18:15:47,3\n", ("row 3, GeneratedTokens", "missing")),
    "not a number": (HEADER + GOOD + "2023-11-16 18:15:47,many,4\n", ("row 3, ContextTokens", "'many'")),
    "NaN": (HEADER + GOOD + "2023-11-16 18:15:47,nan,4\n", ("row 3, ContextTokens", "'nan'")),
    "NaN time": (HEADER + "nan,374,44\n", ("row 2, TIMESTAMP", "'nan'")),
    "negative time": (HEADER + "-1,374,44\n", ("row 2, TIMESTAMP", "'-1'")),
    "zero prompt tokens": (HEADER + "2023-11-16 18:15:47,0,4\n", ("row 2, ContextTokens", "'0'")),
    "zero output tokens": (HEADER + "2023-11-16 18:15:47,4,0\n", ("row 2, GeneratedTokens", "'0'")),
    "negative tokens": (HEADER + GOOD + "2023-11-16 18:15:47,4,-4\n", ("row 3, GeneratedTokens", "'-4'")),
    "out of order": (HEADER + GOOD + "2023-11-16 18:15:46,3,4\n", ("row 3, TIMESTAMP", "earlier", "--sort")),
}


@pytest.mark.parametrize("fault", BAD_TRACES)
def test_named_by_file_row_and_field(harli: Harli, tmp_path: Path, fault: str) -> None:
    """One line, and no folder of results."""
    content, parts = BAD_TRACES[fault]
    path = tmp_path / "requests.csv"
    path.write_text(content)
    message = harli("run", "--trace", path).error()
    for part in (str(path), *parts):
        assert part in message
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_missing_file(harli: Harli) -> None:
    """The path is named."""
    assert "nowhere.csv: no such file" in harli("run", "--trace", "nowhere.csv").error()


def test_folder(harli: Harli, tmp_path: Path) -> None:
    """A folder is no trace."""
    assert "is a directory" in harli("run", "--trace", tmp_path).error()


def test_out_of_order_is_accepted_with_sort(harli: Harli, tmp_path: Path) -> None:
    """`--sort` repairs the order; the result counts the rows that moved."""
    path = tmp_path / "requests.csv"
    path.write_text(BAD_TRACES["out of order"][0])
    answer = harli("run", "--trace", path, "--sort", "--json", "--horizon-s", 30)
    assert (answer.code, answer.err) == (0, "")
    assert '"sorted_rows": 1' in answer.out
