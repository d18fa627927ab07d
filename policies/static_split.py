"""StaticMode (paper section 8): a fixed share of SMs and of memory to inference, the rest to finetuning."""

from __future__ import annotations

from harli_core.policy import PolicyContext, option
from harli_core.qos.first_job import first_job_plan
from harli_core.qos.roomy_hold import ANY_BATCH
from harli_core.types import Hold, StepPlan, StepResult, StepView


class StaticSplit:
    """60 % of SMs and memory to inference, 40 % to finetuning, on the nearest split that exists; never adapts."""

    serves = True
    finetunes = True

    def __init__(self, context: PolicyContext, inference_share: float = 0.6) -> None:
        """``inference_share`` of the SMs and of the grid's rows belongs to inference."""
        capabilities = context.capabilities
        self._share = option("inference_share", inference_share, 0.0, 1.0)
        wanted_sms = self._share * capabilities.total_sms
        index = min(
            range(len(capabilities.splits)), key=lambda i: (abs(capabilities.splits[i].decode_sms - wanted_sms), i)
        )
        self._index = index
        self._split = capabilities.splits[index]
        self._predictor = context.predictor

    def plan(self, view: StepView) -> StepPlan:
        """The same split and rows at every step, idle or not."""
        rows_left = round((1.0 - self._share) * view.memory.rows_total)
        rows: list[int] = []
        for job in view.jobs:
            rows.append(min(job.rows_wanted, rows_left))
            rows_left -= rows[-1]
        predicted_ms = None
        if view.batch:
            predicted_ms = self._predictor.predict(view.batch, view.kv_tokens).colocated_ms[self._index]
        hold = Hold(256, None, (0, ANY_BATCH))
        return first_job_plan(view, rows, hold, self._split.decode_sms, self._split.finetune_sms, 0.0, predicted_ms)

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""
