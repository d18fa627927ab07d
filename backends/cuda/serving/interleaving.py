"""Finetuning around the decode steps of a loop: a turn before each, units beside it, the next turn begun behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backends.cuda.serving.decoder import Decoder, Finished
from backends.cuda.serving.hosted_job import Job
from backends.cuda.serving.partitions import Partitions
from backends.cuda.serving.plan_book import PlanBook
from backends.cuda.serving.recorder import HeldPlan
from backends.cuda.serving.timeline import Timeline
from backends.cuda.serving.turn import Lead, Turn, goes_first
from backends.cuda.serving.unit_pump import Behind, UnitPump


class Interleaving:
    """What is in flight when, between and during the steps of one decoder; nothing here waits for the GPU but `beside`."""

    def __init__(
        self, decoder: Decoder, partitions: Partitions, timeline: Timeline, plans: PlanBook, job: Job | None
    ) -> None:
        """No step was launched yet."""
        self.lead = Lead()
        self._decoder = decoder
        self._partitions = partitions
        self._timeline = timeline
        self._plans = plans
        self._job = job
        self._turn: Turn | None = None  # of the coming step
        self._taken: Turn | None = None  # of the step under way
        self._running_ms = 0.0  # when the step under way was last seen to run
        self._decode_ms: dict[int, float] = {}  # the last decode graph on so many SMs
        self._waited: Any = None  # the mark that the last decode graph waited for
        self._units = 0  # launched before that
        self._gap_from: Any = None  # that mark, where its unit was launched since the graph before
        self.start_gap_ms: list[float] = []
        """From the end of the unit that a decode graph waited for to its begin: the host had not launched it yet."""

    def pump(self, held: HeldPlan) -> UnitPump | None:
        """Where units come from under a plan; `None`: it has none."""
        running = self._job is not None and held.plan.jobs and self._job.pump.running
        return self._job.pump if self._job is not None and running else None

    def drop_turn(self) -> float:
        """The coming step has no turn, or another one: what is in flight runs out. Returns how long it had lasted."""
        turn, self._turn = self._turn, None
        self._plans.turn_begun = False
        return 0.0 if turn is None else self._timeline.now_ms() - max(self._plans.boundary_ms, turn.begun_ms)

    def take_turn(self, held: HeldPlan, interrupted: Callable[[float], bool]) -> bool:
        """Units until the turn of the coming step is over; `False`: ``interrupted(until_ms)``, and it may go on later."""
        pump = self.pump(held)
        if pump is not None and held.turn_budget_ms:
            self._turn = self._turn or Turn(pump, self._timeline)
            # What the host needs between two steps comes off the turn, unless the policy knew of it.
            until_ms = self._plans.boundary_ms + held.elapsed_ms + held.turn_budget_ms
            while not interrupted(until_ms):
                if self._advance(self._turn, until_ms, self.lead.ms):
                    break
            else:
                return False
        self._taken = self._turn
        self.drop_turn()
        return True

    def behind(self, decode_sms: int) -> Any:
        """What a decode graph on so many SMs waits for, on the GPU: a unit that still runs on some of them, or nothing."""
        flight = self._job.pump.last if self._job is not None else None
        self._waited = flight.end if flight is not None and self._crosses(flight.sms, decode_sms) else None
        units = self._job.pump.launched if self._job is not None else 0
        # After a pause the last unit may have ended long ago, and nobody has looked since.
        self._gap_from = self._waited if units != self._units else None
        self._units = units
        return self._waited

    def beside(self, held: HeldPlan, meanwhile: Callable[[float | None], bool]) -> None:
        """Until the step that was launched is over: units beside it, then the first ones of the next turn, behind it.

        ``meanwhile(due_ms)`` may use the host for what has time until then, and says whether the plan goes on.
        """
        pump, due_ms = self.pump(held), self._due_ms(held.plan.decode_sms)
        finetune_sms, limit_ms = held.finetune_sms, held.plan.hold.max_step_ms
        while True:
            now_ms = self._timeline.now_ms()
            if self._job is not None:
                self._job.pump.copy_layers()
            goes_on = meanwhile(due_ms)
            late = limit_ms is not None and now_ms - self._plans.boundary_ms > limit_ms
            if pump is not None and not late:
                turn_first = due_ms is not None and goes_on and self._turn_first(held, pump, due_ms)
                if due_ms is not None and self._turn is not None:
                    self._advance_behind(held, self._turn, due_ms)
                elif finetune_sms and not turn_first:
                    awaited = due_ms is None or due_ms <= now_ms
                    pump.keep_busy(finetune_sms, None if awaited else due_ms, awaited=awaited)
            if self._decoder.done():
                return
            self._running_ms = now_ms

    def over(self, held: HeldPlan, now_ms: float, step: Finished) -> float:
        """The step is over: the next turn goes on while the host reads the results. Returns how long its own turn was."""
        if self._turn is not None and self._job is not None:
            self._job.pump.unblock(self._running_ms, now_ms)
            self._advance(self._turn, now_ms + held.turn_budget_ms, self.lead.ms)
        self._decode_ms[held.plan.decode_sms] = step.decode_ms
        finetunes = self.pump(held) is not None  # else the last unit may have ended long before
        if finetunes and self._gap_from is not None and self._timeline.passed(self._gap_from):
            self.start_gap_ms.append(self._timeline.between_ms(self._gap_from, step.begin))
        marks = self._taken.marks if self._taken is not None else None
        self._taken = None
        return self._timeline.between_ms(*marks) if marks is not None and self._timeline.passed(marks[1]) else 0.0

    def _turn_first(self, held: HeldPlan, pump: UnitPump, due_ms: float) -> bool:
        """Whether the next unit is left to the next step's turn, which is sure to come; begins that when it is time."""
        lead_ms = self.lead.ms
        if self._turn is not None or held.steps_left < 2 or held.turn_budget_ms < 2.0 * lead_ms:
            return False
        first = goes_first(pump, held.finetune_sms, self._behind(due_ms))
        if first and due_ms - self._timeline.now_ms() <= lead_ms:
            self._turn = Turn(pump, self._timeline)
        return first

    def _advance_behind(self, held: HeldPlan, turn: Turn, due_ms: float) -> None:
        behind = self._behind(due_ms)
        lead_ms = behind.due_ms - self._timeline.now_ms() + self.lead.ms
        self._advance(turn, behind.due_ms + held.turn_budget_ms, lead_ms, behind, due_ms)

    def _advance(
        self, turn: Turn, until_ms: float, lead_ms: float, behind: Behind | None = None, free_ms: float | None = None
    ) -> bool:
        """See `Turn.advance`; a unit beside decode that still runs is none of the turn's, and plans must know of it."""
        over = turn.advance(until_ms, lead_ms, behind, free_ms)
        self._plans.turn_begun = turn.marks is not None
        return over

    def _behind(self, due_ms: float) -> Behind:
        """Behind the step that was launched, which is over at ``due_ms`` or, if that has passed, any time now."""
        return Behind(self._decoder.launched_end, max(self._timeline.now_ms(), due_ms))

    def _due_ms(self, decode_sms: int) -> float | None:
        """When the step that was launched should be over; `None`: nothing is known, or on a CPU, where it is over."""
        decode_ms, began_ms = self._decode_ms.get(decode_sms), self._decoder.began_ms
        if decode_ms is None or self._decoder.stream is None:
            return None
        if self._job is not None and self._waited is not None:
            began_ms = max(began_ms, self._job.pump.due_ms)
        return began_ms + decode_ms

    def _crosses(self, sms: int, decode_sms: int) -> bool:
        """Whether a unit on ``sms`` SMs has some that decode takes."""
        return sms + decode_sms > self._partitions.total_sms
