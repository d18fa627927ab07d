"""What finetuning's time on the GPU and the host went into: units by kind and SMs, gaps between them, launches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from harli_core.types import UnitKind

SLOW_MS = 4.0
"""A launch longer than this is kept by itself: no unit needs that, so something held the host up."""

MOST_SLOW = 64
"""Slow launches that are kept, the last ones."""


@dataclass(frozen=True, slots=True)
class SlowLaunch:
    """A launch that the host was held up in: when it began (host ms), of what, and how long it took."""

    at_ms: float
    kind: UnitKind
    sms: int
    took_ms: float


@dataclass(slots=True)
class Times:
    """Durations in ms, without keeping each of them."""

    count: int = 0
    total_ms: float = 0.0
    longest_ms: float = 0.0

    def add(self, took_ms: float) -> None:
        """One more."""
        self.count += 1
        self.total_ms += took_ms
        self.longest_ms = max(self.longest_ms, took_ms)


@dataclass(slots=True)
class UnitTimes:
    """``run``: by kind and SMs, on the GPU. ``gap``: by SMs, from the end of the unit before to the begin of this one,
    whatever lay between them. ``launch``: by kind, on the host; ``slow``: its longest ones.
    """

    run: dict[tuple[UnitKind, int], Times] = field(default_factory=dict)
    gap: dict[int, Times] = field(default_factory=dict)
    launch: dict[UnitKind, Times] = field(default_factory=dict)
    slow: deque[SlowLaunch] = field(default_factory=lambda: deque(maxlen=MOST_SLOW))

    def ran(self, kind: UnitKind, sms: int, took_ms: float, gap_ms: float | None) -> None:
        """A unit is over; ``gap_ms`` of `None`: it was the first."""
        self.run.setdefault((kind, sms), Times()).add(took_ms)
        if gap_ms is not None:
            self.gap.setdefault(sms, Times()).add(gap_ms)

    def launched(self, kind: UnitKind, sms: int, at_ms: float, took_ms: float) -> None:
        """A unit was enqueued, from ``at_ms`` of the host clock on."""
        self.launch.setdefault(kind, Times()).add(took_ms)
        if took_ms > SLOW_MS:
            self.slow.append(SlowLaunch(at_ms, kind, sms, took_ms))

    def clear(self) -> None:
        """Begin anew."""
        self.run.clear()
        self.gap.clear()
        self.launch.clear()
        self.slow.clear()
