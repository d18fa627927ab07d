"""One line of JSON a record, exactly: what is read is what was written, and anything else is an error with its line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_cli.log_file import DecisionLogWriter, read_log
from harli_core.decision_log import (
    DecisionRecord,
    decode_header,
    decode_record,
    decode_records,
    encode_header,
    encode_record,
)
from harli_core.errors import LogError
from harli_core.types import Hold, JobPlan, MemoryView, StepPlan, StepResult, StepView

MEMORY = MemoryView(1024, 1 << 27, 200, 2, 0, 198, 0, 800, 1000, 0)
VIEW = StepView(0, 7, 0.1 + 0.2, 4, 800, 0, 0, 0.0, MEMORY, ())
RECORD = DecisionRecord(VIEW, StepPlan(132, (), Hold(64, None)), (StepResult(0, 7, 4, 800, (), (), ()),))


@given(st.builds(DecisionRecord))
def test_round_trip_is_exact(record: DecisionRecord) -> None:
    """Any record comes back the same to the last bit of its floats, -0.0 and NaN included, and of the same types."""
    assert repr(decode_record(encode_record(record), "log", 2)) == repr(record)


@pytest.mark.parametrize("value", [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, 1 / 3, math.inf])
def test_floats_survive_bit_by_bit(value: float) -> None:
    """The smallest, the largest, a negative zero and what decimals cannot write."""
    view = StepView(0, 0, value, 1, 1, 0, 0, 0.0, MEMORY, ())
    found = decode_record(encode_record(DecisionRecord(view, RECORD.plan, RECORD.results)), "log", 2)
    assert found.view.time_s.hex() == value.hex()


def test_a_record_is_one_line_without_names() -> None:
    """Fields stand in the order of their types, nothing else is in the line."""
    plan = StepPlan(84, (JobPlan("job-0", 48, 2.5, 30),), Hold(16, 40.0, (3, 5), 900), 12.5)
    results = (
        StepResult(0, 7, 4, 800, (9.5, 9.25), (9.0, 9.0), (0.5, 0.25)),
        StepResult(0, 9, 3, 600, (8.0,), (8.0,), (0.0,), unit_ratio=1.0625),
    )
    line = encode_record(DecisionRecord(VIEW, plan, results))
    memory = "[1024,134217728,200,2,0,198,0,800,1000,0]"
    assert line == (
        f"[[0,7,0.30000000000000004,4,800,0,0,0.0,{memory},[]],"
        '[84,[["job-0",48,2.5,30]],[16,40.0,[3,5],900],12.5],'
        "[[0,7,4,800,[9.5,9.25],[9.0,9.0],[0.5,0.25],0.0],[0,9,3,600,[8.0],[8.0],[0.0],0.0,1.0625]]]"
    )


def test_absent_values_stay_absent() -> None:
    """No bound, no prediction and no steps come back as None and empty tuples, not as zeros."""
    found = decode_record(encode_record(RECORD), "log", 2)
    assert (found.plan.hold.max_step_ms, found.plan.predicted_ms) == (None, None)
    assert (found.view.jobs, found.plan.jobs, found.results[0].latency_ms) == ((), (), ())


GOOD = json.loads(encode_record(RECORD))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\n",
        "not json",
        encode_record(RECORD)[:-9],
        "{}",
        "[]",
        "null",
        "7",
        json.dumps(GOOD[:2]),
        json.dumps([*GOOD, []]),
        json.dumps([GOOD[0][:-1], *GOOD[1:]]),
        json.dumps([[*GOOD[0], 0], *GOOD[1:]]),
        json.dumps([[*GOOD[0][:-2], MEMORY.row_bytes, []], *GOOD[1:]]),
        json.dumps([[*GOOD[0][:-2], GOOD[0][-2][:-1], []], *GOOD[1:]]),
        json.dumps([GOOD[0], GOOD[1][:-1], GOOD[2]]),
        json.dumps([GOOD[0], [132, [["job-0", 0]], [1, None, None, None], None], GOOD[2]]),
        json.dumps([GOOD[0], [132, [], None, None], GOOD[2]]),
        json.dumps([GOOD[0], [132, [], [1, None, [4], None], None], GOOD[2]]),
        json.dumps([*GOOD[:2], GOOD[2][0]]),
        json.dumps([*GOOD[:2], [GOOD[2][0][:-1]]]),
        json.dumps([*GOOD[:2], [[0, 7, 4, 800, 1.0, [], [], 0.0]]]),
    ],
)
def test_bad_lines_are_named(line: str) -> None:
    """Cut, foreign, too short and too long lines: an error that names the file and the line."""
    lines = [encode_record(RECORD), line, encode_record(RECORD)]
    records = decode_records(lines, "a.log")
    next(records)
    with pytest.raises(LogError, match=r"^a\.log: line 3 is not a record of schema 2 "):
        next(records)


def test_header_comes_back_with_the_schema_version() -> None:
    """What is put into a header is in it when it is read."""
    header = decode_header(encode_header({"policy": "harli", "gpus": 2}), "a.log")
    assert (header["policy"], header["gpus"], header["version"]) == ("harli", 2, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "line 1 is not JSON"),
        ("[1, 2]", "line 1 is not the header of a decision log"),
        ('{"schema": "other", "version": 1}', "line 1 is not the header of a decision log"),
        ('{"schema": "harli-decision-log", "version": 1}', "schema version 1, this program reads 2"),
        ('{"schema": "harli-decision-log"}', "schema version None, this program reads 2"),
    ],
)
def test_foreign_headers_are_refused(line: str, message: str) -> None:
    """Text, other JSON and other versions: an error that names the file."""
    with pytest.raises(LogError, match=rf"^a\.log: {message}"):
        decode_header(line, "a.log")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\xff\xfe\x00", "line 1 is not text"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "line 1 is not JSON"),
        (b'{"a": 1}\n', "line 1 is not the header"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Empty, binary, a trace, some JSON: named with its path."""
    path = tmp_path / "some.log"
    path.write_bytes(content)
    with pytest.raises(LogError, match=f"some.log: {message}"):
        read_log(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """No file, no folder that can be written: one error each that names the path."""
    with pytest.raises(LogError, match=r"absent\.log: cannot read the decision log"):
        read_log(tmp_path / "absent.log")
    with pytest.raises(LogError, match=r"cannot write the decision log .*a\.log"):
        DecisionLogWriter(tmp_path / "nowhere" / "a.log", {})


@pytest.fixture
def written(tmp_path: Path) -> Callable[[], tuple[dict[str, Any], list[DecisionRecord]]]:
    """Reads the log ``a.log`` back."""

    def read() -> tuple[dict[str, Any], list[DecisionRecord]]:
        header, lines = read_log(tmp_path / "a.log")
        return header, list(decode_records(lines, "a.log"))

    return read


def test_a_file_is_read_as_it_was_written(tmp_path: Path, written: Any) -> None:
    """Header and records of a log on disk."""
    with DecisionLogWriter(tmp_path / "a.log", {"policy": "harli"}) as log:
        log.write(RECORD)
        log.write(RECORD)
    header, records = written()
    assert header["policy"] == "harli"
    assert records == [RECORD, RECORD]


def test_a_failed_run_leaves_the_old_log(tmp_path: Path, written: Any) -> None:
    """A log takes its name when the run is complete; a run that fails changes nothing and leaves no rest."""
    with DecisionLogWriter(tmp_path / "a.log", {"policy": "first"}) as log:
        log.write(RECORD)
    log = DecisionLogWriter(tmp_path / "a.log", {"policy": "second"})
    with pytest.raises(ZeroDivisionError), log:
        log.write(DecisionRecord(VIEW, StepPlan(132 // len(VIEW.jobs), (), Hold(1, None)), RECORD.results))
    assert written()[0]["policy"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]
