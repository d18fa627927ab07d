"""The loop checks every plan against the hardware, and keeps view, plan and result together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harli_core.decision_log import DecisionRecord
from harli_core.errors import PlanError
from harli_core.loop import DecisionLoop
from harli_core.types import (
    Capabilities,
    Hold,
    JobPlan,
    JobView,
    MemoryView,
    Split,
    StepPlan,
    StepResult,
    StepView,
)

CAPABILITIES = Capabilities("a GPU", 132, (Split(36, 96), Split(84, 48)))
JOB = JobView("job-0", "forward", 1024, 50, 100, 20, 8, 32, 0, 0.0)
VIEW = StepView(3, 7, 1.5, 4, 800, 0, 0, 0.0, MemoryView(1024, 1 << 27, 200, 2, 50, 148, 0, 800, 1000, 0), (JOB,))
IDLE = dataclasses.replace(VIEW, batch=0, kv_tokens=0)
RESULT = StepResult(3, 7, 4, 800, (10.0,), (9.0,), (0.0,))


class Scripted:
    """Answers with the plan it was given, and remembers what it was told."""

    serves = True
    finetunes = True

    def __init__(self, plan: StepPlan) -> None:
        """``plan`` is the answer to everything."""
        self.answer = plan
        self.observed: list[StepResult] = []

    def plan(self, view: StepView) -> StepPlan:
        """The scripted plan."""
        return self.answer

    def observe(self, result: StepResult) -> None:
        """Remember."""
        self.observed.append(result)


def plan_of(
    decode_sms: int = 84, sms: int = 48, steps: int = 4, batches: tuple[int, int] | None = None, **job: Any
) -> StepPlan:
    """A plan for the one job of `VIEW`, good unless told otherwise."""
    fields = {"job_id": "job-0", "sms": sms, "turn_ms": 2.0, "rows": 50, **job}
    return StepPlan(decode_sms, (JobPlan(**fields),), Hold(steps, None, batches))


def decide(plan: StepPlan, view: StepView = VIEW) -> StepPlan:
    """What the loop gives for a scripted plan."""
    return DecisionLoop(Scripted(plan), CAPABILITIES).decide(view)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(84, 48),
        plan_of(36, 96),
        plan_of(132, 0),
        plan_of(84, 0),
        plan_of(turn_ms=0.0, rows=0),
        StepPlan(132, (), Hold(1, 40.0)),
    ],
)
def test_possible_plans_pass_unchanged(plan: StepPlan) -> None:
    """A split that exists, decode alone on any of its partitions, and plans without a job."""
    assert decide(plan) is plan


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(decode_sms=60), r"no partition of 60 SMs for decode; there are \[36, 84, 132\]"),
        (plan_of(decode_sms=0, sms=0), "no partition of 0 SMs for decode"),
        (plan_of(steps=0), "holds for at least one step, not 0"),
        (plan_of(job_id="job-9"), r"no finetuning job 'job-9' here; there are \['job-0'\]"),
        (plan_of(turn_ms=-1.0), "turn -1.0 ms and 50 rows; both are >= 0"),
        (plan_of(turn_ms=float("nan")), "turn nan ms"),
        (plan_of(turn_ms=float("inf")), "turn inf ms"),
        (plan_of(rows=-1), "turn 2.0 ms and -1 rows"),
        (plan_of(84, 96), r"84\+96 is no split of this GPU \(36\+96, 84\+48\)"),
        (plan_of(132, 48), r"132\+48 is no split of this GPU"),
        (plan_of(84, 132), r"84\+132 is no split of this GPU"),
    ],
)
def test_impossible_plans_are_refused(plan: StepPlan, message: str) -> None:
    """Each check has an error that says instance, step, what was wrong and what there is."""
    with pytest.raises(PlanError, match=f"instance 3, step 7: .*{message}"):
        decide(plan)


@pytest.mark.parametrize("sms", [48, 96, 132, 0])
def test_idle_finetuning_may_have_any_partition(sms: int) -> None:
    """With an empty batch finetuning runs on its side of any split, or on the whole chip."""
    assert decide(plan_of(132, sms), IDLE).jobs[0].sms == sms


def test_idle_finetuning_needs_a_partition_too() -> None:
    """With an empty batch 84 SMs, a partition for decode only, are no partition for finetuning."""
    with pytest.raises(PlanError, match=r"no partition of 84 SMs for finetuning; there are \[48, 96, 132\]"):
        decide(plan_of(132, 84), IDLE)


def test_two_jobs_share_one_side_of_a_split() -> None:
    """What counts beside decode is the sum over jobs: two on 48 SMs each need a split with 96."""
    view = dataclasses.replace(VIEW, jobs=(JOB, dataclasses.replace(JOB, job_id="job-1")))
    both = (JobPlan("job-0", 48, 0.0, 10), JobPlan("job-1", 48, 0.0, 10))
    assert decide(StepPlan(36, both, Hold(1, None)), view).jobs == both
    with pytest.raises(PlanError, match=r"84\+96"):
        decide(StepPlan(84, both, Hold(1, None)), view)


def test_result_reaches_policy_and_log(record_list: Any) -> None:
    """`settle` shows each result to the policy; the next plan, or the end, writes one record of all of them."""
    policy, sink = Scripted(plan_of()), record_list()
    loop = DecisionLoop(policy, CAPABILITIES, sink)
    later = dataclasses.replace(RESULT, first_step=RESULT.first_step + len(RESULT.latency_ms))
    plan = loop.decide(VIEW)
    loop.settle(RESULT)
    loop.settle(later)
    assert policy.observed == [RESULT, later]
    assert sink.records == []
    loop.decide(VIEW)
    assert sink.records == [DecisionRecord(VIEW, plan, (RESULT, later))]
    loop.finish()
    loop.finish()
    assert sink.records[1:] == [DecisionRecord(VIEW, plan, ())]


def test_result_without_a_plan_is_refused(record_list: Any) -> None:
    """Before the first plan and after the end there is nothing to settle."""
    loop = DecisionLoop(Scripted(plan_of()), CAPABILITIES, record_list())
    with pytest.raises(PlanError, match="without a plan"):
        loop.settle(RESULT)
    loop.decide(VIEW)
    loop.settle(RESULT)
    loop.finish()
    with pytest.raises(PlanError, match="without a plan"):
        loop.settle(RESULT)


def test_a_hold_must_allow_the_batch_that_it_is_for() -> None:
    """A plan for other batches than the one there is makes no sense; the bounds themselves are allowed."""
    for batches in ((1, VIEW.batch), (VIEW.batch, 900)):
        assert decide(plan_of(batches=batches)).hold.batches == batches
    for batches in ((VIEW.batch + 1, 900), (1, VIEW.batch - 1)):
        with pytest.raises(PlanError, match=rf"holds for batches of {batches[0]} to {batches[1]}, the batch is"):
            decide(plan_of(batches=batches))


def test_a_refused_plan_is_not_logged(record_list: Any) -> None:
    """A plan that cannot be carried out leaves no record and cannot be settled."""
    policy, sink = Scripted(plan_of(decode_sms=60)), record_list()
    loop = DecisionLoop(policy, CAPABILITIES, sink)
    with pytest.raises(PlanError, match="no partition"):
        loop.decide(VIEW)
    with pytest.raises(PlanError, match="without a plan"):
        loop.settle(RESULT)
    assert (policy.observed, sink.records) == ([], [])
