"""What every predicting policy does around its choice: correct predictions by what was measured, and keep the guard."""

from __future__ import annotations

from harli_core.policy import PolicyContext
from harli_core.predict.predictor import StepPrediction
from harli_core.qos.guard import Guard
from harli_core.qos.residuals import ResidualRing
from harli_core.types import StepResult

WHOLE_CHIP = -1
"""The choice "decode on all SMs, nothing beside it"; other choices are indices into ``capabilities.splits``."""


class LatencyMonitor:
    """Corrected decode latencies, one residual ring a choice, and the guard."""

    def __init__(self, context: PolicyContext, quantile: float, window_steps: int = 256) -> None:
        """``quantile`` is that of the bound; the rings begin with the profile's own residuals."""
        profile = context.predictor.profile
        self.guard = Guard(context.qos_ms)
        self._shared = [
            ResidualRing(profile.tail.colocated, quantile, window_steps) for _ in context.capabilities.splits
        ]
        self._alone = ResidualRing(profile.tail.solo, quantile, window_steps)
        self._choice = WHOLE_CHIP
        self._first_ms = 0.0
        self._growth_ms = 0.0
        self._finetuning = False

    def ring(self, choice: int) -> ResidualRing:
        """The residuals of a choice."""
        return self._alone if choice == WHOLE_CHIP else self._shared[choice]

    def expect(self, choice: int, first: StepPrediction, last: StepPrediction, steps: int, finetuning: bool) -> None:
        """Remember what the coming steps should take: predictions of the first and of step ``steps`` after it."""
        self._choice = choice
        self._first_ms = _predicted_ms(first, choice)
        self._growth_ms = (_predicted_ms(last, choice) - self._first_ms) / steps
        self._finetuning = finetuning

    def observe(self, result: StepResult) -> None:
        """Add the ratios of measured to predicted decode latency, and show the latencies to the guard."""
        if not result.decode_ms:
            return
        predicted_ms, growth_ms = self._first_ms, self._growth_ms
        self.ring(self._choice).add(
            [decode_ms / (predicted_ms + growth_ms * step) for step, decode_ms in enumerate(result.decode_ms)]
        )
        self.guard.observe(result.latency_ms, self._finetuning)


def _predicted_ms(prediction: StepPrediction, choice: int) -> float:
    return prediction.whole_chip_ms if choice == WHOLE_CHIP else prediction.colocated_ms[choice]
