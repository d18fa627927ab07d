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

from backends.cuda.serving.decoder import Decoder, Finished
from backends.cuda.serving.hosted_job import Job
from backends.cuda.serving.interleaving import Interleaving
from backends.cuda.serving.partitions import Partitions
from backends.cuda.serving.plan_book import PlanBook
from backends.cuda.serving.recorder import Recorder, Span
from backends.cuda.serving.served_request import Served
from backends.cuda.serving.timeline import Timeline
from backends.cuda.serving.turn import Longest
from harli_core.errors import AuditError, ConfigError
from harli_core.loop import DecisionLoop
from harli_core.requests import RequestSpec

SUBMIT_MS = 1.0
"""What taking a request in may need of the host: none is taken in when a step is to end sooner."""

JOINS = 8
"""Admissions that the time for one is made of."""

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
        self.until_launch_ms: list[float] = []  # of each step, from the emission before it
        self.admission_ms: list[float] = []  # what admissions took of that
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
        self._joining = Longest(JOINS)
        self._admitting_ms = 0.0
        self.interleaving = Interleaving(decoder, partitions, timeline, self.plans, job)

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
            before_ms = self._timeline.now_ms()
            some = self._decoder.admit(self._ran_prefill)
            took_ms = self._timeline.now_ms() - before_ms
            self._admitting_ms += took_ms
            if self._note_prefilled():
                self._joining.add(took_ms)
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

    def _note_prefilled(self) -> bool:
        """Requests that join; says whether there are any."""
        now_ms = self._timeline.now_ms()
        new, done = self._decoder.take_prefilled(now_ms)
        self.prefilled_tokens += len(new)
        for served in new:
            if served.emitted == 1:
                elsewhere = self._decoder.prefill == "elsewhere"
                arrival_s = float(self._recorder.requests.arrival_s[served.index])
                self._recorder.first_token(served, arrival_s if elsewhere else (now_ms - self.plans.zero_ms) / 1e3)
        self._leave(done, now_ms)
        over = {served.index for served in done}
        for served in new:
            if served.index not in over:
                self._joined.append(served)
                self._gap_from_ms[served.index] = served.last_token_ms or now_ms
        if new:
            self.plans.settle_span()
        return bool(new)

    def _ran_prefill(self) -> None:
        self.plans.prefilled = True

    def _idle(self) -> None:
        """Nothing to decode: finetuning has what the plan gives it until a request arrives."""
        self.interleaving.drop_turn()
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
        self.interleaving.drop_turn()
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
        held = span.held
        pump = self.interleaving.pump(held)
        units_before = pump.launched if pump is not None else 0
        busy_before = pump is not None and pump.last is not None
        if not self.interleaving.take_turn(held, self._can_join):
            self._interrupt()
            return
        decode_sms = held.plan.decode_sms
        ready_ms = self._timeline.now_ms()
        if not self._decoder.launch(self._partitions.group(decode_sms), self.interleaving.behind(decode_sms)):
            self._joined.clear()  # all were sent back, and will join again
            self._gap_from_ms.clear()
            self.plans.end()
            return
        launch_ms = self._timeline.now_ms() - ready_ms
        self.launch_delay_ms.append(launch_ms)
        self.until_launch_ms.append(ready_ms - self.plans.boundary_ms)
        self.admission_ms.append(self._admitting_ms)
        self._admitting_ms = 0.0
        self.interleaving.lead.add(launch_ms)
        self.interleaving.beside(held, self._while_decoding)
        now_ms = self._timeline.now_ms()
        step = self._decoder.finish(now_ms)
        turn_ms = self.plans.turned_ms + self.interleaving.over(held, now_ms, step)
        self.plans.turned_ms = 0.0
        finetuned = busy_before or turn_ms > 0.0 or (pump is not None and pump.launched > units_before)
        self._emitted(span, step, now_ms, turn_ms, finetuned=finetuned)

    def _while_decoding(self, due_ms: float | None) -> bool:
        """Take requests in if there is time until ``due_ms``; says whether the plan goes on with them."""
        if due_ms is not None and self._timeline.now_ms() + SUBMIT_MS < due_ms:
            self._take_arrivals()
        return not self._arrival_ends_plan()

    def _interrupt(self) -> None:
        """Somebody joins the step that is yet to be launched; its turn goes on after that, or a new plan is made."""
        if self._arrival_ends_plan():
            self.plans.turned_ms += self.interleaving.drop_turn()
            self.plans.end()

    def _emitted(self, span: Span, step: Finished, now_ms: float, turn_ms: float, *, finetuned: bool) -> None:
        plans = self.plans
        latency_ms = now_ms - plans.boundary_ms
        span, thinned = plans.span_of(span, step)
        if not span.steps:
            span.joined = len(self._joined)
            span.join_gap_ms = [now_ms - self._gap_from_ms.pop(served.index) for served in self._joined]
            self._joined = []
        self._recorder.step(span, latency_ms, step.decode_ms, turn_ms, finetuned=finetuned and not plans.prefilled)
        self._leave(step.completed, now_ms)
        plans.emitted(span, now_ms, latency_ms, thinned=thinned, left=bool(step.completed))

    def _can_join(self, until_ms: float) -> bool:
        """Whether somebody has arrived whom the host can let in by the end of the turn, with time to launch the step."""
        if not self._upcoming or len(self._decoder.running) >= self._limits.max_batch or not self._arrivals_due():
            return False
        return self._timeline.now_ms() + SUBMIT_MS + self._joining.ms + self.interleaving.lead.ms <= until_ms

    def _arrivals_due(self) -> list[RequestSpec]:
        """Requests that have arrived since they were last taken."""
        if not self._upcoming or self.draining:
            return []
        now_s = self.now_s
        return list(takewhile(lambda spec: spec.arrival_s <= now_s, self._upcoming))

    def _arrival_ends_plan(self) -> bool:
        """Whether somebody has arrived, or waits to be let in, with whom the plan in force does not hold."""
        due, waiting = self._arrivals_due(), len(self._decoder.waiting)
        if not due and not waiting:
            return False
        tokens = sum(spec.prompt_tokens for spec in due) + self._decoder.waiting_tokens
        return not self.plans.holds_with(len(due) + waiting, tokens)

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
        for served in self._decoder.unfinished:
            self._recorder.produced(served)
        self.plans.end()
        self._loop.finish()
        if self._decoder.idle:
            self._decoder.check_idle()
