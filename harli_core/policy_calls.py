"""The two calls into a policy; whatever goes wrong in them is one `PolicyError`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import cast

from harli_core.errors import PolicyError
from harli_core.policy import Policy
from harli_core.types import StepPlan, StepResult, StepView


def ask(policy: Policy, view: StepView) -> StepPlan:
    """The policy's plan for ``view``; raises `PolicyError` for an exception in it, or an answer that is no plan."""
    try:
        plan = cast("object", policy.plan(view))  # whatever it promised
    except Exception as error:
        raise _failure(policy, "plan()", view, fault_text(error, type(policy).__module__)) from error
    if not isinstance(plan, StepPlan):
        raise _failure(policy, "plan()", view, f"it returned {type(plan).__name__}, expected a StepPlan")
    return plan


def tell(policy: Policy, view: StepView, result: StepResult) -> None:
    """Show the policy the result of its plan for ``view``; raises `PolicyError` for an exception in it."""
    try:
        policy.observe(result)
    except Exception as error:
        raise _failure(policy, "observe()", view, fault_text(error, type(policy).__module__)) from error


def malformed(policy: Policy, view: StepView, error: Exception) -> PolicyError:
    """The error for a `StepPlan` with a field of another type than it should have."""
    return _failure(policy, "plan()", view, f"it returned a StepPlan with a field of the wrong type ({error})")


def fault_text(error: Exception, module: str) -> str:
    """``TypeError: what was wrong (file.py, line 12)`` on one line.

    The line is the innermost one in the file of ``module``, else the innermost one below the call; a call that failed
    before the first line of the callee has none.
    """
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own_file = getattr(sys.modules.get(module), "__file__", None)
    frames = [frame for frame in frames if frame.filename == own_file] or frames
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _failure(policy: Policy, call: str, view: StepView, fault: str) -> PolicyError:
    where = f"instance {view.instance}, step {view.step} (batch {view.batch})"
    return PolicyError(f"policy {type(policy).__name__} failed in {call} at {where}: {fault}")
