"""SeparateMode (paper section 8): some GPUs serve, the others finetune at full speed."""

from __future__ import annotations

from harli_core.errors import ConfigError
from harli_core.policy import PolicyContext, count_option
from harli_core.qos.first_job import first_job_plan
from harli_core.qos.roomy_hold import ANY_BATCH
from harli_core.types import Hold, StepPlan, StepResult, StepView


class Separate:
    """The first ``serving_gpus`` instances decode on the whole chip, the rest finetune on the whole chip."""

    def __init__(self, context: PolicyContext, serving_gpus: int) -> None:
        """``serving_gpus`` between 1 and the number of GPUs (else `ConfigError`)."""
        serving = count_option("serving_gpus", serving_gpus)
        if not 1 <= serving <= context.gpus:
            raise ConfigError(f"separate: serving_gpus must be 1 .. {context.gpus}, not {serving_gpus}")
        self.serves = context.instance < serving
        self.finetunes = not self.serves
        self._context = context

    def plan(self, view: StepView) -> StepPlan:
        """The whole chip to the one task that this GPU has."""
        total_sms = self._context.capabilities.total_sms
        if self.finetunes:
            rows = [job.rows_wanted for job in view.jobs]
            return first_job_plan(view, rows, Hold(1, None), total_sms, total_sms)
        predicted_ms = None
        if view.batch:
            predicted_ms = self._context.predictor.predict(view.batch, view.kv_tokens).whole_chip_ms
        return StepPlan(total_sms, (), Hold(256, None, (0, ANY_BATCH)), predicted_ms)

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""
