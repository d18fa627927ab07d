"""Ours: sharing and taking turns, whichever mix is predicted to finetune fastest within the latency target."""

from __future__ import annotations

from harli_core.policy import PolicyContext
from harli_core.qos.first_job import first_job_plan
from harli_core.qos.monitor import WHOLE_CHIP, LatencyMonitor
from harli_core.qos.pacing import Pace, pace
from harli_core.qos.rows import rows_for
from harli_core.types import Hold, JobView, StepPlan, StepResult, StepView


class Hybrid:
    """Maximises predicted finetune work subject to a quantile of predicted step latency staying under the target.

    While requests wait for memory finetuning stands back: slower steps would keep the batch's memory for longer, and
    the queue would never drain (batch = rate x step latency).

    ``margin`` of the target is kept back for what no prediction covers (units that overrun, switches), ``quantile`` is
    that of the residuals, ``hold_steps`` how long an answer is kept while nothing changes, and a different choice must
    be better by ``hysteresis`` to replace the last one.
    """

    serves = True
    finetunes = True

    def __init__(
        self,
        context: PolicyContext,
        margin: float = 0.02,
        quantile: float = 0.995,
        hold_steps: int = 16,
        hysteresis: float = 0.02,
    ) -> None:
        """Options keep their defaults unless the user sets them."""
        self._context = context
        self._target_ms = context.qos_ms * (1.0 - float(margin))
        self._hold_steps = int(hold_steps)
        self._hysteresis = float(hysteresis)
        self._monitor = LatencyMonitor(context, float(quantile))
        self._last = WHOLE_CHIP
        self._rates: dict[int, tuple[float, tuple[float, ...]]] = {}

    def plan(self, view: StepView) -> StepPlan:
        """Pick the choice with the highest predicted work rate; pause when requests wait, the guard says so or nothing fits."""
        context = self._context
        total_sms = context.capabilities.total_sms
        rows = tuple(rows_for(job, view, context.reservation) for job in view.jobs)
        if view.batch == 0:
            return first_job_plan(view, rows, Hold(1, None), total_sms, total_sms)
        steps = self._hold_steps
        spent_ms = view.elapsed_ms + sum(job.in_flight_ms for job in view.jobs if job.in_flight_sms == total_sms)
        best: Pace | None = None
        if view.jobs and not view.waiting and not self._monitor.guard.paused:
            last = context.predictor.predict(view.batch, view.kv_tokens + steps * view.batch)
            best = self._best(view.jobs[0], spent_ms, last.whole_chip_ms, last.colocated_ms)
        if best is None:
            steps = min(steps, self._monitor.guard.paused_steps or steps)
            decode_ms = self._monitor.expect(WHOLE_CHIP, view.batch, view.kv_tokens, finetuning=False)
            return first_job_plan(view, rows, Hold(steps, None), total_sms, 0, 0.0, spent_ms + decode_ms)
        self._last = best.choice
        predicted_ms = spent_ms + best.turn_ms
        predicted_ms += self._monitor.expect(best.choice, view.batch, view.kv_tokens, finetuning=True)
        hold = Hold(1 if spent_ms else steps, context.qos_ms)
        if best.choice == WHOLE_CHIP:
            return first_job_plan(view, rows, hold, total_sms, 0, best.turn_ms, predicted_ms)
        split = context.capabilities.splits[best.choice]
        return first_job_plan(view, rows, hold, split.decode_sms, split.finetune_sms, best.turn_ms, predicted_ms)

    def observe(self, result: StepResult) -> None:
        """Feed the residuals and the guard."""
        self._monitor.observe(result)

    def _best(
        self, job: JobView, spent_ms: float, whole_chip_ms: float, colocated_ms: tuple[float, ...]
    ) -> Pace | None:
        alone_rate, beside_rates = self._work_rates(job.unit_tokens)
        budget_ms = self._target_ms - spent_ms
        best: Pace | None = None
        for choice in (WHOLE_CHIP, *range(len(colocated_ms))):
            ring = self._monitor.ring(choice)
            decode_ms = whole_chip_ms if choice == WHOLE_CHIP else colocated_ms[choice]
            beside_rate = 0.0 if choice == WHOLE_CHIP else beside_rates[choice]
            found = pace(choice, decode_ms * ring.centre, decode_ms * ring.bound, budget_ms, alone_rate, beside_rate)
            if found is None:
                continue
            if choice == self._last:
                found = Pace(choice, found.turn_ms, found.work_rate * (1.0 + self._hysteresis))
            if best is None or found.work_rate > best.work_rate:
                best = found
        return best

    def _work_rates(self, unit_tokens: int) -> tuple[float, tuple[float, ...]]:
        """Layer passes (one forward and one backward unit) a millisecond: on the whole chip, and beside each split."""
        known = self._rates.get(unit_tokens)
        if known is None:
            predictor = self._context.predictor
            total_sms = self._context.capabilities.total_sms
            alone_ms = sum(predictor.unit_ms(kind, unit_tokens, total_sms) for kind in ("forward", "backward"))
            beside_ms = [
                sum(predictor.unit_beside_ms(kind, unit_tokens, index) for kind in ("forward", "backward"))
                for index in range(len(self._context.capabilities.splits))
            ]
            known = (1.0 / alone_ms, tuple(1.0 / pair_ms for pair_ms in beside_ms))
            self._rates[unit_tokens] = known
        return known

