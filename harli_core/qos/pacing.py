"""Time in both dimensions: how long finetuning has the whole chip before a step, and what runs beside decode.

For a choice ``c`` with decode latency ``d`` (its expected value) and bound ``q`` (a quantile of it), the turn that still
keeps the step within the target is ``turn = target - q``, and finetuning does ::

    turn / pair_alone_ms  +  d / pair_beside_ms[c]      layer passes in  turn + d  milliseconds

so the choices are compared by that rate. The whole-chip choice has nothing beside decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harli_core.qos.residuals import ResidualRing
from harli_core.types import StepView


@dataclass(frozen=True, slots=True)
class Pace:
    """A turn length for one choice and the finetune work it yields, in layer passes a millisecond."""

    choice: int
    turn_ms: float
    work_rate: float


def fastest(
    choices: Sequence[int],
    rings: Sequence[ResidualRing],
    decode_ms: Sequence[float],
    budgets_ms: Sequence[float],
    beside_rates: Sequence[float],
    alone_rate: float,
    last: int,
    hysteresis: float,
) -> Pace | None:
    """The choice whose longest turn gives the most work; `None` when the bound alone exceeds the budget of each.

    ``decode_ms`` are predictions that ``rings`` have yet to correct; ``beside_rates`` and ``alone_rate`` are layer passes a
    millisecond. The rate of ``last`` counts for ``hysteresis`` more.
    """
    best: tuple[int, float, float] | None = None
    most = 0.0
    for choice, ring, predicted_ms, budget_ms, beside_rate in zip(
        choices, rings, decode_ms, budgets_ms, beside_rates, strict=True
    ):
        turn_ms = budget_ms - predicted_ms * ring.bound
        if turn_ms < 0.0:
            continue
        expected_ms = predicted_ms * ring.centre
        rate = (turn_ms * alone_rate + expected_ms * beside_rate) / (turn_ms + expected_ms)
        if choice == last:
            rate *= 1.0 + hysteresis
        if best is None or rate > most:
            best, most = (choice, turn_ms, rate), rate
    return None if best is None else Pace(*best)


def spent_ms(view: StepView, free_sms: int) -> float:
    """What of the coming step's latency is gone before its turn: waiting, and units still running on decode's SMs.

    Units on at most ``free_sms`` SMs are in nobody's way.
    """
    return view.elapsed_ms + sum([job.in_flight_ms for job in view.jobs if job.in_flight_sms > free_sms])
