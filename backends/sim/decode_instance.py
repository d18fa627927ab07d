"""One decode instance: continuous batching, KV growth, preemption, and the finetuning beside it, step by step.

At every step boundary: rows whose fence has passed come back, waiting requests are admitted, the decision loop is
asked, memory moves towards the plan, and the plan's steps are laid out ahead until it no longer holds. A request that
arrives in the middle cuts them at the next boundary, so nothing in them depends on the future.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import simpy

from backends.sim.device_model import DeviceModel
from backends.sim.finetune_job import FinetuneJob, JobState
from backends.sim.job_memory import JobMemory
from backends.sim.request import SimRequest
from harli_core.errors import AuditError
from harli_core.loop import DecisionLoop
from harli_core.memory.reservation import Reservation
from harli_core.memory.unified import UnifiedAllocator
from harli_core.records import COMPLETED, RequestBook, SpanState, StepBook
from harli_core.types import JobView, Split, StepPlan, StepResult, StepView

PINNED_TOKENS = 1
"""Slots at the start of row 0 that padded entries of a decode graph write to."""

COPY_BYTES_PER_MS = 4.0e9 / 2
"""Compaction reads and writes every byte at the measured copy bandwidth (4 TB/s)."""


@dataclass(slots=True)
class Layout:
    """Steps laid out ahead under one plan; ``ends_ms`` are their boundaries.

    ``moved`` is the number of steps that the finetuning job was already moved through.
    """

    decode_ms: list[float]
    latency_ms: list[float]
    turn_ms: list[float]
    ends_ms: list[float]
    moved: int = 0

    def first(self, count: int) -> Layout:
        """The first ``count`` steps; the job has still been moved through all of them."""
        if count == len(self.ends_ms):
            return self
        parts = (self.decode_ms, self.latency_ms, self.turn_ms, self.ends_ms)
        return Layout(*(part[:count] for part in parts), self.moved)


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """The plan under which steps are laid out, and where things stood at ``start_ms`` when they were.

    ``split`` is what decode shares (`None`: nothing runs beside it), ``job`` the job's state where the plan has turns.
    """

    view: StepView
    plan: StepPlan
    split: Split | None
    start_ms: float
    copied_ms: float
    turn_budget_ms: float
    job: JobState | None


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """What bounds an instance beside its memory: the batch size, and the target that violations are judged by."""

    max_batch: int
    qos_ms: float


class DecodeInstance:
    """A SimPy process around one `DecisionLoop`."""

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        device: DeviceModel,
        loop: DecisionLoop,
        allocator: UnifiedAllocator,
        reservation: Reservation,
        job: FinetuneJob | None,
        job_memory: JobMemory | None,
        limits: InstanceLimits,
        requests: RequestBook,
        steps: StepBook,
        preempted: Callable[[SimRequest], None],
        finished: Callable[[SimRequest], None],
    ) -> None:
        """``preempted`` takes a request whose KV must be computed again, ``finished`` one that needs no more tokens."""
        self.index = index
        self.job = job
        self.memory = job_memory
        self.allocator = allocator
        self._env = env
        self._device = device
        self._loop = loop
        self._reservation = reservation
        self._limits = limits
        self._requests = requests
        self._steps = steps
        self._preempted = preempted
        self._finished = finished
        self._queue: deque[SimRequest] = deque()
        self._queue_tokens = 0
        self._batch: list[SimRequest] = []
        self._joined: list[SimRequest] = []
        self._kv_tokens = 0
        self._step = 0
        self._boundary_ms = 0.0
        self._layout: Layout | None = None
        self._open: OpenPlan | None = None
        self._idle_plan: StepPlan | None = None
        self._idle_since_ms = 0.0
        self._may_interrupt = False
        self._awaited: simpy.Event | None = None
        self._splits = {split.decode_sms: split for split in device.capabilities.splits}
        self._total_sms = device.capabilities.total_sms
        self.process = env.process(self._run())

    # -- seen from outside ------------------------------------------------------------------------------------------

    def submit(self, request: SimRequest) -> None:
        """A request arrives with its prompt's KV; it joins the batch at the next boundary that has room."""
        self._requests.instance[request.spec.index] = self.index
        self._queue.append(request)
        self._queue_tokens += request.kv_tokens
        if self._awaited is not None:
            self._awaited.succeed()
            self._awaited = None
        elif self._may_interrupt:
            self._may_interrupt = False
            self.process.interrupt()

    def kv_load_tokens(self) -> int:
        """Tokens held now and promised to requests in the queue."""
        grown = 0
        if self._layout is not None:
            grown = len(self._batch) * bisect_right(self._layout.ends_ms, self._env.now)
        return self._kv_tokens + grown + self._queue_tokens

    def check_integrity(self) -> None:
        """The tokens that requests hold are the slots in use; raises `AuditError`."""
        held = sum(sum(len(part) for part in request.slots) for request in self._batch)
        used = self.allocator.view().used_tokens
        counted = sum(request.kv_tokens for request in self._batch)
        if not held == used == counted == self._kv_tokens:
            raise AuditError(
                f"instance {self.index}: requests hold {held} slots for {counted} tokens, the allocator counts {used}"
            )

    @property
    def unfinished(self) -> int:
        """Requests that are here and not done."""
        return len(self._batch) + len(self._queue)

    # -- the process ------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            if self.memory is not None:
                self.memory.poll(self._env.now)
            self._admit()
            if not self._batch and not self._queue:
                yield from self._idle()
                continue
            if not self._batch or not self.allocator.can_allocate_tokens(len(self._batch)):
                yield from self._make_room()
                if not self._batch or not self.allocator.can_allocate_tokens(len(self._batch)):
                    continue
            yield from self._decode()

    def _idle(self) -> Generator[simpy.Event, Any, None]:
        """Nothing to decode: finetuning has what the plan gives it until a request arrives."""
        start_ms = self._env.now
        plan = self._loop.decide(self._view())
        self._apply_memory(plan)
        self._idle_plan = plan
        self._idle_since_ms = start_ms
        self._awaited = self._env.event()
        fence_ms = self.memory.next_fence_ms() if self.memory is not None else None
        if fence_ms is None:
            yield self._awaited
        else:
            yield self._awaited | self._env.timeout(max(0.0, fence_ms - start_ms))
            self._awaited = None
        self._settle_idle()

    def _settle_idle(self) -> None:
        plan, start_ms = self._idle_plan, self._idle_since_ms
        duration_ms = self._env.now - start_ms
        sms = sum(job.sms for job in plan.jobs)
        if sms and self.job is not None and self.job.ready:
            self.job.run(start_ms, duration_ms, sms)
            self._steps.idle_finetune_sm_s += sms * duration_ms / 1000.0
        self._idle_plan = None
        self._boundary_ms = self._env.now
        self._steps.idle_s += duration_ms / 1000.0
        self._loop.settle(StepResult(self.index, self._step, 0, 0, (), (), (), duration_ms / 1000.0))

    def _make_room(self) -> Generator[simpy.Event, Any, None]:
        """The batch cannot grow, or a request waits before an empty batch: wait for rows, take them, or preempt."""
        memory = self.memory
        if memory is not None:
            if not memory.fences and memory.rows_held > memory.needs.rows_floor:
                wanted = self._queue[0].kv_tokens + 1 if not self._batch else len(self._batch)
                rows = -(-wanted // self.allocator.geometry.row_tokens)
                memory.shrink(max(memory.needs.rows_floor, memory.rows_held - rows), self._env.now)
            fence_ms = memory.next_fence_ms()
            if fence_ms is not None:
                yield self._env.timeout(max(0.0, fence_ms - self._env.now))
                memory.poll(self._env.now)
                return
        if not self._batch:
            request = self._queue[0]
            raise AuditError(f"instance {self.index}: request {request.spec.index} fits but no memory can be freed for it")
        self._preempt()

    def _decode(self) -> Generator[simpy.Event, Any, None]:
        """Ask for a plan, lay its steps out, live through them, and settle what really happened."""
        view = self._view()
        plan = self._loop.decide(view)
        copied_ms = self._apply_memory(plan)
        split = self._beside(plan)
        job = self.job
        turn_budget_ms = plan.jobs[0].turn_ms if plan.jobs and job is not None and job.ready else 0.0
        state = job.snapshot() if job is not None and turn_budget_ms else None
        opened = OpenPlan(view, plan, split, self._env.now, copied_ms, turn_budget_ms, state)
        decode_ms = self._device.decode_ms(
            self.index, self._step, view.batch, view.kv_tokens, self._horizon(plan), plan.decode_sms, split
        )
        layout = self._lay_out(opened, decode_ms)
        self._open, self._layout = opened, layout
        self._may_interrupt = True
        done = len(layout.ends_ms)
        try:
            yield self._env.timeout(layout.ends_ms[-1] - opened.start_ms)
        except simpy.Interrupt:
            done = min(done, bisect_left(layout.ends_ms, self._env.now) + 1)
            yield self._env.timeout(max(0.0, layout.ends_ms[done - 1] - self._env.now))
        self._may_interrupt = False
        self._settle_steps(opened, layout, done)

    def finish(self, end_ms: float) -> None:
        """The run is over at ``end_ms``: settle the idle time or the whole steps that lie before it."""
        if self._idle_plan is not None:
            self._settle_idle()
        elif self._layout is not None and self._open is not None:
            self._settle_steps(self._open, self._layout, bisect_right(self._layout.ends_ms, end_ms))
        for request in (*self._batch, *self._queue):
            self._note_produced(request)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _beside(self, plan: StepPlan) -> Split | None:
        """The split that the plan shares, `None` when decode runs alone."""
        if self.job is None or not self.job.ready or not sum(job.sms for job in plan.jobs):
            return None
        return self._splits[plan.decode_sms]

    def _horizon(self, plan: StepPlan) -> int:
        """Steps until the plan is no longer valid whatever arrives: its hold, the first completion, or memory."""
        room = self.allocator.view().free_tokens // len(self._batch)
        return max(1, min(plan.hold.steps, room, min(request.remaining for request in self._batch)))

    def _lay_out(self, opened: OpenPlan, decode_ms: Sequence[float]) -> Layout:
        """Boundaries of the coming steps, given what decode takes in each.

        Without turns the job has no say in them, so it is moved once, when the steps are settled. With turns it is moved
        through each step here, and `_settle_steps` takes that back for steps that do not happen.
        """
        job, plan = self.job, opened.plan
        waited_ms = opened.copied_ms
        if job is not None and opened.turn_budget_ms:
            layout = self._with_turns(job, opened, decode_ms, waited_ms)
        else:
            if job is not None and job.sms and job.sms + plan.decode_sms > self._total_sms:
                waited_ms += job.finish_unit()
            latency_ms = list(decode_ms)
            latency_ms[0] += waited_ms
            ends_ms = list(accumulate(latency_ms, initial=opened.start_ms))[1:]
            latency_ms[0] += opened.view.elapsed_ms
            layout = Layout(list(decode_ms), latency_ms, [0.0] * len(latency_ms), ends_ms)
        return layout.first(self._valid_steps(opened, layout))

    def _with_turns(
        self, job: FinetuneJob, opened: OpenPlan, decode_ms: Sequence[float], waited_ms: float
    ) -> Layout:
        """Steps that begin with a turn of whole units; `finish_unit` where decode takes SMs that one still runs on."""
        plan, split, step = opened.plan, opened.split, opened.view.step
        slowdown = self._device.unit_slowdown(split, opened.view.batch) if split is not None else 1.0
        noise = self._device.turn_noise(self.index, step, len(decode_ms))
        limit_ms = math.inf if plan.hold.max_step_ms is None else plan.hold.max_step_ms
        now_ms = opened.start_ms
        elapsed_ms = opened.view.elapsed_ms
        layout = Layout([], [], [], [])
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
            layout.turn_ms.append(turn_ms)
            layout.ends_ms.append(now_ms)
            if elapsed_ms + spent_ms > limit_ms:
                break
            elapsed_ms = waited_ms = 0.0
        layout.moved = len(layout.ends_ms)
        return layout

    def _valid_steps(self, opened: OpenPlan, layout: Layout) -> int:
        """Steps until the hold's bound is broken, or rows come back that somebody waits for; that step still counts."""
        count = len(layout.ends_ms)
        limit_ms = opened.plan.hold.max_step_ms
        if limit_ms is not None and max(layout.latency_ms) > limit_ms:
            count = next(index for index, ms in enumerate(layout.latency_ms, start=1) if ms > limit_ms)
        fence_ms = self.memory.next_fence_ms() if self.memory is not None and opened.view.waiting else None
        if fence_ms is not None:
            count = min(count, bisect_left(layout.ends_ms, fence_ms) + 1)
        return count

    def _settle_steps(self, opened: OpenPlan, layout: Layout, done: int) -> None:
        """Make the first ``done`` of the laid out steps true: tokens, slots, completions, records."""
        view, plan = opened.view, opened.plan
        self._layout = self._open = None
        job = self.job
        layout = layout.first(done)
        if job is not None and opened.job is not None and done < layout.moved:
            job.restore(opened.job)
            self._with_turns(job, opened, layout.decode_ms, opened.copied_ms)
        if done:
            if job is not None and opened.split is not None and opened.job is None:
                slowdown = self._device.unit_slowdown(opened.split, view.batch)
                decode_ms = sum(layout.decode_ms)
                job.run(layout.ends_ms[-1] - decode_ms, decode_ms, opened.split.finetune_sms, slowdown)
            self._device.count_steps(view.batch, view.kv_tokens, done, plan.decode_sms, opened.split)
            self._record(opened, layout)
            self._produce(layout)
            self._boundary_ms = layout.ends_ms[-1]
            self._step += done
        self._loop.settle(
            StepResult(
                self.index,
                view.step,
                view.batch,
                view.kv_tokens,
                tuple(layout.latency_ms),
                tuple(layout.decode_ms),
                tuple(layout.turn_ms),
            )
        )

    def _produce(self, layout: Layout) -> None:
        """Every request of the batch emits one token a step; those that need no more leave."""
        done = len(layout.ends_ms)
        batch = self._batch
        slots = self.allocator.allocate_tokens(done * len(batch)).reshape(done, len(batch))
        self._kv_tokens += done * len(batch)
        last_ms = layout.ends_ms[-1]
        book = self._requests
        for request in self._joined:
            if request.last_token_ms is None:
                book.first_token_s[request.spec.index] = layout.ends_ms[0] / 1000.0
        self._joined = []
        leaving: list[SimRequest] = []
        for column, request in enumerate(batch):
            request.slots.append(slots[:, column])
            request.remaining -= done
            request.kv_tokens += done
            request.last_token_ms = last_ms
            if request.remaining == 0:
                leaving.append(request)
        for request in leaving:
            self._release(request)
            book.state[request.spec.index] = COMPLETED
            book.last_token_s[request.spec.index] = last_ms / 1000.0
            self._finished(request)

    def _record(self, opened: OpenPlan, layout: Layout) -> None:
        """Keep the steps for the result; runs before their tokens are handed out."""
        view, plan, memory, job = opened.view, opened.plan, self.memory, self.job
        gaps_ms = [
            layout.ends_ms[0] - request.last_token_ms
            for request in self._joined
            if request.last_token_ms is not None
        ]
        span = SpanState(
            instance=self.index,
            first_step=view.step,
            start_s=(opened.start_ms - view.elapsed_ms) / 1000.0,
            batch=view.batch,
            joined=len(self._joined),
            kv_tokens=view.kv_tokens,
            waiting=view.waiting,
            decode_sms=plan.decode_sms,
            finetune_sms=opened.split.finetune_sms if opened.split is not None else 0,
            turn_budget_ms=plan.jobs[0].turn_ms if plan.jobs else 0.0,
            predicted_ms=plan.predicted_ms if plan.predicted_ms is not None else math.nan,
            rows_kv=view.memory.rows_kv,
            rows_lent=view.memory.rows_lent,
            window_layers=memory.resident_layers if memory is not None else 0,
            free_but_unlendable_bytes=view.memory.free_but_unlendable_bytes,
            finetune_tokens=job.progress_tokens if job is not None else 0.0,
        )
        self._steps.add(span, layout.latency_ms, layout.decode_ms, layout.turn_ms, gaps_ms)
        self._steps.busy_s += sum(layout.latency_ms) / 1000.0
        if max(layout.latency_ms) > self._limits.qos_ms:
            self._judge(view, layout.latency_ms)

    def _judge(self, view: StepView, latency_ms: Sequence[float]) -> None:
        """Split violations into those that decode alone would have had and those that finetuning caused."""
        for index, ms in enumerate(latency_ms):
            if ms <= self._limits.qos_ms:
                continue
            kv_tokens = view.kv_tokens + index * view.batch
            alone_ms = self._device.alone_ms(self.index, view.step + index, view.batch, kv_tokens)
            if self.job is None or alone_ms > self._limits.qos_ms:
                self._steps.solo_violations += 1
            else:
                self._steps.finetune_violations += 1

    # -- memory -----------------------------------------------------------------------------------------------------

    def refusal(self, request: SimRequest) -> str | None:
        """Why a request could never be completed here; `None` when it could."""
        floor = self.memory.needs.rows_floor if self.memory is not None else 0
        geometry = self.allocator.geometry
        capacity = geometry.capacity_tokens - floor * geometry.row_tokens - PINNED_TOKENS
        needed = request.kv_tokens + request.remaining
        if needed <= capacity:
            return None
        return f"needs {needed} token slots at its longest, a decode instance has {capacity}"

    def _admit(self) -> None:
        """Take waiting requests in order while slots, the reservation and the batch limit allow."""
        batch = self._batch
        while self._queue and len(batch) < self._limits.max_batch:
            request = self._queue[0]
            reserve = self._growth_reserve(len(batch) + 1)
            if not self.allocator.can_allocate_tokens(request.kv_tokens + reserve):
                return
            self._queue.popleft()
            self._queue_tokens -= request.kv_tokens
            request.slots = [self.allocator.allocate_tokens(request.kv_tokens)]
            self._kv_tokens += request.kv_tokens
            batch.append(request)
            self._joined.append(request)

    def _growth_reserve(self, batch: int) -> int:
        """Slots that an admission leaves free for the tokens of the next steps; a lone request needs only its own."""
        if batch == 1:
            return 1
        return max(batch, self._reservation.reserved_tokens(batch) - self._reservation.admission_tokens)

    def _preempt(self) -> None:
        """Send the newest request away; the oldest always goes on, so the instance always gets somewhere."""
        request = max(self._batch, key=lambda member: member.spec.index)
        self._release(request)
        if request in self._joined:
            self._joined.remove(request)
        self._requests.preemptions[request.spec.index] += 1
        self._preempted(request)

    def _release(self, request: SimRequest) -> None:
        self.allocator.free_tokens(request.take_slots())
        self._kv_tokens -= request.kv_tokens
        self._batch.remove(request)
        self._note_produced(request)

    def _note_produced(self, request: SimRequest) -> None:
        self._requests.produced_tokens[request.spec.index] = request.spec.output_tokens - request.remaining

    def _apply_memory(self, plan: StepPlan) -> float:
        """Lend or reclaim towards the plan; returns the time that compaction took."""
        if self.memory is None or not plan.jobs:
            return 0.0
        rows = max(plan.jobs[0].rows, self.memory.needs.rows_floor)
        if rows < self.memory.rows_held:
            self.memory.shrink(rows, self._env.now)
            return 0.0
        if rows == self.memory.rows_held:
            return 0.0
        compaction = self.memory.grow(rows)
        if compaction is None:
            return 0.0
        for request in self._batch:
            request.slots = [compaction.rewrite(np.concatenate(request.slots))]
        token_bytes = self.allocator.geometry.row_bytes // self.allocator.geometry.row_tokens
        return len(compaction.source) * token_bytes / COPY_BYTES_PER_MS

    def _view(self) -> StepView:
        """What is true at this boundary."""
        job, memory = self.job, self.memory
        jobs: tuple[JobView, ...] = ()
        if job is not None and memory is not None:
            jobs = (
                JobView(
                    job.shape.job_id,
                    job.cursor.unit.kind,
                    job.shape.unit_tokens,
                    memory.rows_held,
                    memory.needs.rows_wanted,
                    memory.needs.rows_floor,
                    memory.resident_layers,
                    memory.needs.layers,
                    job.sms,
                    job.in_flight_ms(),
                ),
            )
        elapsed_ms = self._env.now - self._boundary_ms if self._batch else 0.0
        return StepView(
            self.index,
            self._step,
            self._env.now / 1000.0,
            len(self._batch),
            self._kv_tokens,
            len(self._queue),
            self._queue_tokens,
            elapsed_ms,
            self.allocator.view(),
            jobs,
        )
