"""The loop of a serving process: decode steps under a policy, finetuning in every gap; one thread, nothing waits on the GPU.

::

    emission n                                                             emission n+1
       | results, arrivals, admission | plan |              launch                     |
       | turn: units on all SMs .............................| decode graph on its SMs |
       |                                                     | units beside it         |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from backends.cuda.serving.decoder import Decoder, Finished, Served
from backends.cuda.serving.hosted_job import Job
from backends.cuda.serving.partitions import Partitions
from backends.cuda.serving.plan_book import PlanBook
from backends.cuda.serving.recorder import HeldPlan, Recorder, Span
from backends.cuda.serving.timeline import Timeline
from backends.cuda.serving.turn import Lead, Turn, goes_first
from backends.cuda.serving.unit_pump import Behind, UnitPump
from harli_core.errors import AuditError, ConfigError
from harli_core.loop import DecisionLoop
from harli_core.requests import RequestSpec
from harli_core.types import StepPlan

SPARE_TOKENS = 8
"""Slots that are no request's: SGLang's padding slot, and the few that it keeps in hand when it admits."""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """``horizon_s`` ends the run (`None`: when every request is done)."""

    max_batch: int
    horizon_s: float | None


class ServingLoop:
    """Drives one decode instance until its requests are done, the horizon is reached, or it is asked to drain."""

    def __init__(
        self,
        decoder: Decoder,
        partitions: Partitions,
        timeline: Timeline,
        loop: DecisionLoop,
        recorder: Recorder,
        arrivals: Iterator[RequestSpec],
        prompt_of: Callable[[RequestSpec], Sequence[int]],
        limits: LoopLimits,
        job: Job | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """``prompt_of`` gives the token ids of a request; ``progress`` is told the number of requests that are done."""
        self.job = job
        self.draining = False
        self.finished: list[Served] = []
        self.launch_delay_ms: list[float] = []
        self.prefilled_tokens = 0
        self._decoder = decoder
        self._partitions = partitions
        self._timeline = timeline
        self._loop = loop
        self.plans = PlanBook(decoder, timeline, loop, recorder, job)
        self._recorder = recorder
        self._prompt_of = prompt_of
        self._limits = limits
        self._progress = progress
        self._upcoming = deque(arrivals)
        books = decoder.memory.allocator
        floor_rows = job.memory.needs.rows_floor if job is not None else 0
        self._capacity_tokens = (books.geometry.rows - floor_rows) * books.geometry.row_tokens - SPARE_TOKENS
        self._done = 0
        self._joined: list[Served] = []
        self._gap_from_ms: dict[int, float] = {}
        self._lead = Lead()
        self._turn: Turn | None = None  # the coming step's, where it was begun ahead of the emission
        self._decode_ms: dict[int, float] = {}  # the last decode graph on so many SMs

    @property
    def decide_ms(self) -> list[float]:
        """How long each decision took."""
        return self.plans.decide_ms

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return (self._timeline.now_ms() - self.plans.zero_ms) / 1e3

    @property
    def zero_s(self) -> float:
        """The host clock when the run began."""
        return self.plans.zero_ms / 1e3

    def drain(self) -> None:
        """Take no more requests; the run ends when those that arrived are done. Safe in a signal handler."""
        self.draining = True

    def check_integrity(self) -> None:
        """Books of memory, and what SGLang's requests hold of it."""
        self._decoder.check_integrity()

    def run(self) -> float:
        """Serve; returns the duration in seconds. Requests under way at the horizon stay unfinished."""
        self.plans.begin()
        while True:
            self._take_arrivals()
            if self.job is not None:
                self.job.tend(self._timeline.now_ms())
            over = self._limits.horizon_s is not None and self.now_s >= self._limits.horizon_s
            if over or (self._decoder.idle and (self.draining or not self._upcoming)):
                break
            if self._decoder.idle:
                self._idle()
                continue
            some = self._decoder.admit(self._ran_prefill)
            self._note_prefilled()
            if some:
                self._decode_step()
            elif self._decoder.waiting:
                self._make_room()
        self._close()
        return self.now_s

    # Between steps

    def _take_arrivals(self) -> None:
        now_s = self.now_s
        book = self._recorder.requests
        while self._upcoming and not self.draining and self._upcoming[0].arrival_s <= now_s:
            spec = self._upcoming.popleft()
            book.arrival_s[spec.index] = spec.arrival_s
            if spec.prompt_tokens + spec.output_tokens > self._capacity_tokens:
                book.reject(
                    spec.index,
                    f"prompt and output need more token slots than a decode instance has ({self._capacity_tokens})",
                )
                self._count_done()
                continue
            try:
                self._decoder.submit(spec.index, self._prompt_of(spec), spec.output_tokens, self._timeline.now_ms())
            except ConfigError as error:
                book.reject(spec.index, str(error).split(": ", 1)[-1])
                self._count_done()

    def _note_prefilled(self) -> None:
        now_ms = self._timeline.now_ms()
        new, done = self._decoder.take_prefilled(now_ms)
        self.prefilled_tokens += len(new)
        for served in new:
            if served.emitted == 1:
                elsewhere = self._decoder.prefill == "elsewhere"
                arrival_s = float(self._recorder.requests.arrival_s[served.index])
                self._recorder.first_token(served, arrival_s if elsewhere else (now_ms - self.plans.zero_ms) / 1e3)
            self._recorder.produced(served)
        self._leave(done, now_ms)
        over = {served.index for served in done}
        for served in new:
            if served.index not in over:
                self._joined.append(served)
                self._gap_from_ms[served.index] = served.last_token_ms or now_ms
        if new:
            self.plans.settle_span()

    def _ran_prefill(self) -> None:
        self.plans.prefilled = True

    def _idle(self) -> None:
        """Nothing to decode: finetuning has what the plan gives it until a request arrives."""
        self._drop_turn()
        view, plan = self.plans.idle_plan()
        sms = sum(part.sms for part in plan.jobs)
        start_ms = self._timeline.now_ms()
        if self.job is not None:
            self.job.sweep()
        while self._decoder.idle and not self.draining:
            if self._limits.horizon_s is not None and self.now_s >= self._limits.horizon_s:
                break
            if not self._upcoming:
                break
            if self.job is not None and sms and self.job.pump.running:
                self.job.pump.keep_busy(sms)
            if self.job is not None:
                self.job.tend(self._timeline.now_ms())
            self._take_arrivals()
        now_ms = self._timeline.now_ms()
        self._recorder.idle(view, now_ms - start_ms, sms)
        self.plans.boundary_ms = now_ms

    def _make_room(self) -> None:
        """Requests wait before an empty batch: ask for rows, and wait for their fences."""
        self._drop_turn()
        self.plans.end()
        self.plans.awaited = True
        if self.job is None:
            raise AuditError("requests wait for memory, and there is no finetuning job that could give some back")
        memory = self.job.memory
        if not memory.under_way:
            geometry = self._decoder.memory.allocator.geometry
            rows = -(-self._decoder.waiting_tokens // geometry.row_tokens) + 1
            memory.shrink(max(0, memory.rows_held - rows), self._timeline.now_ms())
            if not memory.under_way:
                raise AuditError("requests wait for memory although all that can be given back was")
        memory.poll(self._timeline.now_ms())
        self._decoder.scheduler.running_batch.batch_is_full = False

    # One step

    def _decode_step(self) -> None:
        span = self.plans.opened()
        held, job = span.held, self.job
        plan = held.plan
        pump = job.pump if job is not None and plan.jobs and job.pump.running else None
        units_before = pump.launched if pump is not None else 0
        busy_before = pump is not None and pump.last is not None
        turn = self._turn
        self._drop_turn()
        if pump is not None and held.turn_budget_ms and not self.plans.turn_done:
            turn = turn or Turn(pump, self._timeline)
            # What the host needs between two steps comes off the turn, unless the policy knew of it.
            until_ms = self.plans.boundary_ms + held.elapsed_ms + held.turn_budget_ms
            while not self._arrival_ends_plan() and not turn.advance(until_ms, self._lead.ms):
                pass
            if self._arrivals_due() and len(self._decoder.running) < self._limits.max_batch:
                # They join the step that is yet to be launched: under this plan, whose turn is over then, or a new one.
                self.plans.turned_ms += self._timeline.now_ms() - max(self.plans.boundary_ms, turn.begun_ms)
                if self._arrival_ends_plan():
                    self.plans.end()
                else:
                    self.plans.turn_done = True
                return
        self._order_behind_units(plan)
        ready_ms = self._timeline.now_ms()
        if not self._decoder.launch(self._partitions.group(plan.decode_sms)):
            self.plans.end()
            return
        launch_ms = self._timeline.now_ms() - ready_ms
        self.launch_delay_ms.append(launch_ms)
        self._lead.add(launch_ms)
        self._beside(held, pump, self._due_ms(plan, ready_ms))
        now_ms = self._timeline.now_ms()
        step = self._decoder.finish(now_ms)
        if pump is not None and self._turn is not None:
            self._turn.advance(now_ms + held.turn_budget_ms, self._lead.ms)
        self._decode_ms[plan.decode_sms] = step.decode_ms
        marks = turn.marks if turn is not None else None
        turn_ms = self.plans.turned_ms
        if marks is not None:
            turn_ms += self._timeline.between_ms(*marks) if self._timeline.passed(marks[1]) else 0.0
        self.plans.turned_ms, self.plans.turn_done = 0.0, False
        finetuned = busy_before or (pump is not None and pump.launched > units_before)
        self._emitted(span, step, now_ms, turn_ms, finetuned=finetuned)

    def _beside(self, held: HeldPlan, pump: UnitPump | None, due_ms: float | None) -> None:
        """Until the step is over: units beside it, then the first ones of the next turn, behind it."""
        finetune_sms, limit_ms = held.finetune_sms, held.plan.hold.max_step_ms
        while True:
            now_ms = self._timeline.now_ms()
            late = limit_ms is not None and now_ms - self.plans.boundary_ms > limit_ms
            if pump is not None and not late:
                if due_ms is not None and self._turn is None:
                    self._begin_turn(held, pump, due_ms)
                if due_ms is not None and self._turn is not None:
                    self._advance_behind(held, self._turn, due_ms)
                elif finetune_sms:
                    pump.keep_busy(finetune_sms, due_ms if due_ms is not None and due_ms > now_ms else None)
            if self._decoder.done():
                return

    def _begin_turn(self, held: HeldPlan, pump: UnitPump, due_ms: float) -> None:
        """Begin the next step's turn before this one is over, if that is sure to come and it is time for it."""
        left_ms, lead_ms = due_ms - self._timeline.now_ms(), self._lead.ms
        goes_on = held.steps_left > 1 and not self._decoder.waiting and not self._arrivals_due()
        if not goes_on or left_ms > lead_ms or held.turn_budget_ms < 2.0 * lead_ms:
            return
        if goes_first(pump, held.finetune_sms, self._behind(due_ms)):
            self._turn = Turn(pump, self._timeline)
            self.plans.turn_begun = True

    def _advance_behind(self, held: HeldPlan, turn: Turn, due_ms: float) -> None:
        behind = self._behind(due_ms)
        lead_ms = behind.due_ms - self._timeline.now_ms() + self._lead.ms
        turn.advance(behind.due_ms + held.turn_budget_ms, lead_ms, behind, due_ms)

    def _behind(self, due_ms: float) -> Behind:
        """Behind the step that was launched, which is over at ``due_ms`` or, if that has passed, any time now."""
        return Behind(self._decoder.launched_end, max(self._timeline.now_ms(), due_ms))

    def _due_ms(self, plan: StepPlan, ready_ms: float) -> float | None:
        """When the step launched at ``ready_ms`` should be over; `None`: nothing is known, or on a CPU, where it is over."""
        decode_ms = self._decode_ms.get(plan.decode_sms)
        if decode_ms is None or self._decoder.stream is None:
            return None
        flight = self.job.pump.last if self.job is not None else None
        if flight is None or flight.sms + plan.decode_sms <= self._partitions.total_sms:
            return ready_ms + decode_ms
        return max(ready_ms, flight.due_ms) + decode_ms

    def _drop_turn(self) -> None:
        """Whatever of it is in flight runs out."""
        self._turn = None
        self.plans.turn_begun = False

    def _emitted(self, span: Span, step: Finished, now_ms: float, turn_ms: float, *, finetuned: bool) -> None:
        plans = self.plans
        latency_ms = now_ms - plans.boundary_ms
        span, thinned = plans.span_of(span, step)
        if not span.steps:
            span.joined = len(self._joined)
            span.join_gap_ms = [now_ms - self._gap_from_ms.pop(served.index) for served in self._joined]
            self._joined = []
        self._recorder.step(span, latency_ms, step.decode_ms, turn_ms, finetuned=finetuned and not plans.prefilled)
        for served in step.emitted:
            self._recorder.produced(served)
        self._leave(step.completed, now_ms)
        plans.emitted(span, now_ms, latency_ms, thinned=thinned, left=bool(step.completed))

    def _order_behind_units(self, plan: StepPlan) -> None:
        """Decode waits, on the GPU, for a unit that still runs on SMs that it takes."""
        if self.job is None or self._decoder.stream is None:
            return
        flight = self.job.pump.last
        if flight is not None and flight.sms + plan.decode_sms > self._partitions.total_sms:
            self._decoder.stream.wait_event(flight.end)

    def _arrivals_due(self) -> list[RequestSpec]:
        """Requests that have arrived since they were last taken."""
        if not self._upcoming or self.draining:
            return []
        now_s = self.now_s
        return list(takewhile(lambda spec: spec.arrival_s <= now_s, self._upcoming))

    def _arrival_ends_plan(self) -> bool:
        """Whether somebody has arrived with whom the plan in force does not hold."""
        due = self._arrivals_due()
        return bool(due) and not self.plans.holds_with(due)

    def _leave(self, done: Sequence[Served], now_ms: float) -> None:
        for served in done:
            self._recorder.produced(served)
            self._recorder.requests.complete(served.index, (now_ms - self.plans.zero_ms) / 1e3)
            self.finished.append(served)
            self._count_done()

    def _count_done(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done)

    def _close(self) -> None:
        """Settle what is open; if nothing is left to serve, SGLang checks itself for leaks."""
        self.plans.end()
        self._loop.finish()
        if self._decoder.idle:
            self._decoder.check_idle()
