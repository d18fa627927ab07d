"""Advancing many steps with one event gives what stepping one by one gives, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sim.simulation import SimOutcome
from harli_core.records import SPAN_FIELDS
from harli_core.types import Hold, StepPlan, StepView
from policies.hybrid import Hybrid

POLICIES = {
    "harli": {},
    "hybrid": {},
    "static_split": {},
    "pause_on_load": {"threshold": 3},
    "inference_only": {},
    "separate": {"serving_gpus": 1},
}


def columns_of(outcome: SimOutcome) -> dict[str, bytes]:
    """Every column of requests and steps, as bytes."""
    book, steps = outcome.requests, outcome.steps
    columns = {
        "arrival": book.arrival_s,
        "first token": book.first_token_s,
        "last token": book.last_token_s,
        "produced": book.produced_tokens,
        "instance": book.instance,
        "preemptions": book.preemptions,
        "state": book.state,
        "latency": steps.latency_ms,
        "decode": steps.decode_ms,
        "turn": steps.turn_ms,
        "gaps": steps.join_gap_ms,
        "span": steps.steps,
        **{name: steps.span_column(name) for name, _ in SPAN_FIELDS},
    }
    return {name: column.tobytes() for name, column in columns.items()}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6, deadline=None)
@given(
    count=st.integers(1, 60),
    rate_rps=st.sampled_from([2.0, 12.0, 60.0]),
    seed=st.integers(0, 10_000),
    config=st.sampled_from(
        [
            {},
            {"gpus": 2, "prefill_gpus": 1},
            {"qos_ms": 8.0, "prefill_gpus": 1},
            {"memory_gb": 29.0, "qos_ms": 20.0},
            {"memory_gb": 31.0, "lending": "remap", "gpus": 2, "router": "round_robin"},
            {"horizon_s": 3.21, "share_weights": True},
        ]
    ),
)
def test_coalesced_steps_equal_exact_ones(
    policy: str, conversation: Any, count: int, rate_rps: float, seed: int, config: dict[str, Any]
) -> None:
    """Random traces under every policy, with room and without, with prefill, turns, swaps and an early end."""
    trace = conversation(count, rate_rps, seed)
    config = {"gpus": 2, **config} if policy == "separate" else config
    coalesced, exact = (
        columns_of(trace.simulate(policy, POLICIES[policy], exact_steps=exact_steps, **config))
        for exact_steps in (False, True)
    )
    assert [name for name in exact if exact[name] != coalesced[name]] == []


class Impatient(Hybrid):
    """Like `hybrid`, but its plans end when a request joins or leaves."""

    def plan(self, view: StepView) -> StepPlan:
        """The same plan with a narrower hold."""
        plan = super().plan(view)
        hold = Hold(plan.hold.steps, plan.hold.max_step_ms)
        return StepPlan(plan.decode_sms, plan.jobs, hold, plan.predicted_ms)


def test_a_roomy_hold_saves_plans(conversation: Any, policy_named: Any, record_list: Any) -> None:
    """Plans that outlive joins and leaves are far fewer, and all tokens are there either way."""
    trace = conversation(80, 12.0)
    counts = []
    for policy in ("hybrid", policy_named(Impatient)):
        sink = record_list()
        outcome = trace.simulate(policy, {}, sink)
        counts.append(sum(record.view.batch > 0 for record in sink.records))
        assert outcome.requests.produced_tokens.sum() == sum(trace.output_tokens)
    assert counts[0] < 0.6 * counts[1]
