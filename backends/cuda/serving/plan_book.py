"""The plan in force on a decode instance: for which batch it holds, when a new one is due, what memory it moves."""

from __future__ import annotations

from backends.cuda.serving.decoder import Decoder, Finished
from backends.cuda.serving.hosted_job import Job
from backends.cuda.serving.recorder import HeldPlan, Recorder, Span
from backends.cuda.serving.timeline import Timeline
from harli_core.loop import DecisionLoop
from harli_core.types import JobView, StepPlan, StepView


class PlanBook:
    """What the loop has done since the last emission is noted here: ``turned_ms`` of a turn that ended early,
    ``prefilled`` and ``awaited`` where prompts or rows took time from the coming step.
    ``turn_begun``: what is in flight is of the coming step's turn already, so a new plan need not make room for it.
    """

    def __init__(
        self, decoder: Decoder, timeline: Timeline, loop: DecisionLoop, recorder: Recorder, job: Job | None
    ) -> None:
        """No plan yet."""
        self.step = 0
        self.zero_ms = self.boundary_ms = 0.0
        self.turned_ms = 0.0
        self.turn_begun = self.prefilled = self.awaited = False
        self.decide_ms: list[float] = []
        self._decoder = decoder
        self._timeline = timeline
        self._loop = loop
        self._recorder = recorder
        self._job = job
        self._held: HeldPlan | None = None
        self._span: Span | None = None

    def begin(self) -> None:
        """The run begins now."""
        self.zero_ms = self.boundary_ms = self._timeline.now_ms()

    def idle_plan(self) -> tuple[StepView, StepPlan]:
        """A plan for a time in which nothing decodes."""
        self.end()
        view = self._view()
        plan = self._decide(view)
        self._apply_memory(plan)
        return view, plan

    def emitted(self, span: Span, now_ms: float, latency_ms: float, *, thinned: bool, left: bool) -> None:
        """A step of ``span`` is over: count it, and end what it ends. ``left``: requests left with it."""
        self.prefilled = self.awaited = False
        self.boundary_ms = now_ms
        self.step += 1
        held = span.held
        held.steps_left -= 1
        held.elapsed_ms = 0.0
        limit_ms = held.plan.hold.max_step_ms
        if thinned or not held.steps_left or (limit_ms is not None and latency_ms > limit_ms):
            self.end()
        elif left:
            self.settle_span()

    def holds_with(self, requests: int, tokens: int) -> bool:
        """Whether the plan in force holds when ``requests`` more with ``tokens`` tokens of KV join."""
        held, span = self._held, self._span
        if held is None or span is None or span.waiting:
            return False
        return held.plan.hold.covers(span.batch + requests, span.kv_tokens_now + tokens)

    def span_of(self, span: Span, step: Finished) -> tuple[Span, bool]:
        """The span that ``step`` belongs to; another one where SGLang sent requests back to wait for slots."""
        batch = step.batch
        if batch == span.batch:
            return span, False
        if span.steps:
            self.settle_span()
            span = self._span = self._open_span(span.held, batch, span.kv_tokens_now * batch // span.batch)
        span.batch = batch
        return span, True

    def opened(self) -> Span:
        """The span under way; a new one of the plan in force, if that covers the batch as it is now; or of a new plan."""
        span, held = self._span, self._held
        if held is not None and not self._holds(held, span):
            self.end()
            span = held = None
        if span is None:
            if held is None:
                view = self._view()
                held = self._held = self._planned(view)
                span = self._open_span(held, view.batch, view.kv_tokens)
            else:
                span = self._open_span(held, len(self._decoder.running), self._decoder.kv_tokens)
            self._span = span
        return span

    def _holds(self, held: HeldPlan, span: Span | None) -> bool:
        """Whether the plan is still good: for the batch that it has (``span``), or for another one.

        Time that prompts took from the coming step is nothing that it knew of.
        """
        hold = held.plan.hold
        if self.prefilled:
            return False
        if held.plan.jobs and (self._job is None or self._job.pump.over):
            return False
        if span is not None:
            same = len(self._decoder.scheduler.waiting_queue) == span.waiting
            return same and (hold.most_kv_tokens is None or span.kv_tokens_now <= hold.most_kv_tokens)
        if self._decoder.scheduler.waiting_queue:
            return False
        return hold.covers(len(self._decoder.running), self._decoder.kv_tokens)

    def _planned(self, view: StepView) -> HeldPlan:
        """Ask for a plan, and let memory move towards it."""
        plan = self._decide(view)
        self._apply_memory(plan)
        active = self._job is not None and bool(plan.jobs)
        return HeldPlan(
            plan,
            plan.hold.steps,
            sum(part.sms for part in plan.jobs) if active else 0,
            plan.jobs[0].turn_ms if active else 0.0,
            plan.predicted_ms,
            view.elapsed_ms,
        )

    def _open_span(self, held: HeldPlan, batch: int, kv_tokens: int) -> Span:
        books, job = self._decoder.memory.allocator, self._job
        return Span(
            held,
            self.step,
            batch,
            kv_tokens,
            len(self._decoder.scheduler.waiting_queue),
            books.slots.rows_in_use,
            books.slots.rows_withheld,
            books.free_but_unlendable_bytes,
            (self.boundary_ms - self.zero_ms) / 1e3,
            job.memory.window_layers if job is not None else 0,
            float(self._tokens()),
        )

    def settle_span(self) -> None:
        """The batch changed: what it did so far is told; the plan may go on."""
        if self._span is not None:
            span, self._span = self._span, None
            self._recorder.settle(span)

    def end(self) -> None:
        """A new plan is needed for whatever comes next."""
        self.settle_span()
        self._held = None

    def _apply_memory(self, plan: StepPlan) -> None:
        """Lend or reclaim towards the plan; the tokens of the next step keep their slots."""
        job = self._job
        if job is None or not plan.jobs or not job.pump.running:
            return
        memory = job.memory
        rows = max(plan.jobs[0].rows, memory.needs.rows_floor)
        if rows < memory.rows_held:
            memory.shrink(rows, self._timeline.now_ms())
            return
        books = self._decoder.memory.allocator
        spare = books.slots.free_tokens - len(self._decoder.running)
        memory.grow(min(rows, memory.rows_held + max(0, spare) // books.geometry.row_tokens))

    def _view(self) -> StepView:
        decoder, job = self._decoder, self._job
        jobs: tuple[JobView, ...] = ()
        now_ms = self._timeline.now_ms()
        if job is not None:
            unit = job.pump.next_unit()
            memory, flight = job.memory, None if self.turn_begun else job.pump.last
            if unit is not None:
                jobs = (
                    JobView(
                        job.job_id, unit.kind, job.unit_tokens, memory.rows_held, memory.needs.rows_wanted,
                        memory.needs.rows_floor, memory.window_layers, memory.needs.layers,
                        flight.sms if flight is not None else 0,
                        job.pump.in_flight_ms() if flight is not None else 0.0,
                    ),
                )  # fmt: skip
        batch = len(decoder.running)
        return StepView(
            self._recorder.instance,
            self.step,
            (now_ms - self.zero_ms) / 1e3,
            batch,
            decoder.kv_tokens,
            len(decoder.waiting),
            decoder.waiting_tokens,
            now_ms - self.boundary_ms if batch and (self.turned_ms or self.awaited or self.prefilled) else 0.0,
            decoder.memory.allocator.view(),
            jobs,
        )

    def _decide(self, view: StepView) -> StepPlan:
        before_ms = self._timeline.now_ms()
        plan = self._loop.decide(view)
        self.decide_ms.append(self._timeline.now_ms() - before_ms)
        return plan

    def _tokens(self) -> int:
        work = self._job.pump.work if self._job is not None else None
        return work.state.tokens if work is not None else 0
