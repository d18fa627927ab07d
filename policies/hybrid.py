"""Ours: sharing and taking turns, whichever mix is predicted to finetune fastest within the latency target."""

from __future__ import annotations

from collections.abc import Sequence

from harli_core.policy import PolicyContext, count_option, option
from harli_core.qos.first_job import first_job_plan
from harli_core.qos.monitor import WHOLE_CHIP, LatencyMonitor
from harli_core.qos.pacing import Pace, fastest, spent_ms
from harli_core.qos.roomy_hold import SNUG, RoomyHold
from harli_core.qos.rows import rows_for
from harli_core.types import Hold, StepPlan, StepResult, StepView


class Hybrid:
    """Maximises predicted finetune work subject to a quantile of predicted step latency staying under the target.

    While requests wait for memory finetuning stands back: slower steps would keep the batch's memory for longer, and
    the queue would never drain (batch = rate x step latency).

    ``margin`` of the target is kept back for what no prediction covers (units that overrun, switches), ``quantile`` is
    that of the residuals, ``hold_steps`` how long an answer is kept while the batch changes little, and a different
    choice must be better by ``hysteresis`` to replace the last one.
    """

    serves = True
    finetunes = True

    def __init__(
        self,
        context: PolicyContext,
        margin: float = 0.02,
        quantile: float = 0.995,
        hold_steps: int = 64,
        hysteresis: float = 0.02,
    ) -> None:
        """Options keep their defaults unless the user sets them."""
        self._context = context
        self._target_ms = context.qos_ms * (1.0 - option("margin", margin, 0.0, 0.9))
        self._hold_steps = count_option("hold_steps", hold_steps)
        self._hysteresis = option("hysteresis", hysteresis, 0.0, 0.5)
        self._monitor = LatencyMonitor(context, option("quantile", quantile, 0.0, 1.0))
        splits = context.capabilities.splits
        self._choices = (WHOLE_CHIP, *range(len(splits)))
        self._rings = [self._monitor.ring(choice) for choice in self._choices]
        self._free_sms = [context.capabilities.total_sms - self._partitions(choice)[0] for choice in self._choices]
        self._last = WHOLE_CHIP
        self._rates: dict[int, tuple[float, tuple[float, ...]]] = {}

    def plan(self, view: StepView) -> StepPlan:
        """Pick the choice with the highest predicted work rate; pause when requests wait, the guard trips or none fits."""
        context = self._context
        total_sms = context.capabilities.total_sms
        rows = tuple(rows_for(job, view, context.reservation) for job in view.jobs)
        if view.batch == 0:
            idle_sms = self._idle_sms(view.jobs[0].unit_tokens) if view.jobs else 0
            return first_job_plan(view, rows, Hold(1, None), total_sms, idle_sms)
        hold, best = self._held_pace(view)
        choice = WHOLE_CHIP if best is None else best.choice
        decode_sms, finetune_sms = self._partitions(choice)
        gone_ms = self._spent_ms(view, decode_sms)
        turn_ms = 0.0 if best is None else best.turn_ms
        decode_ms = self._monitor.expect(
            choice, view.batch, view.kv_tokens, finetuning=best is not None, turn_ms=turn_ms, spent_ms=gone_ms
        )
        if best is None:
            return first_job_plan(view, rows, hold, total_sms, 0, 0.0, gone_ms + decode_ms)
        self._last = choice
        predicted_ms = gone_ms + turn_ms + decode_ms
        return first_job_plan(view, rows, hold, decode_sms, finetune_sms, turn_ms, predicted_ms)

    def observe(self, result: StepResult) -> None:
        """Feed the residuals and the guard."""
        self._monitor.observe(result)

    def _held_pace(self, view: StepView) -> tuple[Hold, Pace | None]:
        """The best pace, and how long it holds.

        Time that is gone before a step is gone for that step only, so then the pace is for one step.
        """
        guard = self._monitor.guard
        if view.jobs and not view.waiting and not guard.paused:
            budgets_ms = self._budgets_ms(view)
            room, best = self._roomy_pace(view, budgets_ms)
            if best is not None and self._spent_ms(view, self._partitions(best.choice)[0]):
                room = RoomyHold.exact(view, 1, self._context.qos_ms)
                best = self._best(view, room, budgets_ms)
            if best is not None:
                return room.hold, best
        return Hold(min(self._hold_steps, guard.paused_steps or self._hold_steps), None), None

    def _roomy_pace(self, view: StepView, budgets_ms: Sequence[float]) -> tuple[RoomyHold, Pace | None]:
        """The best pace for a while in which requests may join and leave.

        Room costs finetuning, as the turn must be short enough for the largest batch: less of it has to be better by the
        hysteresis. A pace for just this batch is for one that nothing else fits.
        """
        steps, qos_ms = self._hold_steps, self._context.qos_ms
        graph_batches = self._context.predictor.profile.graph_batches
        room = RoomyHold.of(view, steps, qos_ms, graph_batches)
        snug = RoomyHold.of(view, steps, qos_ms, graph_batches, SNUG)
        best, closer = self._best(view, room, budgets_ms), self._best(view, snug, budgets_ms)
        if closer is not None and (best is None or closer.work_rate * (1.0 - self._hysteresis) > best.work_rate):
            room, best = snug, closer
        if best is None:
            room = RoomyHold.exact(view, steps, qos_ms)
            best = self._best(view, room, budgets_ms)
        return room, best

    def _partitions(self, choice: int) -> tuple[int, int]:
        """Decode's and finetuning's SMs under a choice."""
        if choice == WHOLE_CHIP:
            return self._context.capabilities.total_sms, 0
        split = self._context.capabilities.splits[choice]
        return split.decode_sms, split.finetune_sms

    def _spent_ms(self, view: StepView, decode_sms: int) -> float:
        """See `pacing.spent_ms`."""
        return spent_ms(view, self._context.capabilities.total_sms - decode_sms)

    def _budgets_ms(self, view: StepView) -> list[float]:
        """What each choice has for the coming step: units in flight are in the way of some of them."""
        if any(job.in_flight_sms for job in view.jobs):
            return [self._target_ms - spent_ms(view, free_sms) for free_sms in self._free_sms]
        return [self._target_ms - view.elapsed_ms] * len(self._choices)

    def _best(self, view: StepView, room: RoomyHold, budgets_ms: Sequence[float]) -> Pace | None:
        lines, kv_tokens = self._context.predictor.lines(room.batch), room.kv_tokens
        decode_ms = [fixed_ms + token_ms * kv_tokens for fixed_ms, token_ms in (lines.whole_chip, *lines.colocated)]
        alone_rate, rates = self._work_rates(view.jobs[0].unit_tokens)
        beside_rates = [0.0, *[rate / level for rate, level in zip(rates, self._monitor.unit_levels, strict=True)]]
        return fastest(
            self._choices, self._rings, decode_ms, budgets_ms, beside_rates, alone_rate, self._last, self._hysteresis
        )

    def _idle_sms(self, unit_tokens: int) -> int:
        """SMs for finetuning while there is nothing to decode.

        All of them when a request that arrives just after the longest unit began can still have its step in time; else
        the largest partition beside which decode can begin at once.
        """
        predictor, capabilities = self._context.predictor, self._context.capabilities
        total_sms = capabilities.total_sms
        longest_ms = max(
            predictor.unit_ms(kind, unit_tokens, total_sms) for kind in ("forward", "backward", "head_loss")
        )
        first = predictor.predict(1, 1)
        if longest_ms + first.whole_chip_ms * self._monitor.ring(WHOLE_CHIP).bound <= self._target_ms:
            return total_sms
        fitting = [
            split.finetune_sms
            for choice, split in enumerate(capabilities.splits)
            if first.colocated_ms[choice] * self._monitor.ring(choice).bound <= self._target_ms
        ]
        return max(fitting, default=min(split.finetune_sms for split in capabilities.splits))

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
