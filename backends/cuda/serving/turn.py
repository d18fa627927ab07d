"""Finetuning's turn before a decode step: whole units on the whole chip, from one emission on.

Where the plan in force is sure to go on, its first units are enqueued before the emission, to wait for the decode graph on
the GPU, and the host keeps so much in flight that neither its work between two steps nor the launch of the next decode
graph leaves the GPU idle::

    decode graph n ...| unit | unit | unit | unit | decode graph n+1 ...
                 host | results, admission, plan |launch|
"""

from __future__ import annotations

from collections import deque
from typing import Any

from backends.cuda.serving.timeline import Timeline
from backends.cuda.serving.unit_pump import LEAD_MS, Behind, Flight, UnitPump

MOST_LEAD_MS = 2.5
"""What is in flight cannot be taken back: never more than this, whatever launches take."""

LAUNCHES = 32
"""Launches of decode steps that the lead is made of."""


class Longest:
    """The longest of the last durations, in ms; 0 before the first."""

    def __init__(self, count: int) -> None:
        """Of ``count`` of them."""
        self._last: deque[float] = deque(maxlen=count)

    def add(self, took_ms: float) -> None:
        """One more."""
        self._last.append(took_ms)

    @property
    def ms(self) -> float:
        """Of those that are remembered."""
        return max(self._last, default=0.0)


class Lead:
    """How much of a turn is in flight, so that the host may work for as long as launches of a decode step took lately."""

    def __init__(self) -> None:
        """No launch was seen yet."""
        self._launches = Longest(LAUNCHES)

    def add(self, launch_ms: float) -> None:
        """One more launch."""
        self._launches.add(launch_ms)

    @property
    def ms(self) -> float:
        """The longest of the last ones and what a unit needs, within bounds."""
        return min(MOST_LEAD_MS, self._launches.ms + LEAD_MS)


class Turn:
    """One turn; the plan that bounds it may change while it lasts."""

    def __init__(self, pump: UnitPump, timeline: Timeline) -> None:
        """Nothing is launched yet."""
        self.begun_ms = timeline.now_ms()
        self._pump = pump
        self._timeline = timeline
        self._first: Flight | None = None
        self._last: Flight | None = None

    def advance(
        self, until_ms: float, lead_ms: float, behind: Behind | None = None, free_ms: float | None = None
    ) -> bool:
        """Launch until what is in flight lasts for ``lead_ms``; says whether nothing more fits before ``until_ms``.

        Before the emission units wait ``behind`` the decode graph, and the host must be free again at ``free_ms``.
        """
        pump = self._pump
        while True:
            wanted, last = pump.wants_more(lead_ms), pump.last
            if not wanted and last is not None and last.sms == pump.total_sms:
                return pump.due_ms > until_ms  # the whole chip is busy: what fits behind that is seen later, and better
            unit = pump.ready_unit()
            if unit is None:
                return not pump.running or self._timeline.now_ms() >= until_ms
            if pump.ends_ms(unit, pump.total_sms, behind) > until_ms:
                return True
            if not wanted:
                return False
            if not pump.launched_by(unit, free_ms):
                return not pump.running
            # After the emission the host has to launch the decode step in time for the end of the turn.
            if not pump.launch(unit, pump.total_sms, behind, until_ms - lead_ms if free_ms is None else free_ms):
                return not pump.running
            self._last = pump.last
            self._first = self._first or self._last

    @property
    def marks(self) -> tuple[Any, Any] | None:
        """The marks around its units, `None` where none fitted. The last one may still run."""
        return None if self._first is None or self._last is None else (self._first.begin, self._last.end)


def goes_first(pump: UnitPump, finetune_sms: int, behind: Behind) -> bool:
    """Whether the next unit ends sooner on the whole chip, once the decode graph is over, than beside it from now on."""
    unit = pump.ready_unit()
    if unit is None:
        return False
    alone_ms = pump.ends_ms(unit, pump.total_sms, behind)
    return not finetune_sms or alone_ms <= pump.ends_ms(unit, finetune_sms)
