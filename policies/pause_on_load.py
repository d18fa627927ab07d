"""The operator's rule of thumb: finetune while the batch is small, stop when it is not."""

from __future__ import annotations

from harli_core.policy import PolicyContext, count_option
from harli_core.qos.first_job import first_job_plan
from harli_core.qos.roomy_hold import ANY_BATCH
from harli_core.qos.rows import rows_for
from harli_core.types import Hold, StepPlan, StepResult, StepView


class PauseOnLoad:
    """Shares the SMs half and half (nearest split) while fewer than ``threshold`` requests decode; else pauses."""

    serves = True
    finetunes = True

    def __init__(self, context: PolicyContext, threshold: int = 32) -> None:
        """``threshold`` is a batch size of one instance."""
        capabilities = context.capabilities
        self._context = context
        self._threshold = count_option("threshold", threshold, least=0)
        self._index = min(
            range(len(capabilities.splits)),
            key=lambda i: (abs(2 * capabilities.splits[i].decode_sms - capabilities.total_sms), i),
        )

    def plan(self, view: StepView) -> StepPlan:
        """Look at the batch only; memory follows the reservation as elsewhere."""
        context = self._context
        total_sms = context.capabilities.total_sms
        rows = [rows_for(job, view, context.reservation) for job in view.jobs]
        if view.batch == 0:
            return first_job_plan(view, rows, Hold(1, None), total_sms, total_sms)
        prediction = context.predictor.predict(view.batch, view.kv_tokens)
        if view.batch >= self._threshold:
            busy = Hold(64, None, (self._threshold, ANY_BATCH))
            return first_job_plan(view, rows, busy, total_sms, 0, 0.0, prediction.whole_chip_ms)
        split = context.capabilities.splits[self._index]
        predicted_ms = prediction.colocated_ms[self._index]
        calm = Hold(64, None, (1, self._threshold - 1))
        return first_job_plan(view, rows, calm, split.decode_sms, split.finetune_sms, 0.0, predicted_ms)

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""
