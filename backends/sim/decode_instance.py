"""One decode instance: continuous batching, KV growth, preemption, and the finetuning beside it.

At every step boundary: rows whose fence has passed come back, waiting requests are admitted, the decision loop is
asked, memory moves towards the plan, and the plan's steps are laid out ahead until it no longer holds. A request that
arrives in the middle cuts them at the next boundary, so nothing in them depends on the future; one that arrives in
finetuning's turn ends it at the next unit, and joins the step whose decode is yet to be launched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from backends.sim.counting_allocator import CountingAllocator
from backends.sim.device_model import DeviceModel
from backends.sim.finetune_job import FinetuneJob
from backends.sim.job_memory import JobMemory
from backends.sim.request import SimRequest
from backends.sim.running_batch import RunningBatch
from backends.sim.step_layout import HeldPlan, Span, StepLayout, StepScheduler
from backends.sim.step_recorder import StepRecorder
from backends.sim.turns import Turn
from backends.sim.waiting_line import WaitingLine
from harli_core.errors import AuditError
from harli_core.loop import DecisionLoop
from harli_core.memory.reservation import Reservation
from harli_core.records import RequestBook, StepBook
from harli_core.types import Split, StepPlan, StepResult, StepView

PINNED_TOKENS = 1
"""Slots at the start of row 0 that padded entries of a decode graph write to."""

ROUNDING_MS = 1e-6
"""Times that differ by less are one."""

COPY_BYTES_PER_MS = 4.0e9 / 2
"""Compaction reads and writes every byte at the measured copy bandwidth (4 TB/s)."""


@dataclass(frozen=True, slots=True)
class InstanceLimits:
    """What bounds an instance beside its memory: the batch size, and the target that violations are judged by.

    ``exact_steps``: every step is an event of its own. That changes the speed, never the result.
    """

    max_batch: int
    qos_ms: float
    exact_steps: bool = False


class DecodeInstance:
    """A SimPy process around one `DecisionLoop`.

    ``capacity_tokens`` is what requests can hold at most, when finetuning has given back all that it can.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        device: DeviceModel,
        loop: DecisionLoop,
        allocator: CountingAllocator,
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
        floor_tokens = job_memory.needs.rows_floor * allocator.geometry.row_tokens if job_memory is not None else 0
        self.capacity_tokens = allocator.geometry.capacity_tokens - PINNED_TOKENS - floor_tokens
        self._env = env
        self._device = device
        self._loop = loop
        self._requests = requests
        self._scheduler = StepScheduler(index, device, job, limits.exact_steps)
        self._recorder = StepRecorder(index, device, job, job_memory, steps, limits.qos_ms)
        self._preempted = preempted
        self._finished = finished
        self._total_sms = device.capabilities.total_sms
        self._splits = {split.decode_sms: split for split in device.capabilities.splits}
        self._batch = RunningBatch(allocator.tokens, requests)
        self._queue = WaitingLine(allocator.tokens, reservation, limits.max_batch)
        self._step = 0
        self._boundary_ms = 0.0
        self._until_ms = 0.0
        self._turned_ms = 0.0
        self._held: HeldPlan | None = None
        self._turn_start_ms: float | None = None
        self._ahead: tuple[Span, StepLayout] | None = None
        self._idle: tuple[StepPlan, float] | None = None
        self._last_boundary: simpy.Event | None = None
        self._awaited: simpy.Event | None = None
        env.process(self._run())

    def submit(self, request: SimRequest) -> None:
        """A request arrives with its prompt's KV; it joins the batch at the next boundary that has room."""
        self._requests.instance[request.spec.index] = self.index
        self._queue.add(request)
        if self._awaited is not None:
            self._awaited.succeed()
            self._awaited = None
        elif self._last_boundary is not None and self._ahead is not None:
            self._cut_short(*self._ahead, self._last_boundary)
            self._last_boundary = None

    def kv_load_tokens(self) -> int:
        """Tokens held now and promised to requests in the queue."""
        kv_tokens = self._batch.kv_tokens + self._queue.kv_tokens
        if self._ahead is not None:
            span, layout = self._ahead
            kv_tokens += span.batch * bisect_right(layout.ends_ms, self._env.now)
        return kv_tokens

    @property
    def unfinished(self) -> int:
        """Requests that are here and not done."""
        return len(self._batch) + len(self._queue)

    def finish(self, end_ms: float) -> None:
        """The run is over at ``end_ms``: settle the idle time or the whole steps that lie before it."""
        if self._idle is not None:
            self._settle_idle(*self._idle)
        elif self._ahead is not None:
            span, layout = self._ahead
            layout.cut(bisect_right(layout.ends_ms, end_ms))
            self._settle(span, layout)
        self._loop.finish()
        self._batch.note_unfinished()
        for request in self._queue:
            self._requests.note_produced(request.spec.index, request.remaining)

    def check_integrity(self) -> None:
        """Check the books of this instance; raises `AuditError` or `MemoryAccountingError`."""
        self.allocator.check_integrity()
        self._batch.check_integrity()
        if self.job is not None:
            self.job.swaps.window.check_integrity()

    def _now_ms(self) -> float:
        """The time; after `_wait_until` just that one, which the clock of the simulation hits only up to rounding."""
        now_ms = self._env.now
        return self._until_ms if abs(now_ms - self._until_ms) < ROUNDING_MS else now_ms

    def _wait_until(self, time_ms: float) -> simpy.Event:
        """An event at ``time_ms``, or now if that is over."""
        self._until_ms = time_ms
        return self._env.timeout(max(0.0, time_ms - self._env.now))

    def _run(self) -> Generator[simpy.Event, Any, None]:
        batch, memory = self._batch, self.memory
        while True:
            if memory is not None and memory.fences:
                memory.poll(self._now_ms())
            self._queue.join(batch)
            grows = bool(batch) and batch.can_grow()
            steps_held = self._steps_held()
            if self._turn_start_ms is not None and not (steps_held and grows):
                yield from self._call_off_turn(self._turn_start_ms)
            elif grows:
                yield from self._decode(steps_held)
            elif batch or self._queue:
                yield from self._make_room()
            else:
                yield from self._wait_for_requests()

    def _wait_for_requests(self) -> Generator[simpy.Event, Any, None]:
        """Nothing to decode: finetuning has what the plan gives it until a request arrives (or rows come back)."""
        self._held = None
        plan = self._loop.decide(self._view())
        self._apply_memory(plan)
        self._idle = (plan, self._now_ms())
        self._awaited = self._env.event()
        fence_ms = self.memory.next_fence_ms() if self.memory is not None else None
        if fence_ms is None:
            yield self._awaited
        else:
            yield self._awaited | self._wait_until(fence_ms)
            self._awaited = None
        self._settle_idle(*self._idle)

    def _settle_idle(self, plan: StepPlan, start_ms: float) -> None:
        self._idle = None
        now_ms = self._now_ms()
        duration_ms = now_ms - start_ms
        sms = sum(job.sms for job in plan.jobs) if self.job is not None and self.job.ready else 0
        if sms and self.job is not None:
            self.job.run(start_ms, duration_ms, sms)
        self._recorder.record_idle(duration_ms, sms)
        self._boundary_ms = now_ms
        self._loop.settle(StepResult(self.index, self._step, 0, 0, (), (), (), duration_ms / 1000.0))

    def _make_room(self) -> Generator[simpy.Event, Any, None]:
        """The batch cannot grow, or requests wait before an empty one: wait for rows, ask for rows, or preempt."""
        batch, memory = self._batch, self.memory
        self._held = None
        if memory is not None:
            memory.make_room(len(batch) if batch else self._queue.first.kv_tokens + 1, self._now_ms())
            fence_ms = memory.next_fence_ms()
            if fence_ms is not None:
                yield self._wait_until(fence_ms)
                return
        if not batch:
            waiting = self._queue.first.spec.index
            raise AuditError(f"instance {self.index}: request {waiting} fits, but no memory can be freed for it")
        self._preempted(batch.preempt())

    def _decode(self, steps_held: int) -> Generator[simpy.Event, Any, None]:
        """Lay steps out under the plan in force, or a new one, live through them, and settle what really happened.

        The plan in force can go on for ``steps_held`` steps.
        """
        span = self._open(self._held) if self._held is not None and steps_held else self._decide()
        steps = min(steps_held or span.held.steps_left, self._batch.steps_left())
        layout = StepLayout()
        self._ahead = (span, layout)
        while not layout.ended and len(layout.ends_ms) < steps:
            self._scheduler.extend(span, layout, steps - len(layout.ends_ms))
            self._last_boundary = self._wait_until(layout.ends_ms[-1])
            yield self._last_boundary
            if self._last_boundary is None:  # a request arrived
                break
        self._last_boundary = None
        self._settle(span, layout)

    def _cut_short(self, span: Span, layout: StepLayout, last_boundary: simpy.Event) -> None:
        """A request arrived amid the steps of ``layout``: what waits for the last of them is to wait for the one under way.

        If that one's decode is yet to be launched, what waits hears of the request at once.
        """
        now_ms = self._env.now
        running = layout.running(now_ms)
        if span.held.turn is not None and layout.in_turn(running, now_ms):
            layout.cut(running)
            self._leave_in_turn(span, layout)
            boundary: simpy.Event = self._env.timeout(0.0)
        else:
            layout.cut(running + 1)
            boundary = self._wait_until(layout.ends_ms[-1])
        boundary.callbacks, last_boundary.callbacks = last_boundary.callbacks, boundary.callbacks

    def _steps_held(self) -> int:
        """For how many steps the plan in force can go on with the batch as it is now."""
        held, batch, kv_tokens = self._held, len(self._batch), self._batch.kv_tokens
        if held is None or self._queue or not batch or not held.plan.hold.covers(batch, kv_tokens):
            return 0
        most = held.plan.hold.most_kv_tokens
        return held.steps_left if most is None else min(held.steps_left, 1 + (most - kv_tokens) // batch)

    def _decide(self) -> Span:
        """Ask for a plan at this boundary and put it in force."""
        job, view = self.job, self._view()
        plan = self._loop.decide(view)
        copied_ms = self._apply_memory(plan)
        split: Split | None = None
        turn: Turn | None = None
        if job is not None and job.ready and plan.jobs:
            split = self._splits[plan.decode_sms] if any(part.sms for part in plan.jobs) else None
            if plan.jobs[0].turn_ms:
                beside_sms = split.finetune_sms if split is not None else 0
                turn = Turn(plan.jobs[0].turn_ms, self._total_sms, plan.decode_sms, beside_sms)
        self._held = HeldPlan(plan, split, turn, plan.hold.steps)
        span = self._open(self._held)
        span.elapsed_ms, span.copied_ms = view.elapsed_ms, copied_ms
        span.turned_ms, self._turned_ms = self._turned_ms, 0.0
        if self.memory is not None and view.waiting:
            span.fence_ms = self.memory.next_fence_ms()
        return span

    def _open(self, held: HeldPlan) -> Span:
        """Steps of the batch as it is now, from this boundary on, or from the one before the turn under way."""
        start_ms = self._now_ms() if self._turn_start_ms is None else self._turn_start_ms
        self._turn_start_ms = None
        width, tokens = len(self._batch), self.allocator.tokens
        return Span(
            held,
            self._device.at(held.plan.decode_sms, held.split, width),
            self._step,
            start_ms,
            width,
            self._batch.kv_tokens,
            len(self._queue),
            tokens.rows_in_use,
            tokens.rows_withheld,
            self.allocator.free_but_unlendable_bytes,
            self.job.snapshot() if self.job is not None and held.turn is not None else None,
        )

    def _leave_in_turn(self, span: Span, layout: StepLayout) -> None:
        """A request arrived in the turn after the steps of ``layout``: remember where that turn began."""
        if layout.ends_ms:
            self._turn_start_ms = layout.ends_ms[-1]
            return
        self._turn_start_ms = span.start_ms + span.copied_ms
        self._turned_ms = span.turned_ms
        if span.elapsed_ms or span.copied_ms:
            self._held = None

    def _call_off_turn(self, start_ms: float) -> Generator[simpy.Event, Any, None]:
        """No plan holds with the request that arrived before decode was launched.

        It can still join the step, so the turn that began at ``start_ms`` ends at the next unit, for a new plan.
        """
        self._turn_start_ms, self._held = None, None
        used_ms = self._scheduler.call_off_turn(self._step, start_ms, self._env.now)
        self._turned_ms += used_ms
        yield self._wait_until(start_ms + used_ms)

    def _settle(self, span: Span, layout: StepLayout) -> None:
        """Make the steps of ``layout`` true: finetune progress, records, tokens, completions."""
        self._ahead = None
        self._scheduler.settle(span, layout)
        done = len(layout.ends_ms)
        if not done:
            return
        held = span.held
        self._recorder.record(span, layout, self._batch.joined)
        self._boundary_ms = layout.ends_ms[-1]
        self._step += done
        held.steps_left = 0 if layout.ended else held.steps_left - done
        held.fresh = False
        for request in self._batch.emit(layout.ends_ms):
            self._requests.complete(request.spec.index, self._boundary_ms / 1000.0)
            self._finished(request)
        parts = (tuple(layout.latency_ms), tuple(layout.decode_ms), tuple(layout.turn_ms))
        self._loop.settle(StepResult(self.index, span.step, span.batch, span.kv_tokens, *parts))

    def _apply_memory(self, plan: StepPlan) -> float:
        """Lend or reclaim towards the plan; returns the time that compaction took."""
        if self.memory is None or not plan.jobs:
            return 0.0
        moves = self.memory.follow(plan.jobs[0].rows, len(self._batch), self._now_ms())
        if moves is None:
            return 0.0
        self._batch.rewrite(moves)
        return moves.tokens * self.allocator.geometry.token_bytes / COPY_BYTES_PER_MS

    def _view(self) -> StepView:
        """What is true at this boundary."""
        batch, now_ms = self._batch, self._now_ms()
        return StepView(
            self.index,
            self._step,
            now_ms / 1000.0,
            len(batch),
            batch.kv_tokens,
            len(self._queue),
            self._queue.kv_tokens,
            now_ms - self._boundary_ms if batch else 0.0,
            self.allocator.view(),
            (self.memory.view(),) if self.memory is not None else (),
        )
