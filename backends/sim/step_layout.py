"""Laying out the steps of one plan: when each ends, and what finetuning does in them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from backends.sim.device_model import DeviceModel
from backends.sim.finetune_job import FinetuneJob, JobState
from harli_core.types import Split, StepPlan, StepView


@dataclass(slots=True)
class OpenPlan:
    """The plan under which steps are laid out, and where things stood at ``start_ms`` when they were.

    ``split`` is what decode shares (`None`: nothing runs beside it). ``copied_ms`` went to compaction first. ``job`` is
    the job's state at ``start_ms`` where the plan has turns; ``turned_ms`` of the first step's turn were over before.
    Rows that somebody waits for come back at ``fence_ms``.
    """

    view: StepView
    plan: StepPlan
    split: Split | None
    start_ms: float
    copied_ms: float
    turn_budget_ms: float
    turned_ms: float
    job: JobState | None
    fence_ms: float | None


@dataclass(slots=True)
class StepLayout:
    """Steps laid out ahead; ``ends_ms`` are their boundaries, the job has been moved through ``moved`` of them."""

    decode_ms: list[float]
    latency_ms: list[float]
    turn_ms: list[float]
    ends_ms: list[float]
    moved: int = 0

    def in_turn(self, step: int, now_ms: float) -> bool:
        """Whether at ``now_ms``, within ``step``, decode has not been launched yet."""
        return now_ms < self.ends_ms[step] - self.decode_ms[step]

    def first(self, count: int) -> StepLayout:
        """The first ``count`` steps; the job has still been moved through ``moved``."""
        if count == len(self.ends_ms):
            return self
        return StepLayout(
            self.decode_ms[:count], self.latency_ms[:count], self.turn_ms[:count], self.ends_ms[:count], self.moved
        )


class StepScheduler:
    """Lays steps out for one instance, and later makes the job's state true for those that really happened.

    Without turns the job has no say in the boundaries, so it is moved once, when the steps are settled. With turns it
    is moved through each step as it is laid out, and back again for steps that do not happen.
    """

    def __init__(self, index: int, device: DeviceModel, job: FinetuneJob | None) -> None:
        """``index`` is the instance's; it selects the noise."""
        self._index = index
        self._device = device
        self._job = job
        self._total_sms = device.capabilities.total_sms

    def lay_out(self, opened: OpenPlan, count: int) -> StepLayout:
        """At most ``count`` steps: fewer where the hold's bound breaks or rows come back (that step still counts)."""
        view, plan, job = opened.view, opened.plan, self._job
        decode_ms = self._device.decode_ms(
            self._index, view.step, view.batch, view.kv_tokens, count, plan.decode_sms, opened.split
        )
        if job is not None and opened.turn_budget_ms:
            layout = self._with_turns(job, opened, decode_ms)
        else:
            waited_ms = opened.copied_ms
            if job is not None and job.sms and job.sms + plan.decode_sms > self._total_sms:
                waited_ms += job.finish_unit()
            latency_ms = decode_ms.copy()
            latency_ms[0] += waited_ms
            ends_ms = list(accumulate(latency_ms, initial=opened.start_ms))[1:]
            latency_ms[0] += view.elapsed_ms
            layout = StepLayout(decode_ms, latency_ms, [0.0] * count, ends_ms)
            layout.turn_ms[0] = opened.turned_ms
        limit_ms, fence_ms = plan.hold.max_step_ms, opened.fence_ms
        valid = len(layout.ends_ms)
        if limit_ms is not None and max(layout.latency_ms) > limit_ms:
            valid = next(index for index, ms in enumerate(layout.latency_ms, start=1) if ms > limit_ms)
        if fence_ms is not None:
            valid = min(valid, bisect_left(layout.ends_ms, fence_ms) + 1)
        return layout.first(valid)

    def settle(self, opened: OpenPlan, layout: StepLayout) -> None:
        """The steps of ``layout``, perhaps fewer than were laid out, have happened: move the job through just these."""
        job, done = self._job, len(layout.ends_ms)
        if job is not None and opened.job is not None:
            if done < layout.moved:
                job.restore(opened.job)
                self._with_turns(job, opened, layout.decode_ms)
        elif job is not None and opened.split is not None and done:
            slowdown = self._device.unit_slowdown(opened.split, opened.view.batch)
            decode_ms = sum(layout.decode_ms)
            job.run(layout.ends_ms[-1] - decode_ms, decode_ms, opened.split.finetune_sms, slowdown)

    def call_off_turn(self, opened: OpenPlan, steps: int, start_ms: float, now_ms: float) -> float:
        """In the turn after ``steps`` whole steps, begun at ``start_ms``, a request arrives at ``now_ms``: end it.

        The job has been settled up to ``start_ms``; it goes on to the end of the unit that runs. Returns the time used.
        """
        assert self._job is not None, "a turn belongs to a job"
        ratio = self._device.turn_noise(self._index, opened.view.step + steps, 1)[0]
        return ratio * self._job.turn_past(start_ms, (now_ms - start_ms) / ratio, self._total_sms)

    def _with_turns(self, job: FinetuneJob, opened: OpenPlan, decode_ms: Sequence[float]) -> StepLayout:
        """Steps that begin with a turn of whole units; decode waits for a unit that still runs on SMs that it takes."""
        plan, split, view = opened.plan, opened.split, opened.view
        slowdown = self._device.unit_slowdown(split, view.batch) if split is not None else 1.0
        noise = self._device.turn_noise(self._index, view.step, len(decode_ms))
        limit_ms = math.inf if plan.hold.max_step_ms is None else plan.hold.max_step_ms
        now_ms, elapsed_ms, waited_ms = opened.start_ms, view.elapsed_ms, opened.copied_ms
        turned_ms = opened.turned_ms
        layout = StepLayout([], [], [], [])
        for step_ms, ratio in zip(decode_ms, noise, strict=True):
            turn_ms = job.turn(now_ms + waited_ms, opened.turn_budget_ms, self._total_sms) * ratio
            if job.sms and plan.decode_sms + job.sms > self._total_sms:
                waited_ms += job.finish_unit()
            if split is not None:
                job.run(now_ms + waited_ms + turn_ms, step_ms, split.finetune_sms, slowdown)
            spent_ms = waited_ms + turn_ms + step_ms
            now_ms += spent_ms
            layout.decode_ms.append(step_ms)
            layout.latency_ms.append(elapsed_ms + spent_ms)
            layout.turn_ms.append(turned_ms + turn_ms)
            layout.ends_ms.append(now_ms)
            if elapsed_ms + spent_ms > limit_ms:
                break
            elapsed_ms = waited_ms = turned_ms = 0.0
        layout.moved = len(layout.ends_ms)
        return layout
