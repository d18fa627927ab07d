"""Laying out the steps of one plan: when each ends, and what finetuning does in them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

from backends.sim.device_model import BatchPoint, DeviceModel
from backends.sim.finetune_job import FinetuneJob, JobState
from backends.sim.turns import Turn, TurnSteps, take_turns
from harli_core.types import Split, StepPlan

STEPS_AHEAD, TURNS_AHEAD = 64, 20
"""Steps laid out for one event of the simulation: those that an arrival undoes were laid out in vain, and steps with turns
cost more."""


@dataclass(slots=True)
class HeldPlan:
    """A plan that is in force for ``steps_left`` steps more.

    ``split`` is what decode shares (`None`: nothing runs beside it), ``turn`` what finetuning has in each step, if it has
    turns.
    """

    plan: StepPlan
    split: Split | None
    turn: Turn | None
    steps_left: int
    fresh: bool = True


@dataclass(slots=True)
class Span:
    """Steps of one batch under one plan, and where things stood at ``start_ms``, before the first of them.

    Of the first step's latency ``elapsed_ms`` had passed by then, of its turn ``turned_ms``; ``copied_ms`` go to
    compaction first. ``job`` is the job's state at ``start_ms`` where the plan has turns. Rows that somebody waits for
    come back at ``fence_ms``.
    """

    held: HeldPlan
    point: BatchPoint
    step: int
    start_ms: float
    batch: int
    kv_tokens: int
    waiting: int
    rows_kv: int
    rows_lent: int
    unlendable_bytes: int
    job: JobState | None
    elapsed_ms: float = 0.0
    copied_ms: float = 0.0
    turned_ms: float = 0.0
    fence_ms: float | None = None


@dataclass(slots=True)
class StepLayout:
    """Steps laid out ahead; ``ends_ms`` are their boundaries, ``states`` the job's there where the plan has turns.

    ``ended``: with the last of them the plan no longer holds.
    """

    decode_ms: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    turn_ms: list[float] = field(default_factory=list)
    ends_ms: list[float] = field(default_factory=list)
    states: list[JobState] = field(default_factory=list)
    ended: bool = False

    def running(self, now_ms: float) -> int:
        """The step that is under way at ``now_ms``, which lies before the last boundary or on it."""
        return min(len(self.ends_ms) - 1, bisect_left(self.ends_ms, now_ms))

    def in_turn(self, step: int, now_ms: float) -> bool:
        """Whether at ``now_ms``, within ``step``, decode has not been launched yet."""
        return now_ms < self.ends_ms[step] - self.decode_ms[step]

    def cut(self, count: int) -> None:
        """Keep the first ``count`` steps."""
        if count < len(self.ends_ms):
            self.ended = False
            for column in (self.decode_ms, self.latency_ms, self.turn_ms, self.ends_ms, self.states):
                del column[count:]


class StepScheduler:
    """Lays steps out for one instance, and later makes the job's state true for those that really happened.

    Without turns the job has no say in the boundaries, so it is moved once, when the steps are settled. With turns it
    is moved through each step as it is laid out, and put back for steps that do not happen.
    """

    def __init__(self, index: int, device: DeviceModel, job: FinetuneJob | None, exact_steps: bool) -> None:
        """``index`` is the instance's; it selects the noise. ``exact_steps``: lay out one step at a time."""
        self._index = index
        self._device = device
        self._job = job
        self._total_sms = device.capabilities.total_sms
        self._exact_steps = exact_steps

    def extend(self, span: Span, layout: StepLayout, count: int) -> None:
        """Lay out at most ``count`` steps more, at least one; sets ``layout.ended`` where the plan stops being valid."""
        turn, done = span.held.turn, len(layout.ends_ms)
        count = min(count, 1 if self._exact_steps else STEPS_AHEAD if turn is None else TURNS_AHEAD)
        start_ms = layout.ends_ms[-1] if done else span.start_ms
        decode_ms = span.point.decode_ms(self._index, span.step + done, span.kv_tokens + done * span.batch, count)
        if turn is not None:
            self._take_turns(turn, span, layout, start_ms, decode_ms)
        else:
            layout.latency_ms += decode_ms
            layout.turn_ms += [0.0] * count
            if not done:
                layout.latency_ms[0] += self._waited_ms(span)
        ends_ms = layout.latency_ms[done:]
        ends_ms[0] = start_ms + ends_ms[0]
        layout.ends_ms += accumulate(ends_ms)
        layout.decode_ms += decode_ms
        if not done:
            layout.latency_ms[0] += span.elapsed_ms
            layout.turn_ms[0] += span.turned_ms
        self._end_where_the_hold_does(span, layout, done)

    def settle(self, span: Span, layout: StepLayout) -> None:
        """The steps of ``layout``, perhaps fewer than were laid out, have happened: move the job through just these."""
        job, done, split = self._job, len(layout.ends_ms), span.held.split
        if job is None:
            return
        if span.job is not None:
            job.restore(layout.states[-1] if done else span.job)
        elif split is not None and done:
            decode_ms = sum(layout.decode_ms)
            job.run(layout.ends_ms[-1] - decode_ms, decode_ms, split.finetune_sms, span.point.unit_slowdown)

    def call_off_turn(self, step: int, start_ms: float, now_ms: float) -> float:
        """In the turn before ``step``, begun at ``start_ms``, a request arrives at ``now_ms``: end it at the next unit.

        The job has been settled up to ``start_ms``. Returns the time used.
        """
        assert self._job is not None, "a turn belongs to a job"
        ratio = self._device.turn_noise(self._index, step, 1)[0]
        return ratio * self._job.turn_past(start_ms, (now_ms - start_ms) / ratio, self._total_sms)

    def _waited_ms(self, span: Span) -> float:
        """How long decode waits before the first step of a span without turns."""
        job = self._job
        if job is not None and job.sms and job.sms + span.held.plan.decode_sms > self._total_sms:
            return span.copied_ms + job.finish_unit()
        return span.copied_ms

    def _take_turns(self, turn: Turn, span: Span, layout: StepLayout, start_ms: float, decode_ms: list[float]) -> None:
        """Steps that begin with a turn of whole units."""
        job, done = self._job, len(layout.ends_ms)
        assert job is not None, "a turn belongs to a job"
        delay_ms = 0.0 if done else span.copied_ms
        noise = self._device.turn_noise(self._index, span.step + done, len(decode_ms))
        steps = TurnSteps(layout.turn_ms, layout.latency_ms, layout.states)
        take_turns(job, turn, span.point.unit_slowdown, start_ms, delay_ms, decode_ms, noise, steps)

    def _end_where_the_hold_does(self, span: Span, layout: StepLayout, done: int) -> None:
        """Cut what lies behind the first step over the hold's bound, or behind the return of rows."""
        limit_ms, valid = span.held.plan.hold.max_step_ms, math.inf
        if limit_ms is not None and max(layout.latency_ms[done:]) > limit_ms:
            valid = next(index for index, ms in enumerate(layout.latency_ms, start=1) if ms > limit_ms)
        if span.fence_ms is not None:
            valid = min(valid, bisect_left(layout.ends_ms, span.fence_ms) + 1)
        if valid <= len(layout.ends_ms):
            layout.cut(int(valid))
            layout.ended = True
