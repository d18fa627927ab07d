"""No finetuning at all: what decode does when it has the GPU to itself."""

from __future__ import annotations

from harli_core.policy import PolicyContext
from harli_core.qos.roomy_hold import ANY_BATCH
from harli_core.types import Hold, StepPlan, StepResult, StepView


class InferenceOnly:
    """Decode on the whole chip; the instance hosts no job and lends no memory."""

    serves = True
    finetunes = False

    def __init__(self, context: PolicyContext) -> None:
        """There is nothing to set."""
        self._context = context

    def plan(self, view: StepView) -> StepPlan:
        """The same at every step."""
        predicted_ms = None
        if view.batch:
            predicted_ms = self._context.predictor.predict(view.batch, view.kv_tokens).whole_chip_ms
        return StepPlan(self._context.capabilities.total_sms, (), Hold(256, None, (0, ANY_BATCH)), predicted_ms)

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""
