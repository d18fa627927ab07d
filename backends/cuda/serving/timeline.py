"""Time in a serving loop: the clock, and marks in streams that can be asked whether they have passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Timeline(Protocol):
    """Nothing here waits."""

    def now_ms(self) -> float:
        """Monotonic time on the host."""
        ...

    def mark(self, stream: Any) -> Any:
        """A mark behind everything that ``stream`` was given so far."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether all of it is done."""
        ...

    def between_ms(self, first: Any, last: Any) -> float:
        """Time on the device between two marks that have passed."""
        ...


class HostTimeline:
    """Calls are complete when they return, so every mark has passed."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """``clock_s`` gives seconds."""
        self._clock_s = clock_s

    def now_ms(self) -> float:
        """See `Timeline`."""
        return self._clock_s() * 1e3

    def mark(self, stream: Any) -> Any:  # noqa: ARG002
        """The time of the call."""
        return self.now_ms()

    def passed(self, mark: Any) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def between_ms(self, first: Any, last: Any) -> float:
        """See `Timeline`."""
        return float(last - first)


class CudaTimeline:
    """Events of the driver, kept for reuse."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """``clock_s`` gives seconds."""
        import torch

        self._clock_s = clock_s
        self._torch: Any = torch

    def now_ms(self) -> float:
        """See `Timeline`."""
        return self._clock_s() * 1e3

    def mark(self, stream: Any) -> Any:
        """An event recorded on ``stream``."""
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def passed(self, mark: Any) -> bool:
        """See `Timeline`."""
        return bool(mark.query())

    def between_ms(self, first: Any, last: Any) -> float:
        """See `Timeline`."""
        return float(first.elapsed_time(last))
