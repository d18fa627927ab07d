"""Units of one finetuning job, launched just in time: never more than one unit stands before whatever comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backends.cuda.finetune.work import FinetuneWork
from backends.cuda.serving.partitions import Partitions
from backends.cuda.serving.timeline import Timeline
from harli_core.types import UnitKind
from harli_core.units import Unit

LEAD_MS = 0.4
"""A unit is enqueued when the one before it has less than this to go, so that its SMs do not fall idle."""

LEARNING = 0.2
"""Weight of the latest unit in the running ratio of measured to predicted duration."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A unit on its way: when it should end, and the marks around it."""

    kind: UnitKind
    sms: int
    expected_ms: float
    due_ms: float
    begin: Any
    end: Any


class UnitPump:
    """Launches the units of ``work``; a failure of the job stops it here, and never reaches the serving loop.

    ``unit_ms(kind, tokens, sms)`` predicts a unit alone; ``failure`` says why the job stopped, `None` while it has not;
    ``finished``: it came to its end.
    """

    def __init__(
        self,
        work: FinetuneWork,
        partitions: Partitions,
        timeline: Timeline,
        unit_ms: Callable[[UnitKind, int, int], float],
    ) -> None:
        """Nothing is launched yet."""
        self.work: FinetuneWork | None = work
        self.failure: str | None = None
        self.finished = False
        self.launched = 0
        self.progress: list[tuple[float, int]] = []  # (host ms, training tokens) at each optimizer step enqueued
        self.launch_ms_longest = 0.0
        self._partitions = partitions
        self._timeline = timeline
        self._unit_ms = unit_ms
        self._flights: deque[Flight] = deque()
        self._ratio: dict[tuple[UnitKind, int], float] = {}
        self._last_end: Any = None
        self._watched: list[tuple[UnitKind, float]] | None = None

    @property
    def running(self) -> bool:
        """Whether there may be units to launch."""
        return self.work is not None and not self.over

    @property
    def over(self) -> bool:
        """Whether the job has ended, well or not; units in flight may still run."""
        return self.failure is not None or self.finished

    @property
    def last(self) -> Flight | None:
        """The unit that was launched last, while it is in flight."""
        return self._flights[-1] if self._flights else None

    def in_flight_ms(self) -> float:
        """Time that what is in flight still needs, as predicted."""
        return max(0.0, self._flights[-1].due_ms - self._timeline.now_ms()) if self._flights else 0.0

    def next_unit(self) -> Unit | None:
        """The unit that comes next; `None`, and `over`, where the job has ended."""
        if not self.running:
            return None
        assert self.work is not None
        try:
            unit = self.work.next_unit()
            state = None if unit is not None else self.work.state
        except Exception as error:  # whatever it is, serving goes on
            self.stop(f"{type(error).__name__}: {error}")
            return None
        if state is not None and state.status == "finished":
            self.finished = True
        elif state is not None:
            self.stop(state.reason or f"the job {state.status}")
        return unit

    def poll(self) -> None:
        """Forget units that are over, and learn from how long they took."""
        while self._flights and self._timeline.passed(self._flights[0].end):
            flight = self._flights.popleft()
            took_ms = self._timeline.between_ms(flight.begin, flight.end)
            if self._watched is not None:
                self._watched.append((flight.kind, took_ms))
            key = (flight.kind, flight.sms)
            measured = took_ms / flight.expected_ms * self._ratio.get(key, 1.0) if flight.expected_ms > 0 else 1.0
            self._ratio[key] = self._ratio.get(key, 1.0) * (1 - LEARNING) + LEARNING * measured

    def expected_ms(self, unit: Unit, sms: int) -> float:
        """How long ``unit`` should take on ``sms`` SMs."""
        assert self.work is not None
        tokens = self.work.unit_tokens(unit) or 1
        return self._unit_ms(unit.kind, tokens, sms) * self._ratio.get((unit.kind, sms), 1.0)

    def keep_busy(self, sms: int) -> bool:
        """Launch the next unit on ``sms`` SMs if the one in flight is about to end; says whether it did."""
        self.poll()
        if self.in_flight_ms() > LEAD_MS or len(self._flights) > 1:
            return False
        unit = self._ready_unit()
        return unit is not None and self._launch(unit, sms)

    def turn(self, budget_ms: float, interrupted: Callable[[], bool]) -> tuple[Any, Any] | None:
        """Whole units on the whole chip, as many as fit into ``budget_ms``, until ``interrupted()``.

        Returns the marks around them, `None` where none fitted. The last one may still run.
        """
        sms = self._partitions.total_sms
        start_ms = self._timeline.now_ms()
        first: Flight | None = None
        while not interrupted():
            self.poll()
            spent_ms = self._timeline.now_ms() - start_ms
            unit = self._ready_unit()
            if unit is None:
                if not self.running or spent_ms >= budget_ms:
                    break
                continue
            ahead_ms = self.in_flight_ms()
            if spent_ms + ahead_ms + self.expected_ms(unit, sms) > budget_ms:
                break
            if ahead_ms > LEAD_MS or len(self._flights) > 1:
                continue
            if not self._launch(unit, sms):
                break
            first = first or self._flights[-1]
        return None if first is None or self._last_end is None else (first.begin, self._last_end)

    def watch(self) -> None:
        """Begin to keep how long units take."""
        self._watched = []

    def watched(self) -> list[tuple[UnitKind, float]]:
        """The units that ended since `watch`, and their durations; ends it."""
        found, self._watched = self._watched or [], None
        return found

    def stop(self, reason: str) -> None:
        """The job ends here with ``reason``; what is in flight runs out."""
        if self.failure is None:
            self.failure = reason

    def drained(self) -> bool:
        """Whether nothing is in flight."""
        self.poll()
        return not self._flights

    def _ready_unit(self) -> Unit | None:
        """The next unit, if its frozen layer is there."""
        unit = self.next_unit()
        if unit is None:
            return None
        assert self.work is not None
        try:
            return unit if self.work.ready() else None
        except Exception as error:  # whatever it is, serving goes on
            self.stop(f"{type(error).__name__}: {error}")
            return None

    def _launch(self, unit: Unit, sms: int) -> bool:
        assert self.work is not None
        stream = self._partitions.finetune_stream(sms)
        expected_ms = self.expected_ms(unit, sms)
        start_ms = max(self._timeline.now_ms(), self._flights[-1].due_ms if self._flights else 0.0)
        begin = self._timeline.mark(stream)
        before_ms = self._timeline.now_ms()
        try:
            self.work.run(unit, stream)
        except Exception as error:  # whatever it is, serving goes on
            self.stop(f"unit {unit.kind} of layer {unit.layer} failed: {type(error).__name__}: {error}")
            return False
        self.launch_ms_longest = max(self.launch_ms_longest, self._timeline.now_ms() - before_ms)
        end = self._timeline.mark(stream)
        self._flights.append(Flight(unit.kind, sms, expected_ms, start_ms + expected_ms, begin, end))
        self._last_end = end
        self.launched += 1
        tokens = self.work.state.tokens
        if not self.progress or tokens != self.progress[-1][1]:
            self.progress.append((self._timeline.now_ms(), tokens))
        return True
