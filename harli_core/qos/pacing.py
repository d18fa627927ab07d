"""Time in both dimensions: how long finetuning has the whole chip before a step, and what runs beside decode.

For a choice ``c`` with decode latency ``d`` (its expected value) and bound ``q`` (a quantile of it), the turn that still
keeps the step within the target is ``turn = target - q``, and finetuning does ::

    turn / pair_alone_ms  +  d / pair_beside_ms[c]      layer passes in  turn + d  milliseconds

so the choices are compared by that rate. The whole-chip choice has nothing beside decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from harli_core.types import StepView


@dataclass(frozen=True, slots=True)
class Pace:
    """A turn length for one choice and the finetune work it yields, in layer passes a millisecond."""

    choice: int
    turn_ms: float
    work_rate: float


def pace(
    choice: int, expected_ms: float, bound_ms: float, budget_ms: float, alone_rate: float, beside_rate: float
) -> Pace | None:
    """The longest turn that ``budget_ms`` leaves; `None` when the bound alone exceeds it."""
    turn_ms = budget_ms - bound_ms
    if turn_ms < 0.0:
        return None
    work = turn_ms * alone_rate + expected_ms * beside_rate
    return Pace(choice, turn_ms, work / (turn_ms + expected_ms))


def spent_ms(view: StepView, free_sms: int) -> float:
    """What of the coming step's latency is gone before its turn: waiting, and units still running on decode's SMs.

    Units on at most ``free_sms`` SMs are in nobody's way.
    """
    return view.elapsed_ms + sum([job.in_flight_ms for job in view.jobs if job.in_flight_sms > free_sms])
