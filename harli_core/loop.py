"""The loop that both backends drive: view -> plan -> (the backend acts) -> result -> observe, with the log beside it."""

from __future__ import annotations

import math

from harli_core.decision_log import DecisionRecord, DecisionSink
from harli_core.errors import PlanError
from harli_core.policy import Policy
from harli_core.policy_calls import ask, malformed, tell
from harli_core.types import Capabilities, StepPlan, StepResult, StepView


class DecisionLoop:
    """One policy, one decode instance. Never sleeps, never launches, never reads a clock."""

    def __init__(self, policy: Policy, capabilities: Capabilities, sink: DecisionSink | None = None) -> None:
        """``sink`` receives every record; `None` keeps none."""
        self._policy = policy
        self._sink = sink
        self._total_sms = capabilities.total_sms
        self._beside = {(split.decode_sms, split.finetune_sms) for split in capabilities.splits}
        self._decode_sms = {split.decode_sms for split in capabilities.splits} | {capabilities.total_sms}
        self._finetune_sms = {split.finetune_sms for split in capabilities.splits} | {capabilities.total_sms}
        self._open: tuple[StepView, StepPlan] | None = None
        self._results: list[StepResult] = []

    def decide(self, view: StepView) -> StepPlan:
        """Ask the policy and check its answer; the record of the last plan goes to the log.

        Raises `PlanError` for what this hardware cannot do, `PolicyError` where the policy fails.
        """
        self.finish()
        plan = ask(self._policy, view)
        self._check(view, plan)
        self._open = (view, plan)
        return plan

    def settle(self, result: StepResult) -> None:
        """Report what steps under the last plan took; raises `PolicyError` where the policy fails."""
        if self._open is None:
            raise PlanError("a result was reported without a plan before it")
        tell(self._policy, self._open[0], result)
        if self._sink is not None:
            self._results.append(result)

    def finish(self) -> None:
        """Nothing more comes of the last plan: its record goes to the log."""
        if self._open is None:
            return
        if self._sink is not None:
            self._sink.write(DecisionRecord(*self._open, tuple(self._results)))
            self._results = []
        self._open = None

    def _check(self, view: StepView, plan: StepPlan) -> None:
        try:
            fault = self._fault(view, plan)
        except (AttributeError, TypeError) as error:
            raise malformed(self._policy, view, error) from error
        if fault is not None:
            raise PlanError(f"instance {view.instance}, step {view.step}: {fault}")

    def _fault(self, view: StepView, plan: StepPlan) -> str | None:
        """What is wrong with ``plan``, and what there is instead."""
        if plan.decode_sms not in self._decode_sms:
            return f"no partition of {plan.decode_sms} SMs for decode; there are {sorted(self._decode_sms)}"
        if plan.hold.steps < 1:
            return f"a plan holds for at least one step, not {plan.hold.steps}"
        batches = plan.hold.batches
        if batches is not None and not batches[0] <= view.batch <= batches[1]:
            return f"the plan holds for batches of {batches[0]} to {batches[1]}, the batch is {view.batch}"
        sms = 0
        known = [job.job_id for job in view.jobs]
        for job in plan.jobs:
            if job.job_id not in known:
                return f"no finetuning job {job.job_id!r} here; there are {sorted(known)}"
            if not 0.0 <= job.turn_ms < math.inf or job.rows < 0:
                return f"job {job.job_id!r} has turn {job.turn_ms} ms and {job.rows} rows; both are >= 0"
            sms += job.sms
        if sms == 0:
            return None
        if view.batch == 0:
            if sms not in self._finetune_sms:
                return f"no partition of {sms} SMs for finetuning; there are {sorted(self._finetune_sms)}"
        elif (plan.decode_sms, sms) not in self._beside:
            splits = ", ".join(f"{a}+{b}" for a, b in sorted(self._beside))
            return f"{plan.decode_sms}+{sms} is no split of this GPU ({splits})"
        return None
