"""A log fed to the policy that made it gives the same plans; anything else is found at its first record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harli_cli.log_file import DecisionLogWriter
from harli_cli.replay import divergence_fields, replay_log
from harli_core.decision_log import DecisionRecord, encode_record, replay
from harli_core.errors import ConfigError, LogError
from policies import POLICIES, find_policy

OPTIONS: dict[str, dict[str, Any]] = {"separate": {"serving_gpus": 1}, "pause_on_load": {"threshold": 3}}


@pytest.fixture(scope="module")
def log_of(conversation: Any, record_list: Any) -> Callable[[str], tuple[dict[str, Any], list[DecisionRecord]]]:
    """Header and records of a short run of two instances under a policy: with prefill, and a target that binds."""
    known: dict[str, tuple[dict[str, Any], list[DecisionRecord]]] = {}

    def run(policy: str) -> tuple[dict[str, Any], list[DecisionRecord]]:
        if policy not in known:
            scenario = conversation(60, 12.0).scenario(gpus=2, prefill_gpus=1, qos_ms=8.0)
            sink = record_list()
            scenario.run(policy, OPTIONS.get(policy, {}), sink)
            known[policy] = scenario.contexts.header(policy, OPTIONS.get(policy, {})), sink.records
        return known[policy]

    return run


@pytest.fixture
def log_file(log_of: Any, tmp_path: Path) -> Callable[..., Path]:
    """The same log on disk, record ``altered`` (from 1) with another plan."""

    def write(policy: str, altered: int | None = None, **changes: Any) -> Path:
        header, records = log_of(policy)
        path = tmp_path / f"{policy}.log"
        with DecisionLogWriter(path, header) as log:
            for number, record in enumerate(records, start=1):
                plan = dataclasses.replace(record.plan, **changes) if number == altered else record.plan
                log.write(dataclasses.replace(record, plan=plan))
        return path

    return write


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_policy_that_made_a_log_repeats_it(policy: str, log_file: Any, log_of: Any) -> None:
    """Every record of both instances is compared and none differs."""
    assert replay_log(log_file(policy), None) == (policy, len(log_of(policy)[1]), None)


@pytest.mark.parametrize("policy", ["harli", "hybrid"])
def test_the_logs_are_worth_replaying(policy: str, log_of: Any) -> None:
    """The run under test has pauses, sharing and more than one split in it, on both instances."""
    records = log_of(policy)[1]
    busy = [record.plan for record in records if record.view.batch]
    assert {record.view.instance for record in records} == {0, 1}
    assert len({(plan.decode_sms, plan.jobs[0].sms) for plan in busy}) >= 3


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_an_altered_plan_is_found(policy: str, share: float, log_file: Any, log_of: Any) -> None:
    """The first, a middle and the last record with another prediction: exactly that one is reported."""
    records = log_of(policy)[1]
    number = 1 + round(share * (len(records) - 1))
    _, compared, divergence = replay_log(log_file(policy, number, predicted_ms=0.125), None)
    assert divergence is not None
    assert compared == divergence.record == number
    assert divergence.logged.predicted_ms == 0.125
    assert divergence.planned == records[number - 1].plan
    assert divergence.view == records[number - 1].view


def test_any_field_of_a_plan_counts(log_file: Any, log_of: Any) -> None:
    """A row more for the job, a step less of hold, other SMs: each is a difference."""
    record = log_of("harli")[1][10]
    job = record.plan.jobs[0]
    for changes in (
        {"jobs": (dataclasses.replace(job, rows=job.rows + 1),)},
        {"hold": dataclasses.replace(record.plan.hold, steps=record.plan.hold.steps + 1)},
        {"decode_sms": 20 if record.plan.decode_sms != 20 else 36},
    ):
        _, _, divergence = replay_log(log_file("harli", 11, **changes), None)
        assert divergence is not None
        assert divergence.record == 11


def test_another_policy_differs_where_it_should(log_of: Any, context_of: Any) -> None:
    """A threshold of 5 instead of 3 differs where requests decode first: in the batches that its plan is for."""
    records = [record for record in log_of("pause_on_load")[1] if record.view.instance == 0]
    expected = next(number for number, record in enumerate(records, start=1) if 0 < record.view.batch < 5)
    header = log_of("pause_on_load")[0]
    assert header["qos_ms"] == 8.0
    policy = find_policy("pause_on_load")(context_of(qos_ms=8.0), threshold=5)
    compared, divergence = replay(records, {0: policy})
    assert compared == expected
    assert divergence is not None
    assert divergence.planned.hold.batches == (1, 4)
    assert divergence.logged.hold.batches == (1, 2)


def test_replay_with_another_policy_by_name(log_file: Any, log_of: Any) -> None:
    """``--policy`` replaces policy and options; `static_split` never gives an idle GPU to finetuning as a whole."""
    name, compared, divergence = replay_log(log_file("harli"), "static_split")
    assert (name, compared) == ("static_split", 1)
    assert divergence is not None
    assert divergence.planned.jobs[0].sms == 48
    assert divergence.logged.jobs[0].sms == 132


def test_a_divergence_is_told_with_names(log_file: Any) -> None:
    """For JSON output every field has its name."""
    _, _, divergence = replay_log(log_file("harli", 1, predicted_ms=0.125), None)
    assert divergence is not None
    fields = divergence_fields(divergence)
    assert fields["record"] == 1
    assert fields["view"]["memory"]["row_tokens"] == 1024
    assert fields["logged"]["predicted_ms"] == 0.125


def test_results_are_observed(log_of: Any, context_of: Any) -> None:
    """A policy that learns is shown the logged results: with other results its later plans differ."""
    _, records = log_of("harli")
    slower = [
        dataclasses.replace(
            record,
            results=tuple(
                dataclasses.replace(
                    result,
                    decode_ms=tuple(3.0 * ms for ms in result.decode_ms),
                    latency_ms=tuple(3.0 * ms for ms in result.latency_ms),
                )
                for result in record.results
            ),
        )
        for record in records
        if record.view.instance == 0
    ]
    policies = {0: find_policy("harli")(context_of(qos_ms=8.0))}
    compared, divergence = replay(slower, policies)
    assert divergence is not None
    assert compared < len(slower)


def test_no_records_are_no_difference() -> None:
    """A log of a header alone compares nothing."""
    assert replay([], {}) == (0, None)


def test_an_instance_that_the_header_does_not_know(log_of: Any, context_of: Any) -> None:
    """A record of instance 1 where the policies are for instance 0 only is a fault of the log."""
    record = next(record for record in log_of("harli")[1] if record.view.instance == 1)
    with pytest.raises(LogError, match="record 1 is of instance 1"):
        replay([record], {0: find_policy("harli")(context_of())})


def test_a_cut_log_is_an_error(log_file: Any, log_of: Any) -> None:
    """A file that ends in the middle of a line: the line is named."""
    path = log_file("harli")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:-20])
    with pytest.raises(LogError, match=r"harli\.log: line 6 is not a record"):
        replay_log(path, None)


def test_a_header_without_its_context_is_an_error(tmp_path: Path, log_of: Any) -> None:
    """A log that lost a part of its header cannot be replayed, and the part is named."""
    header, records = log_of("harli")
    for part in ("profile", "reservation", "gpus", "qos_ms"):
        path = tmp_path / "part.log"
        with DecisionLogWriter(path, {name: value for name, value in header.items() if name != part}) as log:
            log.write(records[0])
        with pytest.raises(ConfigError, match=f"part.log: the header lacks .*{part}"):
            replay_log(path, None)


def test_encoded_records_are_what_the_file_holds(log_file: Any, log_of: Any) -> None:
    """The file is the header and `encode_record` of each record, one a line."""
    lines = log_file("hybrid").read_text().splitlines()
    assert lines[1:] == [encode_record(record) for record in log_of("hybrid")[1]]
