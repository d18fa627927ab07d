"""More load than KV can hold: runs end, requests are preempted and finish, finetuning gives way."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from harli_core.records import COMPLETED
from harli_core.summary import request_latencies, token_gaps
from harli_core.types import StepPlan, StepView
from policies.static_split import StaticSplit

FINETUNING = ["hybrid", "harli", "static_split"]


def crowd(requests_of: Any, count: int, gap_s: float, prompt: int, output: int) -> Any:
    """Equal requests at equal distances."""
    return requests_of([gap_s * k for k in range(count)], [prompt] * count, [output] * count)


@pytest.mark.parametrize("prefill_gpus", [0, 1])
@pytest.mark.parametrize("policy", [*FINETUNING, "inference_only", "pause_on_load"])
def test_a_crowd_is_preempted_and_finishes(policy: str, prefill_gpus: int, requests_of: Any) -> None:
    """Three times as many tokens as there are slots: all complete with their tokens, after some preemptions."""
    memory_gb = 30.0 if policy != "inference_only" else 25.0
    outcome = crowd(requests_of, 60, 0.01, 300, 900).simulate(
        policy, memory_gb=memory_gb, prefill_gpus=prefill_gpus, qos_ms=30.0
    )
    book = outcome.requests
    assert (book.state == COMPLETED).all()
    assert np.array_equal(book.produced_tokens, book.output_tokens)
    assert book.preemptions.sum() > 0
    assert all(state.used_tokens == 0 for state in outcome.instances)


@pytest.mark.parametrize("prefill_gpus", [0, 1])
@pytest.mark.parametrize("policy", FINETUNING)
def test_room_for_hardly_one_request(policy: str, prefill_gpus: int, requests_of: Any) -> None:
    """Three rows of KV beside the job's floor: requests of up to two thirds of that come through one after another."""
    outcome = crowd(requests_of, 8, 0.0, 900, 1000).simulate(policy, memory_gb=27.5, prefill_gpus=prefill_gpus)
    assert (outcome.requests.state == COMPLETED).all()
    assert np.array_equal(outcome.requests.produced_tokens, outcome.requests.output_tokens)


@pytest.mark.parametrize("lending", ["alias", "remap"])
@pytest.mark.parametrize("policy", ["hybrid", "harli", "pause_on_load"])
def test_finetuning_gives_memory_back(policy: str, lending: str, requests_of: Any, record_list: Any) -> None:
    """A quiet time in which the job takes all it wants, then a crowd: rows come back, the window shrinks."""
    arrivals = [0.0, *(5.0 + 0.02 * k for k in range(50))]
    trace = requests_of(arrivals, [1500] * 51, [300] * 51)
    sink = record_list()
    outcome = trace.simulate(policy, {}, sink, memory_gb=37.0, lending=lending)
    state = outcome.instances[0]
    assert (outcome.requests.state == COMPLETED).all()
    assert state.rows_reclaimed > 10
    assert state.rows_lent > 37
    windows = [job.window_layers for record in sink.records for job in record.view.jobs if job.window_layers]
    assert min(windows) < max(windows) - 3
    assert min(windows) >= 2


@pytest.mark.parametrize("policy", ["hybrid", "harli"])
def test_finetuning_comes_back_after_the_crowd(policy: str, requests_of: Any, record_list: Any) -> None:
    """When the crowd has gone the job has as many rows as before it came."""
    arrivals = [0.0, *(5.0 + 0.02 * k for k in range(50)), 60.0, 65.0]
    sink = record_list()
    outcome = requests_of(arrivals, [1500] * 53, [300] * 53).simulate(policy, {}, sink, memory_gb=37.0)
    held = [(record.view.time_s, job.rows_held) for record in sink.records for job in record.view.jobs]
    before = max(rows for time_s, rows in held if time_s < 5.0)
    crowded = min(rows for time_s, rows in held if 5.0 < time_s < 30.0)
    after = max(rows for time_s, rows in held if time_s > 55.0)
    assert crowded < before
    assert after >= before - 4
    assert (outcome.requests.state == COMPLETED).all()


