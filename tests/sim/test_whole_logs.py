"""Tiny scenarios on a device of constant times, every step written out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harli_core.decision_log import DecisionRecord
from harli_core.policy import PolicyContext
from harli_core.qos.first_job import first_job_plan
from harli_core.types import Hold, StepPlan, StepResult, StepView


class Turns:
    """Decode on the whole chip after a turn of 5.25 ms; the whole chip to finetuning while idle."""

    serves = True
    finetunes = True

    def __init__(self, context: PolicyContext) -> None:
        """There is nothing to set."""

    def plan(self, view: StepView) -> StepPlan:
        """The same at every step."""
        rows = [job.rows_wanted for job in view.jobs]
        if view.batch == 0:
            return first_job_plan(view, rows, Hold(1, None), 132, 132)
        return first_job_plan(view, rows, Hold(64, None), 132, 0, 5.25)

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


def log_of(records: list[DecisionRecord]) -> list[tuple[object, ...]]:
    """What was decided on and what came of it: batch, KV tokens, SMs, step latencies, idle seconds."""
    return [
        (
            record.view.batch,
            record.view.kv_tokens,
            (record.plan.decode_sms, sum(job.sms for job in record.plan.jobs)),
            pytest.approx([ms for result in record.results for ms in result.latency_ms]),
            pytest.approx(sum(result.idle_s for result in record.results)),
        )
        for record in records
    ]


def test_decode_alone(requests_of: Any, record_list: Any, constant_device: Any) -> None:
    """B arrives in the middle of a step and joins at its end; C finds the instance idle."""
    sink = record_list()
    with constant_device():
        outcome = requests_of([0.0, 0.015, 0.1], [100, 50, 10], [3, 2, 1]).simulate("inference_only", {}, sink)
    assert log_of(sink.records) == [
        (0, 0, (132, 0), (), 0.0),
        (1, 100, (132, 0), (10.0, 10.0, 10.0, 10.0), 0.0),
        (0, 0, (132, 0), (), 0.06),
        (1, 10, (132, 0), (10.0,), 0.0),
        (0, 0, (132, 0), (), 0.0),
    ]
    assert [(result.first_step, result.batch, result.kv_tokens) for result in sink.records[1].results] == [
        (0, 1, 100),
        (2, 2, 152),
        (3, 1, 51),
    ]
    assert [record.view.step for record in sink.records] == [0, 0, 4, 4, 5]
    assert [record.view.time_s for record in sink.records] == pytest.approx([0.0, 0.0, 0.04, 0.1, 0.11])
    assert outcome.requests.first_token_s.tolist() == pytest.approx([0.01, 0.03, 0.11])
    assert outcome.requests.last_token_s.tolist() == pytest.approx([0.03, 0.04, 0.11])
    assert outcome.requests.tpot_s()[:2].tolist() == pytest.approx([0.01, 0.01])
    assert outcome.duration_s == pytest.approx(0.11)
    assert list(outcome.steps.join_gap_ms) == []


def test_sharing_waits_for_the_unit_of_the_idle_time(requests_of: Any, record_list: Any, constant_device: Any) -> None:
    """12.5 ms beside finetuning; B finds the whole chip inside a unit that has 0.75 ms to go."""
    sink = record_list()
    with constant_device():
        outcome = requests_of([0.0, 0.02025], [100, 50], [1, 2]).simulate("pause_on_load", {}, sink, share_weights=True)
    assert log_of(sink.records) == [
        (0, 0, (132, 132), (), 0.0),
        (1, 100, (68, 64), (12.5,), 0.0),
        (0, 0, (132, 132), (), 0.00775),
        (1, 50, (68, 64), (13.25, 12.5), 0.0),
        (0, 0, (132, 132), (), 0.0),
    ]
    job = sink.records[3].view.jobs[0]
    assert (job.in_flight_sms, job.in_flight_ms) == (132, pytest.approx(0.75))
    assert [result.decode_ms for result in sink.records[3].results] == [(12.5, 12.5)]
    assert outcome.requests.last_token_s.tolist() == pytest.approx([0.0125, 0.046])


def test_turns_of_whole_units(requests_of: Any, record_list: Any, constant_device: Any, policy_named: Any) -> None:
    """5 units of 1 ms fit into 5.25 ms; B begins with half a unit in flight, so its first turn is 0.5 + 4 units."""
    sink = record_list()
    with constant_device():
        outcome = requests_of([0.0, 0.0205], [100, 50], [1, 2]).simulate(
            policy_named(Turns), {}, sink, share_weights=True
        )
    assert log_of(sink.records) == [
        (0, 0, (132, 132), (), 0.0),
        (1, 100, (132, 0), (15.0,), 0.0),
        (0, 0, (132, 132), (), 0.0055),
        (1, 50, (132, 0), (14.5, 15.0), 0.0),
        (0, 0, (132, 132), (), 0.0),
    ]
    assert [[result.turn_ms for result in record.results] for record in sink.records] == [
        [()],
        [(5.0,)],
        [()],
        [(4.5, 5.0)],
        [()],
    ]
    units = 5 + 5.5 + 4.5 + 5
    columns = outcome.steps
    order_length = 4 * (32 + 1 + 32) + 32
    assert columns.span_column("finetune_tokens")[-1] == pytest.approx(units / order_length * 4096)


def test_an_arrival_in_a_turn_joins_that_step(
    requests_of: Any, record_list: Any, constant_device: Any, policy_named: Any
) -> None:
    """B comes 2.5 ms into the turn: it ends at 3 ms, and the step that follows is of both, its latency from 0 on."""
    sink = record_list()
    with constant_device():
        outcome = requests_of([0.0, 0.0025], [100, 50], [2, 1]).simulate(
            policy_named(Turns), {}, sink, share_weights=True
        )
    assert log_of(sink.records) == [
        (0, 0, (132, 132), (), 0.0),
        (1, 100, (132, 0), (), 0.0),
        (2, 150, (132, 0), (18.0,), 0.0),
        (1, 101, (132, 0), (15.0,), 0.0),
        (0, 0, (132, 132), (), 0.0),
    ]
    assert [record.view.elapsed_ms for record in sink.records] == [0.0, 0.0, 3.0, 0.0, 0.0]
    assert [result.turn_ms for result in sink.records[2].results] == [(8.0,)]
    assert outcome.requests.first_token_s.tolist() == pytest.approx([0.018, 0.018])


def test_prefill_comes_first(requests_of: Any, record_list: Any, constant_device: Any) -> None:
    """Prefill takes 30 ms and gives the first token; decode emits the other two from then on."""
    sink = record_list()
    with constant_device():
        outcome = requests_of([0.0], [100], [3]).simulate("inference_only", {}, sink, prefill_gpus=1)
    assert log_of(sink.records) == [
        (0, 0, (132, 0), (), 0.03),
        (1, 100, (132, 0), (10.0, 10.0), 0.0),
        (0, 0, (132, 0), (), 0.0),
    ]
    assert outcome.requests.first_token_s.tolist() == pytest.approx([0.03])
    assert outcome.requests.last_token_s.tolist() == pytest.approx([0.05])
    assert list(outcome.steps.join_gap_ms) == pytest.approx([10.0])
    assert outcome.prefill_busy_s == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("gpus", "expected"), [(1, [0.03, 0.06, 0.09, 0.12]), (2, [0.03, 0.03, 0.06, 0.06]), (9, [0.03] * 4)]
)
def test_prefill_queues_for_its_gpus(gpus: int, expected: list[float], requests_of: Any, constant_device: Any) -> None:
    """Four prompts at once, first come first served on 1, 2 and 9 GPUs."""
    with constant_device():
        outcome = requests_of([0.0] * 4, [100] * 4, [1] * 4).simulate("inference_only", prefill_gpus=gpus)
    assert outcome.requests.first_token_s.tolist() == pytest.approx(expected)
    assert outcome.requests.last_token_s.tolist() == pytest.approx(expected)


def test_violations_are_split_by_what_decode_alone_would_take(requests_of: Any, constant_device: Any) -> None:
    """12.5 ms beside finetuning and 10 alone: over 12 finetuning is the cause, over 9 decode itself is."""
    trace = requests_of([0.0], [100], [7])
    with constant_device():
        books = {qos_ms: trace.simulate("static_split", qos_ms=qos_ms).steps for qos_ms in (9.0, 12.0, 12.5)}
        alone = trace.simulate("inference_only", qos_ms=9.0).steps
    found = {qos_ms: (book.solo_violations, book.finetune_violations) for qos_ms, book in books.items()}
    assert found == {9.0: (7, 0), 12.0: (0, 7), 12.5: (0, 0)}
    assert (alone.solo_violations, alone.finetune_violations) == (7, 0)


def test_requests_in_the_batch_go_on_together(requests_of: Any, constant_device: Any) -> None:
    """The batch limit holds the third back until the first leaves, whatever room memory has."""
    with constant_device():
        outcome = requests_of([0.0] * 3, [100] * 3, [2, 5, 2]).simulate("inference_only", max_batch=2)
    assert outcome.requests.first_token_s.tolist() == pytest.approx([0.01, 0.01, 0.03])
    assert outcome.requests.last_token_s.tolist() == pytest.approx([0.02, 0.05, 0.04])


def test_round_robin_and_least_kv(requests_of: Any, constant_device: Any) -> None:
    """In turn, or where the fewest tokens are held and promised; the lowest index of equals."""
    trace = requests_of([0.0, 0.001, 0.002, 0.003], [1000, 100, 100, 5000], [50] * 4)
    with constant_device():
        turn = trace.simulate("inference_only", gpus=2, router="round_robin").requests.instance.tolist()
        least = trace.simulate("inference_only", gpus=2, router="least_kv").requests.instance.tolist()
    assert turn == [0, 1, 0, 1]
    assert least == [0, 1, 1, 1]


class RoomyTurns(Turns):
    """The same plans, valid for up to four requests."""

    def plan(self, view: StepView) -> StepPlan:
        """As `Turns`, with a hold that lets requests come and go."""
        plan = super().plan(view)
        return dataclasses.replace(plan, hold=Hold(64, None, (1, 4), 1000)) if view.batch else plan


def test_a_roomy_plan_goes_on_when_requests_join_and_leave(
    requests_of: Any, record_list: Any, constant_device: Any, policy_named: Any
) -> None:
    """B comes 2.5 ms into the turn and joins that very step, C in the middle of a decode; one plan for all of it."""
    sink = record_list()
    with constant_device():
        outcome = requests_of([0.0, 0.0025, 0.0225], [100, 50, 30], [3, 1, 2]).simulate(
            policy_named(RoomyTurns), {}, sink, share_weights=True
        )
    assert [(record.view.batch, len(record.results)) for record in sink.records] == [(0, 1), (1, 4), (0, 1)]
    found = [(result.batch, result.kv_tokens, result.latency_ms) for result in sink.records[1].results]
    assert found == [(2, 150, (15.0,)), (1, 101, (15.0,)), (2, 132, (15.0,)), (1, 31, (15.0,))]
    assert outcome.requests.first_token_s.tolist() == pytest.approx([0.015, 0.015, 0.045])
    assert outcome.requests.last_token_s.tolist() == pytest.approx([0.045, 0.015, 0.06])


def test_a_roomy_plan_ends_beyond_its_tokens(
    requests_of: Any, record_list: Any, constant_device: Any, policy_named: Any
) -> None:
    """A request that brings more KV than the hold allows ends the turn, for a new plan; when it is gone that one holds."""
    sink = record_list()
    with constant_device():
        requests_of([0.0, 0.0025], [100, 1200], [2, 1]).simulate(policy_named(RoomyTurns), {}, sink, share_weights=True)
    busy = [record for record in sink.records if record.view.batch]
    assert [(record.view.batch, record.view.elapsed_ms) for record in busy] == [(1, 0.0), (2, 3.0)]
    assert [len(record.results) for record in busy] == [0, 2]
