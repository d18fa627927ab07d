"""Plans that give one job at a time what finetuning gets: the first in the view; the others keep their memory and wait."""

from __future__ import annotations

from collections.abc import Sequence

from harli_core.types import Hold, JobPlan, StepPlan, StepView


def first_job_plan(
    view: StepView,
    rows: Sequence[int],
    hold: Hold,
    decode_sms: int,
    finetune_sms: int,
    turn_ms: float = 0.0,
    predicted_ms: float | None = None,
) -> StepPlan:
    """A plan for ``view`` in which the first job has ``finetune_sms`` and ``turn_ms``; ``rows`` is one entry a job."""
    jobs = tuple(
        JobPlan(job.job_id, finetune_sms, turn_ms, rows[0]) if index == 0 else JobPlan(job.job_id, 0, 0.0, rows[index])
        for index, job in enumerate(view.jobs)
    )
    return StepPlan(decode_sms, jobs, hold, predicted_ms)