def test_static_split_never_adapts_its_memory(requests_of: Any, record_list: Any) -> None:
    """40 % of the rows for finetuning, or its floor: the same before, in and after a crowd."""
    sink = record_list()
    outcome = crowd(requests_of, 40, 0.05, 1000, 200).simulate("static_split", {}, sink, memory_gb=40.0)
    held = {job.rows_held for record in sink.records[1:] for job in record.view.jobs}
    assert held == {round(0.4 * outcome_rows(sink))}
    assert outcome.instances[0].rows_reclaimed == 0


def outcome_rows(sink: Any) -> int:
    """Rows of the grid."""
    rows: int = sink.records[0].view.memory.rows_total
    return rows


@pytest.mark.parametrize("policy", [*FINETUNING, "inference_only"])
def test_the_oldest_request_is_never_preempted(policy: str, requests_of: Any) -> None:
    """The newest goes first, so the first arrival goes straight through."""
    book = (
        crowd(requests_of, 60, 0.01, 300, 900)
        .simulate(policy, memory_gb=30.0 if policy in FINETUNING else 25.0)
        .requests
    )
    assert book.preemptions[0] == 0
    assert book.preemptions.sum() > 0


def test_the_memory_view_adds_up_at_every_record(requests_of: Any, record_list: Any) -> None:
    """Rows are KV, lent or free; used and free tokens are the slots outside lent rows, the pinned one apart."""
    sink = record_list()
    crowd(requests_of, 50, 0.02, 1500, 300).simulate("hybrid", {}, sink, memory_gb=37.0)
    for record in sink.records:
        memory = record.view.memory
        assert memory.rows_total == memory.rows_kv + memory.rows_lent + memory.rows_free
        assert memory.used_tokens == record.view.kv_tokens
        slots = (memory.rows_total - memory.rows_lent) * memory.row_tokens
        assert memory.used_tokens + memory.free_tokens == slots - 1
        assert 0 <= memory.rows_reclaiming <= memory.rows_lent
        assert memory.free_but_unlendable_bytes >= 0


class TakesAll(StaticSplit):
    """Wants all rows for the job, whatever KV needs."""

    def plan(self, view: StepView) -> StepPlan:
        """As many rows as the job wants."""
        plan = super().plan(view)
        jobs = tuple(
            dataclasses.replace(planned, rows=job.rows_wanted)
            for planned, job in zip(plan.jobs, view.jobs, strict=True)
        )
        return dataclasses.replace(plan, jobs=jobs)


def test_a_greedy_plan_cannot_take_the_slots_of_the_next_tokens(requests_of: Any, policy_named: Any) -> None:
    """The last free row is not lent when the batch needs slots in it: the run goes on, with less for the job."""
    trace = requests_of([0.0], [86 * 1024 - 1], [50])
    for policy in ("static_split", policy_named(TakesAll)):
        outcome = trace.simulate(policy, memory_gb=40.0)
        assert outcome.requests.produced_tokens.tolist() == [50]


@pytest.mark.parametrize("prefill_gpus", [0, 1])
@pytest.mark.parametrize("policy", ["hybrid", "static_split", "inference_only"])
def test_every_gap_between_tokens_is_counted_once(policy: str, prefill_gpus: int, requests_of: Any) -> None:
    """ITL has n - 1 gaps a request, and they add up to the time from its first to its last token, preempted or not."""
    memory_gb = 25.0 if policy == "inference_only" else 30.0
    trace = crowd(requests_of, 60, 0.01, 300, 900)
    outcome = trace.simulate(policy, memory_gb=memory_gb, prefill_gpus=prefill_gpus)
    book = outcome.requests
    assert book.preemptions.sum() > 0
    found = request_latencies(book, token_gaps(outcome.steps))["itl_ms"]
    assert found["count"] == (book.output_tokens - 1).sum()
    spans_ms = (book.last_token_s - book.first_token_s).sum() * 1000.0
    assert found["mean"] * found["count"] == pytest.approx(spans_ms, rel=1e-9)
