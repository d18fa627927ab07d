"""Whatever goes wrong inside a policy is one line that says where."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from harli_core.decision_log import DecisionRecord, replay
from harli_core.errors import PlanError, PolicyError
from harli_core.loop import DecisionLoop
from harli_core.types import Capabilities, Hold, JobPlan, MemoryView, Split, StepPlan, StepResult, StepView

CAPABILITIES = Capabilities("a GPU", 132, (Split(36, 96), Split(84, 48)))
MEMORY = MemoryView(1024, 1 << 27, 200, 2, 50, 148, 0, 800, 1000, 0)
VIEW = StepView(2, 17, 1.5, 3, 800, 0, 0, 0.0, MEMORY, ())
PLAN = StepPlan(132, (), Hold(4, None))
RESULT = StepResult(2, 17, 3, 800, (10.0,), (9.0,), (0.0,))


class Faulty:
    """Returns its answer, or raises it; the same for what it observes."""

    serves = True
    finetunes = True

    def __init__(self, answer: Any = PLAN, on_observe: Exception | None = None) -> None:
        """``answer`` may be anything."""
        self.answer, self.on_observe = answer, on_observe

    def plan(self, view: StepView) -> Any:
        """The answer, right or wrong."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def observe(self, result: StepResult) -> None:
        """Raise what was asked for."""
        if self.on_observe is not None:
            raise self.on_observe


def decide_and_settle(policy: Any) -> None:
    """One turn of the loop."""
    loop = DecisionLoop(policy, CAPABILITIES)
    loop.decide(VIEW)
    loop.settle(RESULT)


def fault_of(policy: Any) -> str:
    """The message of a loop around ``policy`` that decides and settles once."""
    with pytest.raises(PolicyError) as caught:
        decide_and_settle(policy)
    assert caught.value.exit_code == 4
    return str(caught.value)


def test_exception_in_plan() -> None:
    """Policy, instance, step, batch, the exception on one line, and the line of the policy's file."""
    message = fault_of(Faulty(TypeError("no\n  such thing")))
    start = "policy Faulty failed in plan() at instance 2, step 17 (batch 3): TypeError: no such thing (test_policy_calls.py"
    assert message.startswith(start)


def test_exception_in_observe() -> None:
    """Likewise; an exception without a text is named by its type."""
    message = fault_of(Faulty(on_observe=ZeroDivisionError()))
    assert "failed in observe() at instance 2, step 17 (batch 3): ZeroDivisionError (test_policy_calls.py" in message


def test_the_line_is_the_policys_own() -> None:
    """Where a library raises, the line that called it is what its author can mend."""

    class Careless(Faulty):
        def plan(self, view: StepView) -> Any:
            return json.loads("{")

    line = Careless.plan.__code__.co_firstlineno + 1
    assert fault_of(Careless()).endswith(f"(test_policy_calls.py, line {line})")


def test_call_that_does_not_fit() -> None:
    """A `plan` without its parameter fails before its first line: there is no line to name."""

    class Deaf(Faulty):
        def plan(self) -> Any:  # type: ignore[override]
            return PLAN

    assert fault_of(Deaf()).endswith("were given")


def test_plan_that_is_none() -> None:
    """A forgotten return is named as what it is."""
    assert fault_of(Faulty(None)).endswith("it returned NoneType, expected a StepPlan")


@pytest.mark.parametrize("wrong", [{"hold": None}, {"jobs": None}, {"jobs": (3,)}, {"decode_sms": [132]}])
def test_fields_of_the_wrong_type(wrong: dict[str, Any]) -> None:
    """A `StepPlan` with a field that is something else is the policy's fault too, not a traceback."""
    assert "a StepPlan with a field of the wrong type" in fault_of(Faulty(dataclasses.replace(PLAN, **wrong)))


def test_impossible_plans_stay_plan_errors() -> None:
    """What is well formed but cannot be done keeps its own error and exit code."""
    plan = dataclasses.replace(PLAN, jobs=(JobPlan("job-9", 0, 0.0, 0),))
    with pytest.raises(PlanError, match="no finetuning job 'job-9'"):
        DecisionLoop(Faulty(plan), CAPABILITIES).decide(VIEW)


@pytest.mark.parametrize("policy", [Faulty(KeyError("x")), Faulty(None), Faulty(on_observe=KeyError("x"))])
def test_replay_reports_the_same(policy: Faulty) -> None:
    """A policy that fails while a log is replayed is told in the same words."""
    with pytest.raises(PolicyError, match=r"policy Faulty failed in .* at instance 2, step 17 \(batch 3\)"):
        replay([DecisionRecord(VIEW, PLAN, (RESULT,))], {2: policy})
