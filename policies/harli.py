"""The paper's policy: at each decode step the split whose predicted latency is closest to the target from below."""

from __future__ import annotations

from harli_core.policy import PolicyContext, count_option, option
from harli_core.qos.first_job import first_job_plan
from harli_core.qos.monitor import WHOLE_CHIP, LatencyMonitor
from harli_core.qos.pacing import spent_ms
from harli_core.qos.roomy_hold import RoomyHold
from harli_core.qos.rows import rows_for
from harli_core.qos.split_choice import closest_below
from harli_core.types import Hold, StepPlan, StepResult, StepView


class Harli:
    """Shares SMs by prediction (paper section 6), corrected online; no turns.

    ``hold_steps`` bounds how long one answer is kept while the batch changes little; predictions are for the heaviest step
    that the hold allows.
    A finer split (more SMs for decode) is taken at once, a coarser one only when it fits with ``hysteresis`` to spare.
    """

    serves = True
    finetunes = True

    def __init__(self, context: PolicyContext, hold_steps: int = 256, hysteresis: float = 0.03) -> None:
        """Options keep their defaults unless the user sets them."""
        self._context = context
        self._hold_steps = count_option("hold_steps", hold_steps)
        self._hysteresis = option("hysteresis", hysteresis, 0.0, 0.5)
        self._monitor = LatencyMonitor(context, quantile=1.0)
        self._last: int | None = None

    def plan(self, view: StepView) -> StepPlan:
        """Choose a split, or pause finetuning when none keeps the target."""
        capabilities = self._context.capabilities
        rows = tuple(rows_for(job, view, self._context.reservation) for job in view.jobs)
        if view.batch == 0:
            return first_job_plan(view, rows, Hold(1, None), capabilities.total_sms, capabilities.total_sms)
        hold, choice = self._held_choice(view)
        if choice is None:
            predicted_ms = self._monitor.expect(WHOLE_CHIP, view.batch, view.kv_tokens, finetuning=False)
            return first_job_plan(view, rows, hold, capabilities.total_sms, 0, 0.0, predicted_ms)
        split = capabilities.splits[choice]
        gone_ms = spent_ms(view, capabilities.total_sms - split.decode_sms)
        predicted_ms = self._monitor.expect(choice, view.batch, view.kv_tokens, finetuning=True, spent_ms=gone_ms)
        return first_job_plan(view, rows, hold, split.decode_sms, split.finetune_sms, 0.0, predicted_ms)

    def observe(self, result: StepResult) -> None:
        """Feed the residuals and the guard."""
        self._monitor.observe(result)

    def _held_choice(self, view: StepView) -> tuple[Hold, int | None]:
        """A split for a while in which requests may join and leave, or for just this batch if none fits."""
        steps, guard = self._hold_steps, self._monitor.guard
        if view.jobs and not guard.paused:
            graph_batches, qos_ms = self._context.predictor.profile.graph_batches, self._context.qos_ms
            room = RoomyHold.of(view, steps, qos_ms, graph_batches)
            choice = self._choose(room)
            if choice is None:
                room = RoomyHold.exact(view, steps, qos_ms)
                choice = self._choose(room)
            if choice is not None:
                return room.hold, choice
        return Hold(min(steps, guard.paused_steps or steps), None), None

    def _choose(self, room: RoomyHold) -> int | None:
        colocated_ms = self._context.predictor.predict(room.batch, room.kv_tokens).colocated_ms
        corrected = [latency_ms * self._monitor.ring(choice).centre for choice, latency_ms in enumerate(colocated_ms)]
        choice = closest_below(corrected, self._context.qos_ms)
        if choice is not None and self._last is not None and corrected[choice] > corrected[self._last]:
            easier = closest_below(corrected, self._context.qos_ms * (1.0 - self._hysteresis))
            if corrected[self._last] <= self._context.qos_ms:
                choice = self._last if easier is None or corrected[easier] < corrected[self._last] else easier
        if choice is not None:
            self._last = choice
        return choice
