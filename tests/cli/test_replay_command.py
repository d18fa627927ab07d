"""`harli replay`: a log fed to a policy again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Harli


@pytest.fixture
def log(harli: Harli, trace: Path, tmp_path: Path) -> Path:
    """The decision log of a small run under `hybrid` with an option of its own."""
    path = tmp_path / "decisions.jsonl"
    answer = harli("run", "--trace", trace, "--log", path, "--policy-option", "margin=0.1")
    assert answer.code == 0
    return path


def test_same_policy_plans_the_same(harli: Harli, log: Path) -> None:
    """The policy that made the log, with the options that made it, differs nowhere."""
    answer = harli("replay", log)
    assert (answer.code, answer.err) == (0, "")
    records = len(log.read_text().splitlines()) - 1
    assert answer.out == f"{records:,} records: hybrid plans the same at every one\n"


def test_one_altered_plan_is_found(harli: Harli, log: Path) -> None:
    """Exit code 1, the record, and the fields that differ and no other."""
    lines = log.read_text().splitlines()
    record = json.loads(lines[4])
    record[1][0] -= 8
    lines[4] = json.dumps(record)
    log.write_text("\n".join(lines) + "\n")
    answer = harli("replay", log)
    assert answer.code == 1
    first, *fields = answer.out.splitlines()
    assert first.startswith("record 4 (instance ")
    assert "batch" in first
    assert "KV tokens) differs:" in first
    assert fields == [f"  decode_sms: logged {record[1][0]}, planned {record[1][0] + 8}"]
    found = json.loads(harli("replay", log, "--json").out)["first_difference"]
    assert found["record"] == 4
    assert found["planned"]["decode_sms"] == found["logged"]["decode_sms"] + 8


def test_fields_that_only_one_plan_has(harli: Harli, log: Path) -> None:
    """`inference_only` plans nothing for the job that `hybrid` finetunes."""
    answer = harli("replay", log, "--policy", "inference_only")
    assert "  jobs[0].job_id: logged job-0, planned nothing" in answer.out.splitlines()
    assert "hold.steps: logged 1, planned 256" in answer.out


def test_another_policy_and_other_options(harli: Harli, log: Path) -> None:
    """`--policy` starts from that policy's defaults, `--policy-option` changes them."""
    assert harli("replay", log, "--policy", "inference_only").code == 1
    assert harli("replay", log, "--policy", "hybrid", "--policy-option", "margin=0.1").code == 0
    assert harli("replay", log, "--policy", "separate", "--policy-option", "serving_gpus=1").code == 1


@pytest.mark.parametrize(
    ("line", "content", "parts"),
    [
        (0, "", ("line 1 is not JSON",)),
        (0, "{}", ("line 1 is not the header",)),
        (0, '{"schema": "harli-decision-log", "version": 99}', ("version 99",)),
        (0, '{"schema": "harli-decision-log", "version": 2}', ("the header lacks", "'profile'")),
        (2, "[1, 2, 3]", ("line 3 is not a record",)),
        (2, "not JSON", ("line 3 is not a record",)),
        (2, "", ("line 3 is not a record",)),
    ],
)
def test_bad_log(harli: Harli, log: Path, line: int, content: str, parts: tuple[str, ...]) -> None:
    """The file and the line are named."""
    lines = log.read_text().splitlines()
    lines[line] = content
    log.write_text("\n".join(lines) + "\n")
    message = harli("replay", log).error()
    for part in (log.name, *parts):
        assert part in message


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b"a trace\n1,2,3\n"])
def test_no_log_at_all(harli: Harli, tmp_path: Path, content: bytes | None) -> None:
    """Missing, empty, not text, something else."""
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert "log.jsonl" in harli("replay", path).error()


def test_unknown_policy(harli: Harli, log: Path) -> None:
    """Refused as in a run."""
    assert "unknown policy 'nope'" in harli("replay", log, "--policy", "nope").error()
