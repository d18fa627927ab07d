"""Units of one finetuning job, launched just in time: never more than one unit stands before whatever comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from backends.cuda.finetune.work import FinetuneWork
from backends.cuda.serving.partitions import Partitions
from backends.cuda.serving.timeline import Timeline
from backends.cuda.serving.unit_times import UnitTimes
from harli_core.types import UnitKind
from harli_core.units import Unit

LEAD_MS = 0.4
"""In a turn so much of a unit is in flight beyond what the host is expected to need, so that the chip does not fall idle."""

BESIDE_LEAD_MS = 1.2
"""Beside decode a unit is enqueued when the one before it has less than this to go: the host may be at something else."""

LEARNING = 0.2
"""Weight of the latest unit in the running ratio of measured to predicted duration."""

MOST_LAUNCH_MS = 4.0
"""A launch that took longer was held up by something else: no unit is kept from the GPU for it."""

FORGETTING = 0.95
"""The longest launch of a kind of unit counts so much less with each later one."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A unit on its way: what was predicted for it, what that is expected to be now, the marks around it.

    It cannot begin before ``from_ms``, which is an estimate while it ``waits`` for other work.
    """

    kind: UnitKind
    sms: int
    predicted_ms: float
    expected_ms: float
    from_ms: float
    begin: Any
    end: Any
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Behind:
    """Work of another stream that units wait for, on the GPU: the mark after it, and when it should have passed."""

    end: Any
    due_ms: float


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
        self.times = UnitTimes()
        self.total_sms = partitions.total_sms
        self._launch_ms: dict[UnitKind, float] = {}
        self._partitions = partitions
        self._timeline = timeline
        self._unit_ms = unit_ms
        self._flights: deque[Flight] = deque()
        self._ratio: dict[tuple[UnitKind, int], float] = {}
        self._watched: list[tuple[UnitKind, float]] | None = None
        self._polled_ms = self._ended_ms = 0.0
        self._end_before: Any = None  # the mark after the unit that ended last

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
        now_ms = self._timeline.now_ms()
        return max(0.0, self._due_ms(now_ms) - now_ms)

    @property
    def due_ms(self) -> float:
        """When what is in flight should be over."""
        return self._due_ms(self._timeline.now_ms())

    def _due_ms(self, now_ms: float) -> float:
        due_ms = self._ended_ms
        for flight in self._flights:
            due_ms = max(now_ms, max(due_ms, flight.from_ms) + flight.expected_ms)  # it is not over yet
        return due_ms

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
        """Forget units that are over, and learn from how long they took; let copies of layers go on."""
        self.copy_layers()
        now_ms = self._timeline.now_ms()
        while self._flights and self._timeline.passed(self._flights[0].end):
            flight = self._flights.popleft()
            took_ms = self._timeline.between_ms(flight.begin, flight.end)
            if self._watched is not None:
                self._watched.append((flight.kind, took_ms))
            before, self._end_before = self._end_before, flight.end
            gap_ms = None if before is None else self._timeline.between_ms(before, flight.begin)
            self.times.ran(flight.kind, flight.sms, took_ms, gap_ms)
            due_ms = max(self._ended_ms, flight.from_ms) + flight.expected_ms
            self._ended_ms = min(now_ms, max(due_ms, self._polled_ms))  # it was not over at the last look
            key, ratio = (flight.kind, flight.sms), took_ms / flight.predicted_ms if flight.predicted_ms > 0 else 1.0
            self._ratio[key] = self._ratio.get(key, 1.0) * (1 - LEARNING) + LEARNING * ratio
        self._polled_ms = now_ms

    def copy_layers(self) -> None:
        """Let copies of layers go on: also where a plan has no unit to launch now, so that the next ones find theirs."""
        if not self.running:
            return
        assert self.work is not None
        try:
            self.work.copy_layers()
        except Exception as error:  # whatever it is, serving goes on
            self.stop(f"{type(error).__name__}: {error}")

    def unblock(self, running_ms: float, now_ms: float) -> None:
        """What units wait for (`Behind`) is over by ``now_ms``, and was not at ``running_ms``: date them by that."""
        for place, flight in enumerate(self._flights):
            if flight.waits:
                from_ms = min(now_ms, max(running_ms, flight.from_ms))
                self._flights[place] = replace(flight, from_ms=from_ms, waits=False)

    def predicted_ms(self, unit: Unit, sms: int) -> float:
        """How long the profile says that ``unit`` takes on ``sms`` SMs."""
        assert self.work is not None
        return self._unit_ms(unit.kind, self.work.unit_tokens(unit) or 1, sms)

    def expected_ms(self, unit: Unit, sms: int) -> float:
        """How long it should take, going by those before it."""
        return self.predicted_ms(unit, sms) * self._ratio.get((unit.kind, sms), 1.0)

    def keep_busy(self, sms: int, free_ms: float | None = None, *, awaited: bool = False) -> bool:
        """Launch the next unit on ``sms`` SMs if the one in flight is about to end; says whether it did.

        The host must be free again at ``free_ms``: a unit that takes longer to launch is left for later. ``awaited``: at a
        time unknown, maybe now, so it has no time for more than a launch.
        """
        if not self.wants_more(BESIDE_LEAD_MS):
            return False
        unit = self.ready_unit()
        if unit is None or not self.launched_by(unit, free_ms):
            return False
        return self.launch(unit, sms, free_ms=self._timeline.now_ms() if awaited else free_ms)

    def wants_more(self, lead_ms: float) -> bool:
        """Whether what is in flight lasts for less than ``lead_ms``."""
        self.poll()
        return not self._flights or self.in_flight_ms() <= lead_ms

    def launched_by(self, unit: Unit, free_ms: float | None) -> bool:
        """Whether the host should have launched ``unit`` by ``free_ms`` if it began now."""
        return free_ms is None or self._timeline.now_ms() + self._launch_ms.get(unit.kind, 0.0) <= free_ms

    def ends_ms(self, unit: Unit, sms: int, behind: Behind | None = None) -> float:
        """When ``unit`` should end on ``sms`` SMs, launched now: behind what is in flight, and ``behind``."""
        start_ms = max(self._timeline.now_ms(), self.due_ms, behind.due_ms if behind is not None else 0.0)
        return start_ms + self.expected_ms(unit, sms)

    def watch(self) -> None:
        """Begin to keep how long units take."""
        self._watched = []

    def watched(self) -> list[tuple[UnitKind, float]]:
        """The units that ended since `watch`, and their durations; ends it."""
        found, self._watched = self._watched or [], None
        return found

    def forget_times(self) -> None:
        """What `times` and `progress` have is of a run that is over."""
        self.times.clear()
        self.progress.clear()
        self._end_before = None

    def stop(self, reason: str) -> None:
        """The job ends here with ``reason``; what is in flight runs out."""
        if self.failure is None:
            self.failure = reason

    def drained(self) -> bool:
        """Whether nothing is in flight."""
        self.poll()
        return not self._flights

    def ready_unit(self) -> Unit | None:
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

    def launch(self, unit: Unit, sms: int, behind: Behind | None = None, free_ms: float | None = None) -> bool:
        """Enqueue `ready_unit` on ``sms`` SMs, the host free again at ``free_ms``; `False`: the job failed."""
        assert self.work is not None
        stream = self._partitions.finetune_stream(sms)
        predicted_ms, expected_ms = self.predicted_ms(unit, sms), self.expected_ms(unit, sms)
        before_ms = self._timeline.now_ms()
        from_ms = before_ms if behind is None else max(before_ms, behind.due_ms)
        if stream is not None:
            if self._flights and self._flights[-1].sms != sms:
                stream.wait_event(self._flights[-1].end)  # as the job does; so that ``begin`` is after it too
            if behind is not None:
                stream.wait_event(behind.end)
        begin = self._timeline.mark(stream)
        try:
            self.work.run(unit, stream, None if free_ms is None else free_ms - before_ms)
        except Exception as error:  # whatever it is, serving goes on
            self.stop(f"unit {unit.kind} of layer {unit.layer} failed: {type(error).__name__}: {error}")
            return False
        end = self._timeline.mark(stream)
        took_ms = self._timeline.now_ms() - before_ms
        self.times.launched(unit.kind, sms, before_ms, took_ms)
        self._launch_ms[unit.kind] = max(min(took_ms, MOST_LAUNCH_MS), FORGETTING * self._launch_ms.get(unit.kind, 0.0))
        self._flights.append(Flight(unit.kind, sms, predicted_ms, expected_ms, from_ms, begin, end, behind is not None))
        self.launched += 1
        tokens = self.work.state.tokens
        if not self.progress or tokens != self.progress[-1][1]:
            self.progress.append((self._timeline.now_ms(), tokens))
        return True
