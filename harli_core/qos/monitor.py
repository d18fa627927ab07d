"""What every predicting policy does around its choice: correct predictions by what was measured, and keep the guard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import sub

from harli_core.policy import PolicyContext
from harli_core.qos.guard import Guard
from harli_core.qos.residuals import ResidualRing
from harli_core.types import StepResult

WHOLE_CHIP = -1
"""The choice "decode on all SMs, nothing beside it"; other choices are indices into ``capabilities.splits``."""

LEARNING = 0.1
"""Weight of the latest units in how long they are taken to be on a split."""

ODDEST = 2.0
"""A ratio beyond this, or its inverse, is taken for this."""

ROUNDING_MS = 1e-9
"""Differences of clock times below this are none."""


class LatencyMonitor:
    """Corrected decode latencies, one residual ring a choice, units beside decode, and the guard."""

    def __init__(self, context: PolicyContext, quantile: float, window_steps: int = 256) -> None:
        """``quantile`` is that of the bound; the rings begin with the profile's own residuals."""
        self._predictor = context.predictor
        profile = context.predictor.profile
        self.guard = Guard(context.qos_ms)
        self._shared = [
            ResidualRing(profile.tail.colocated, quantile, window_steps) for _ in context.capabilities.splits
        ]
        self._alone = ResidualRing(profile.tail.solo, quantile, window_steps)
        self._unit_levels = [1.0] * len(context.capabilities.splits)
        self._choice = WHOLE_CHIP
        self._finetuning = False
        self._turn_ms = self._spent_ms = 0.0

    def ring(self, choice: int) -> ResidualRing:
        """The residuals of a choice."""
        return self._alone if choice == WHOLE_CHIP else self._shared[choice]

    @property
    def unit_levels(self) -> Sequence[float]:
        """How many times as long as predicted units take beside decode, a split each; 1 before any was measured."""
        return self._unit_levels

    def expect(
        self,
        choice: int,
        batch: int,
        kv_tokens: int,
        finetuning: bool,
        turn_ms: float = 0.0,
        spent_ms: float = 0.0,
    ) -> float:
        """Remember what the coming steps of ``choice`` are; returns the first one's corrected decode latency.

        Each begins with a turn of ``turn_ms``; of the first one ``spent_ms`` are gone before it.
        """
        self._choice = choice
        self._finetuning = finetuning
        self._turn_ms, self._spent_ms = turn_ms, spent_ms
        fixed_ms, token_ms = self._line(batch)
        return (fixed_ms + token_ms * kv_tokens) * self.ring(choice).centre

    def observe(self, result: StepResult) -> None:
        """Add the ratios of measured to predicted decode latency, and show the latencies to the guard.

        What a step took beyond decoding and its turn counts as decoding: a real host needs time for launches and results.
        Predictions are lines in the KV tokens, which grow by the batch in every step.
        """
        ratio = result.unit_ratio
        if ratio is not None and not math.isnan(ratio) and self._choice != WHOLE_CHIP:
            ratio = min(max(ratio, 1.0 / ODDEST), ODDEST)
            self._unit_levels[self._choice] += LEARNING * (ratio - self._unit_levels[self._choice])
        if not result.decode_ms:
            return
        fixed_ms, token_ms = self._line(result.batch)
        predicted_ms, growth_ms = fixed_ms + token_ms * result.kv_tokens, token_ms * result.batch
        spent_ms, self._spent_ms = self._spent_ms, 0.0
        planned_ms = self._turn_ms
        measured_ms: Sequence[float] = result.decode_ms
        if spent_ms or planned_ms or result.latency_ms != result.decode_ms:
            # Beyond decode and its real turn; beyond the longer of real and planned turn it is at most this.
            beyond_ms = map(sub, map(sub, result.latency_ms, result.decode_ms), result.turn_ms)
            if max(beyond_ms) > ROUNDING_MS:
                measured_ms = self._with_waiting(result, planned_ms, spent_ms)
        self.ring(self._choice).add([ms / (predicted_ms + growth_ms * step) for step, ms in enumerate(measured_ms)])
        self.guard.observe(result.latency_ms, self._finetuning)

    def _with_waiting(self, result: StepResult, planned_ms: float, spent_ms: float) -> Sequence[float]:
        """Decode latencies, and what each step took beyond that and its turn, be that the real or the planned one."""
        more_ms = [
            latency_ms - decode_ms - (turn_ms if turn_ms > planned_ms else planned_ms)
            for latency_ms, decode_ms, turn_ms in zip(result.latency_ms, result.decode_ms, result.turn_ms, strict=True)
        ]
        more_ms[0] -= spent_ms
        if max(more_ms) <= ROUNDING_MS:
            return result.decode_ms
        return [ms + max(0.0, more) for ms, more in zip(result.decode_ms, more_ms, strict=True)]

    def _line(self, batch: int) -> tuple[float, float]:
        lines = self._predictor.lines(batch)
        return lines.whole_chip if self._choice == WHOLE_CHIP else lines.colocated[self._choice]
