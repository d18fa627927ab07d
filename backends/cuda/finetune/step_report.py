"""What an optimizer step came to, and its way from the device to the host without waiting."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepReport:
    """One complete optimizer step; ``step`` counts from 1, ``loss`` is the mean over its trained tokens."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    samples: tuple[int, ...]

    @property
    def sound(self) -> bool:
        """Whether loss and gradient norm are numbers; otherwise the step changed nothing."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True)
class _Pending:
    values: Any
    event: Any
    step: int
    learning_rate: float
    tokens: int
    samples: tuple[int, ...]

    def report(self) -> StepReport:
        """Read the values, which must have arrived."""
        loss, norm = self.values.tolist()
        return StepReport(self.step, loss, norm, self.learning_rate, self.tokens, self.samples)


class Reports:
    """Reports under way, oldest first."""

    def __init__(self, device: Any) -> None:
        """None yet."""
        self._cuda = device.type == "cuda"
        self._pending: deque[_Pending] = deque()
        self._all: dict[int, _Pending | StepReport] = {}

    def send(self, loss: Any, norm: Any, step: int, rate: float, tokens: int, samples: tuple[int, ...]) -> None:
        """Queue the copies of ``loss`` and ``norm`` behind the step that made them."""
        import torch

        values = torch.stack([loss.to(torch.float64), norm.to(torch.float64)])
        event = None
        if self._cuda:
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            host.copy_(values, non_blocking=True)
            values, event = host, torch.cuda.Event()
            event.record()
        sent = _Pending(values, event, step, rate, tokens, samples)
        self._pending.append(sent)
        self._all[step] = sent

    def arrived(self, *, wait: bool = False) -> Iterator[StepReport]:
        """Take the reports that are here; ``wait`` for all of them."""
        while self._pending:
            first = self._pending[0]
            if first.event is not None:
                if wait:
                    first.event.synchronize()
                elif not first.event.query():
                    return
            self._pending.popleft()
            report = first.report()
            self._all[first.step] = report
            yield report

    def up_to(self, step: int) -> list[StepReport]:
        """All reports of this engine up to ``step``, which must be complete on the device; for any thread."""
        sent = [self._all[number] for number in sorted(self._all) if number <= step]
        return [entry.report() if isinstance(entry, _Pending) else entry for entry in sent]
