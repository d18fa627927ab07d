"""What every policy owes to a backend, as tests that a policy of your own inherits.

In a test file beside the policy (pytest and hypothesis must be installed)::

    from harli_cli.policy_contract import PolicyContract

    class TestMine(PolicyContract):
        policy = "mine:Mine"
        options = {}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harli_cli.package_data import shipped_profile
from harli_core.loop import DecisionLoop
from harli_core.memory.reservation import Reservation
from harli_core.policy import Policy, PolicyContext
from harli_core.predict.predictor import StepPredictor
from harli_core.types import JobView, MemoryView, StepPlan, StepResult, StepView
from policies import find_policy

TOTAL_SMS = 132
FINETUNE_SMS = (112, 96, 80, 64, 48, 32, 16)


@st.composite
def job_views(draw: st.DrawFn, job_id: str) -> JobView:
    """A job that holds anything from no rows to all it wants, between units or inside one."""
    floor = draw(st.integers(1, 60))
    wanted = draw(st.integers(floor, 140))
    in_flight = draw(st.booleans())
    return JobView(
        job_id=job_id,
        next_unit=draw(st.sampled_from(["forward", "head_loss", "backward", "optimizer"])),
        unit_tokens=draw(st.sampled_from([1024, 2048])),
        rows_held=draw(st.integers(0, wanted)),
        rows_wanted=wanted,
        rows_floor=floor,
        window_layers=draw(st.integers(0, 32)),
        layers=32,
        in_flight_sms=draw(st.sampled_from([*FINETUNE_SMS, TOTAL_SMS])) if in_flight else 0,
        in_flight_ms=draw(st.floats(0.001, 20.0)) if in_flight else 0.0,
    )


@st.composite
def step_views(draw: st.DrawFn, jobs: st.SearchStrategy[int], step: int = 0) -> StepView:
    """Any view: idle or busy, little memory or much, waiting requests or none, time gone already or not."""
    batch = draw(st.integers(0, 400))
    hosted = tuple(draw(job_views(f"job-{index}")) for index in range(draw(jobs)))
    kv_tokens = draw(st.integers(batch, batch * 4000)) if batch else 0
    rows_kv = kv_tokens // 1024 + draw(st.integers(1, 50))
    rows_lent = sum(job.rows_held for job in hosted)
    rows_free = draw(st.integers(0, 800))
    waiting = draw(st.integers(0, 20))
    memory = MemoryView(
        row_tokens=1024,
        row_bytes=1 << 27,
        rows_total=rows_kv + rows_lent + rows_free,
        rows_kv=rows_kv,
        rows_lent=rows_lent,
        rows_free=rows_free,
        rows_reclaiming=draw(st.integers(0, 5)),
        used_tokens=kv_tokens,
        free_tokens=(rows_kv + rows_free) * 1024 - kv_tokens,
        free_but_unlendable_bytes=(rows_kv * 1024 - kv_tokens) << 17,
    )
    return StepView(
        instance=0,
        step=step,
        time_s=step * 0.01,
        batch=batch,
        kv_tokens=kv_tokens,
        waiting=waiting,
        waiting_tokens=waiting * draw(st.integers(1, 4000)),
        elapsed_ms=draw(st.one_of(st.just(0.0), st.floats(0.0, 60.0))) if batch else 0.0,
        memory=memory,
        jobs=hosted,
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    """Any outcome of a plan: no steps, fast ones, slow ones, with turns or without."""
    steps = draw(st.lists(st.tuples(st.floats(1e-3, 1e4), st.floats(0.0, 100.0)), max_size=6)) * draw(
        st.integers(1, 12)
    )
    decode_ms, turn_ms = tuple(decode for decode, _ in steps), tuple(turn for _, turn in steps)
    latency_ms = tuple(decode + turn for decode, turn in steps)
    return StepResult(0, 0, 8, 8000, latency_ms, decode_ms, turn_ms)


VIEWS = step_views(st.integers(0, 1))
BUSY = VIEWS.filter(lambda view: view.batch > 0)
HISTORIES = st.lists(st.tuples(VIEWS, results()), min_size=1, max_size=4)
TARGETS_MS = st.sampled_from([5.0, 8.0, 15.0, 40.0, 1000.0])
MANY = settings(max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.differing_executors])


def live(policy: Policy, context: PolicyContext, history: list[tuple[StepView, StepResult]]) -> list[StepPlan]:
    """The plans of a fresh policy through ``history``, checked by the loop; idle time brings no steps."""
    loop = DecisionLoop(policy, context.capabilities)
    plans: list[StepPlan] = []
    for any_view, result in history:
        view = shown(policy, any_view)
        plans.append(loop.decide(view))
        loop.settle(result if view.batch else StepResult(0, 0, 0, 0, (), (), (), 0.5))
    return plans


def shown(policy: Policy, view: StepView) -> StepView:
    """``view`` as a backend could show it: jobs only where the policy finetunes, requests only where it serves."""
    jobs = view.jobs if policy.finetunes else ()
    if policy.serves:
        return dataclasses.replace(view, jobs=jobs)
    return dataclasses.replace(view, jobs=jobs, batch=0, kv_tokens=0, waiting=0, waiting_tokens=0, elapsed_ms=0.0)


def two_contexts(qos_ms: float) -> list[PolicyContext]:
    """The contexts of two instances, which may have different roles."""
    profile = shipped_profile("h200", "llama3-8b", "llama3-8b")
    reservation = Reservation.measured(1024, 30.0, 4.7, 8192)
    predictor = StepPredictor(profile)
    return [PolicyContext(index, 2, qos_ms, profile.capabilities, predictor, reservation) for index in range(2)]


def share_of_rows(policy: Policy, view: StepView) -> int:
    """Rows under which even the floor may fall: half of an equal share of 40 % where memory is split for good."""
    if type(policy).__name__ == "StaticSplit":
        return 0 if len(view.jobs) > 1 else round(0.4 * view.memory.rows_total)
    return view.memory.rows_total


class PolicyContract:
    """Inherit, and name the policy as ``--policy`` does."""

    policy: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    def make(self, context: PolicyContext) -> Policy:
        """A fresh object of the policy."""
        return find_policy(self.policy)(context, **self.options)

    @MANY
    @given(history=HISTORIES, qos_ms=TARGETS_MS)
    def test_plans_are_possible(self, history: list[tuple[StepView, StepResult]], qos_ms: float) -> None:
        """Whatever is shown and observed, the loop accepts the plan: partitions that exist, finite turns, a hold."""
        for context in two_contexts(qos_ms):
            for plan in live(self.make(context), context, history):
                assert all(math.isfinite(job.turn_ms) and job.turn_ms >= 0.0 for job in plan.jobs)
                assert plan.hold.steps >= 1
                assert plan.hold.max_step_ms is None or plan.hold.max_step_ms > 0.0

    @MANY
    @given(history=HISTORIES, qos_ms=TARGETS_MS)
    def test_equal_views_give_equal_plans(self, history: list[tuple[StepView, StepResult]], qos_ms: float) -> None:
        """Two fresh objects that see the same do the same: no clock, no chance, no shared state."""
        for context in two_contexts(qos_ms):
            assert live(self.make(context), context, history) == live(self.make(context), context, history)

    @MANY
    @given(view=step_views(st.integers(1, 2)), qos_ms=TARGETS_MS)
    def test_jobs_stay_between_floor_and_wish(self, view: StepView, qos_ms: float) -> None:
        """Every job of the view is in the plan, once, with no more rows than it wants, nor fewer than it can run with.

        One exception: where a policy has a fixed share of memory, a job may get less than its floor.
        """
        for context in two_contexts(qos_ms):
            policy = self.make(context)
            if not policy.finetunes:
                continue
            plan = DecisionLoop(policy, context.capabilities).decide(shown(policy, view))
            assert [job.job_id for job in plan.jobs] == [job.job_id for job in view.jobs]
            for job, planned in zip(view.jobs, plan.jobs, strict=True):
                assert 0 <= planned.rows <= job.rows_wanted
                assert planned.rows >= min(job.rows_floor, share_of_rows(policy, view))

    @MANY
    @given(view=step_views(st.integers(0, 1)), qos_ms=TARGETS_MS)
    def test_predictions_are_of_steps(self, view: StepView, qos_ms: float) -> None:
        """An idle instance has no step to predict; else a prediction is positive and finite."""
        for context in two_contexts(qos_ms):
            policy = self.make(context)
            seen = shown(policy, view)
            plan = policy.plan(seen)
            if seen.batch == 0:
                assert plan.predicted_ms is None
            else:
                assert plan.predicted_ms is None or 0.0 < plan.predicted_ms < math.inf

    @MANY
    @given(outcomes=st.lists(results(), max_size=4), view=BUSY)
    def test_any_result_can_be_observed(self, outcomes: list[StepResult], view: StepView) -> None:
        """Results of any size after one plan, however far from the prediction; and planning goes on afterwards."""
        for context in two_contexts(40.0):
            policy = self.make(context)
            seen = shown(policy, view)
            policy.plan(seen)
            for outcome in outcomes:
                policy.observe(outcome)
            assert DecisionLoop(policy, context.capabilities).decide(seen).hold.steps >= 1

    def test_roles_are_known_before_the_first_step(self) -> None:
        """Each instance serves or finetunes or both, and at least one of two serves."""
        policies = [self.make(context) for context in two_contexts(40.0)]
        assert all(isinstance(policy.serves, bool) and isinstance(policy.finetunes, bool) for policy in policies)
        assert all(policy.serves or policy.finetunes for policy in policies)
        assert any(policy.serves for policy in policies)
