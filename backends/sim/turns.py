"""Consecutive steps that begin with a turn of finetuning: where the job stands after each of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from backends.sim.finetune_job import FinetuneJob, JobState


@dataclass(frozen=True, slots=True)
class Turn:
    """What a plan gives a job in every step: ``budget_ms`` on the whole chip, then ``beside_sms`` while decode runs.

    ``decode_sms`` of ``total_sms`` are decode's; it waits for a unit that still runs on one of them.
    """

    budget_ms: float
    total_sms: int
    decode_sms: int
    beside_sms: int


@dataclass(slots=True)
class TurnSteps:
    """One entry a step: the turn's length, the whole step's with decode and waiting, where the job stands at its end."""

    turn_ms: list[float]
    latency_ms: list[float]
    states: list[JobState]


def take_turns(
    job: FinetuneJob,
    turn: Turn,
    slowdown: float,
    now_ms: float,
    delay_ms: float,
    decode_ms: Sequence[float],
    noise: Sequence[float],
    steps: TurnSteps,
) -> None:
    """Move ``job`` from ``now_ms`` on through a step for each of ``decode_ms``, which are added to ``steps``.

    Beside decode a unit takes ``slowdown`` times longer than alone; ``noise`` scales the real turns. The first step begins
    with a wait of ``delay_ms``; decode waits for a unit that still runs on SMs that it takes.
    """
    if job.swaps.settled:
        _resident(job, turn, slowdown, delay_ms, decode_ms, noise, steps)
        return
    for done, (step_ms, ratio) in enumerate(zip(decode_ms, noise, strict=True)):
        if job.swaps.settled:
            _resident(job, turn, slowdown, delay_ms, decode_ms[done:], noise[done:], steps)
            return
        turn_ms = job.turn(now_ms + delay_ms, turn.budget_ms, turn.total_sms) * ratio
        waited_ms, delay_ms = delay_ms, 0.0
        if job.sms and turn.decode_sms + job.sms > turn.total_sms:
            waited_ms += job.finish_unit()
        if turn.beside_sms:
            job.run(now_ms + waited_ms + turn_ms, step_ms, turn.beside_sms, slowdown)
        latency_ms = waited_ms + turn_ms + step_ms
        now_ms += latency_ms
        steps.turn_ms.append(turn_ms)
        steps.latency_ms.append(latency_ms)
        steps.states.append(job.snapshot())


def _resident(
    job: FinetuneJob,
    turn: Turn,
    slowdown: float,
    delay_ms: float,
    decode_ms: Sequence[float],
    noise: Sequence[float],
    steps: TurnSteps,
) -> None:
    """The same as `FinetuneJob.turn`, `finish_unit` and `run` step by step, for a job that no swap can hold up.

    Most simulated time passes here, so the job's position is kept in local variables.
    """
    own_sms = turn.beside_sms or turn.total_sms
    whole_ms, beside_ms, beside_lengths_ms = job.ends_ms(turn.total_sms), job.ends_ms(own_sms), job.lengths_ms(own_sms)
    budget_ms, beside_sms, size, step_end_ms = turn.budget_ms, turn.beside_sms, len(job.order), beside_ms[-1]
    spare_sms, waited_ms = turn.total_sms - turn.decode_sms, delay_ms
    index, done_steps, fraction, sms, stall_ms = job.position()
    cut_lengths_ms = job.lengths_ms(sms or turn.total_sms)  # on the SMs that the cut unit runs on
    turns_ms, latencies_ms, states = steps.turn_ms, steps.latency_ms, steps.states
    for step_ms, ratio in zip(decode_ms, noise, strict=True):
        following, used_ms, turn_ms = index, 0.0, 0.0
        if fraction:
            used_ms = (1.0 - fraction) * cut_lengths_ms[index]
            following += 1
            if following == size:
                following = 0
        here_ms = whole_ms[following]
        reached = bisect_right(whole_ms, here_ms + budget_ms - used_ms, following) - 1
        if reached > following + 1 or used_ms + whole_ms[following + 1] - here_ms <= budget_ms:  # two fit, or one does
            if following < index:
                done_steps += 1
            index, fraction, sms = following, 0.0, 0
            while reached > index:
                used_ms += whole_ms[reached] - whole_ms[index]
                if reached < size:
                    index = reached
                    break
                index = 0
                done_steps += 1
                reached = bisect_right(whole_ms, whole_ms[0] + budget_ms - used_ms) - 1
            turn_ms = used_ms * ratio
        elif sms > spare_sms:
            waited_ms += (1.0 - fraction) * cut_lengths_ms[index]
            index, fraction, sms = index + 1, 0.0, 0
            if index == size:
                index = 0
                done_steps += 1
        if beside_sms:
            there_ms = beside_ms[index] + step_ms / slowdown
            if fraction:
                there_ms = beside_ms[index] + fraction * beside_lengths_ms[index] + step_ms / slowdown
            while there_ms >= step_end_ms:
                there_ms, index = max(0.0, there_ms - step_end_ms), 0
                done_steps += 1
            index = bisect_right(beside_ms, there_ms, index) - 1
            fraction = (there_ms - beside_ms[index]) / beside_lengths_ms[index]
            sms, cut_lengths_ms = beside_sms if fraction else 0, beside_lengths_ms
        turns_ms.append(turn_ms)
        latencies_ms.append(waited_ms + turn_ms + step_ms)
        states.append((index, done_steps, fraction, sms, stall_ms, None))
        waited_ms = 0.0
    job.restore(states[-1])
