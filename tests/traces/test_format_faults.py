"""A fault in any column of any format is an error in the right row, or a counted repair; nothing else ever comes out."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harli_core.errors import TraceError
from tests.traces.samples import CSV, FILES, JSON, ROWS, csv_bytes, json_bytes, parquet_bytes, rate_for
from traces.content import TraceContent
from traces.registry import FORMATS, detect, read_trace
from traces.schema import RepairOptions, Repairs, RequestTrace

EVERY_REPAIR = RepairOptions(sort=True, drop_failed=True, drop_invalid=True, clip_prompt=5000)


def read(name: str, content: bytes, repairs: RepairOptions = RepairOptions()) -> tuple[RequestTrace, Repairs]:  # noqa: B008
    """Read bytes as a format."""
    rng = np.random.Generator(np.random.PCG64(0))
    trace, made = read_trace(
        TraceContent.of("damaged", content), FORMATS[name.split(maxsplit=1)[0]], repairs, rate_for(name), rng
    )
    assert np.isfinite(trace.arrival_s).all()
    assert trace.prompt_tokens.min() >= 1
    assert trace.output_tokens.min() >= 1
    return trace, made


def check(name: str, content: bytes, row: int, may_reorder: bool) -> None:
    """The content is read, or refused in ``row`` (in the next one, if that is now too early); repairs save the rest."""
    try:
        assert len(read(name, content)[0]) == len(ROWS)
    except TraceError as error:
        message = str(error)
        assert message.isprintable()
        found = re.match(r"damaged: row (\d+)[,:] ", message)
        assert found is not None, message
        assert int(found[1]) == row or (may_reorder and "is earlier than" in message and int(found[1]) == row + 1)
        trace, made = read(name, content, EVERY_REPAIR)
        dropped = made.dropped_invalid + made.dropped_failed
        assert dropped + made.sorted_rows >= 1
        assert (dropped, len(trace)) in ((0, len(ROWS)), (1, len(ROWS) - 1))


CELL_TEXTS = st.one_of(
    st.text(st.characters(exclude_characters=",\n", codec="utf-8"), max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "nan", "NaN", "-inf", "inf", "1e3", "1E400", "0", "-1", "+1", "1_0", "0x10", "9" * 20, "9" * 5000, '"7"',
         "\r", "\0", " 1", "1 ", "1.", ".5", "1.5.5", "12.0", "2023-02-30 00:00:00", "٣", "\u2028", "null", "1e-5"]
    ),
)  # fmt: skip
CSV_CELLS = [(name, column) for name, columns in CSV.items() for column in columns]


@pytest.mark.parametrize(("name", "column"), CSV_CELLS)
@settings(max_examples=60, deadline=None)
@given(row=st.sampled_from(ROWS), text=CELL_TEXTS)
def test_csv_cells(name: str, column: str, row: int, text: str) -> None:
    """Any text in any cell of a comma-separated file."""
    columns = {key: list(values) for key, values in CSV[name].items()}
    columns[column][row] = text
    check(name, csv_bytes(columns), row + 2, may_reorder=True)


JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.none(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([10**20, -1, 0, 2**63, 10**4000, math.nan, math.inf, "1e3", 1e3, "\ud800", [[[]]], [{}], [True]]),
)
JSON_CELLS = [(name, key) for name, records in JSON.items() for key in (*records[0], "unheard_of")]


@pytest.mark.parametrize(("name", "key"), JSON_CELLS)
@settings(max_examples=60, deadline=None)
@given(row=st.sampled_from(ROWS), value=JSON_VALUES, without=st.booleans())
def test_json_values(name: str, key: str, row: int, value: Any, without: bool) -> None:
    """Any value under any key of a record, a key too many, a key too few."""
    records = [dict(record) for record in JSON[name]]
    if without:
        records[row].pop(key, None)
    else:
        records[row][key] = value
    check(name, json_bytes(records), row + 1, may_reorder=True)


@pytest.mark.parametrize("key", ["input_toks", "output_toks", "tool_duration_ns", "unheard_of"])
@settings(max_examples=40, deadline=None)
@given(row=st.sampled_from(ROWS), value=JSON_VALUES)
def test_values_of_calls(key: str, row: int, value: Any) -> None:
    """Any value in a call of an agentic session."""
    records = [dict(record) for record in JSON["llmservingsim-agentic"]]
    records[row]["sub_requests"] = [{**records[row]["sub_requests"][0], key: value}]
    check("llmservingsim-agentic", json_bytes(records), row + 1, may_reorder=False)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("arrival_s", [0.0, 0.0, math.nan, 2.5, 2.5, 4.0]),
        ("arrival_s", [0.0, 0.0, math.inf, 2.5, 2.5, 4.0]),
        ("arrival_s", [0.0, 0.0, -1.0, 2.5, 2.5, 4.0]),
        ("arrival_s", [0.0, 0.0, None, 2.5, 2.5, 4.0]),
        ("prompt_tokens", [1, 1, 0, 1, 1, 1]),
        ("prompt_tokens", [1, 1, None, 1, 1, 1]),
        ("output_tokens", [1, 1, 10**9, 1, 1, 1]),
        ("output_tokens", [1, 1, -5, 1, 1, 1]),
        ("prefix_hashes", [[1], [], [-1], None, [2], [3]]),
    ],
)
def test_parquet_values(column: str, values: list[Any]) -> None:
    """A wrong value in a column of a Parquet file is named by row and column."""
    content = parquet_bytes(**{column: values})
    with pytest.raises(TraceError, match=f"damaged: row 3, {column}: "):
        read("harli-parquet", content)
    assert read("harli-parquet", content, EVERY_REPAIR)[1].dropped_invalid == 1


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bytes_changed_anywhere(name: str, data: st.DataObject) -> None:
    """Bytes overwritten, inserted or cut, anywhere: read, or one line; by detection and by name, repaired or not."""
    content = FILES[name]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = min(len(content), start + data.draw(st.integers(0, 4)))
        new = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b",", b"\n", b"\r", b'"', b"{", b"}", b"9"])))
        content = content[:start] + new + content[end:]
    for repairs in (RepairOptions(), EVERY_REPAIR):
        try:
            read(detect(TraceContent.of("damaged", content))[0], content, repairs)
            read(name, content, repairs)
        except TraceError as error:
            assert str(error).isprintable()  # noqa: PT017  (it need not be raised)


@pytest.mark.parametrize("name", [name for name in FILES if name != "harli-parquet"])
def test_cut_off_anywhere(name: str) -> None:
    """A text cut off after any byte is refused, or read; all rows but the last are as they were."""
    content = FILES[name]
    whole, _ = read(name, content)
    for length in range(len(content)):
        try:
            trace, _ = read(name, content[:length])
        except TraceError as error:
            assert str(error).isprintable()  # noqa: PT017  (it need not be raised)
        else:
            rows = len(trace)
            assert trace.prompt_tokens[: rows - 1].tolist() == whole.prompt_tokens[: rows - 1].tolist()
