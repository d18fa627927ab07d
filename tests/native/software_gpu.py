"""A GPU of arithmetic: streams run what they were given one after the other, and launches take the host some time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from harli_core.types import UnitKind
from harli_core.units import Unit


@dataclass
class Mark:
    """Everything before it is done at ``at_ms``."""

    at_ms: float


@dataclass
class Stream:
    """Busy until ``tail_ms``."""

    gpu: SoftwareGpu
    tail_ms: float = 0.0

    def wait_event(self, mark: Mark) -> None:
        """What comes now begins after ``mark``."""
        self.tail_ms = max(self.tail_ms, mark.at_ms)

    def run(self, took_ms: float) -> tuple[float, float]:
        """Enqueue work; returns when it begins and ends."""
        begin_ms = max(self.tail_ms, self.gpu.now)
        self.tail_ms = begin_ms + took_ms
        return begin_ms, self.tail_ms


class SoftwareGpu:
    """A `Timeline` whose host clock only moves when somebody works."""

    def __init__(self) -> None:
        """At 0."""
        self.now = 0.0

    def now_ms(self) -> float:
        """See `Timeline`; looking at the clock takes a microsecond."""
        self.now += 0.001
        return self.now

    def mark(self, stream: Stream) -> Mark:
        """See `Timeline`."""
        return Mark(max(stream.tail_ms, self.now))

    def passed(self, mark: Mark) -> bool:
        """See `Timeline`."""
        return mark.at_ms <= self.now

    def between_ms(self, first: Mark, last: Mark) -> float:
        """See `Timeline`; as with events of a GPU, a mark that has not passed is an error."""
        assert max(first.at_ms, last.at_ms) <= self.now, "both marks have passed"
        return last.at_ms - first.at_ms


@dataclass
class Streams:
    """`Partitions` as a pump sees them."""

    gpu: SoftwareGpu
    total_sms: int = 132
    _of: dict[int, Stream] = field(default_factory=dict)

    def finetune_stream(self, sms: int) -> Stream:
        """One a partition."""
        return self._of.setdefault(sms, Stream(self.gpu))

    def sms_of(self, stream: Stream) -> int:
        """How many it has."""
        return next(sms for sms, other in self._of.items() if other is stream)


class UnitWork:
    """Units without end, of given kinds in turn; as long as ``unit_ms`` says, ``launch_ms`` of the host each."""

    def __init__(self, gpu: SoftwareGpu, streams: Streams, kinds: Sequence[UnitKind]) -> None:
        """None has run."""
        self.gpu, self.kinds = gpu, kinds
        self.launch_ms: dict[UnitKind, float] = dict.fromkeys(kinds, 0.1)
        self.ran: list[tuple[float, float]] = []
        self.ran_on: list[int] = []  # SMs of each
        self.host_free_ms: list[float | None] = []  # by when the host had to be free again, as each unit was told
        self.copied_ms: list[float] = []  # when copies of layers were let go on
        self._last: Mark | None = None
        self.streams = streams

    @property
    def state(self) -> Any:
        """Nothing is trained."""
        return SimpleNamespace(tokens=0, status="running", reason=None)

    def next_unit(self) -> Unit:
        """The next one."""
        return Unit(self.kinds[len(self.ran) % len(self.kinds)], 0, 0, 1)

    def unit_tokens(self, _unit: Unit) -> int:
        """The same for all."""
        return 1024

    def ready(self) -> bool:
        """Nothing is swapped."""
        return True

    def copy_layers(self) -> None:
        """Nothing is swapped; when it was asked is kept."""
        self.copied_ms.append(self.gpu.now)

    def run(self, unit: Unit, stream: Stream, host_ms: float | None = None) -> None:
        """Enqueue; units of a job wait for one another."""
        self.host_free_ms.append(None if host_ms is None else self.gpu.now + host_ms)
        self.gpu.now += self.launch_ms[unit.kind]
        if self._last is not None:
            stream.wait_event(self._last)
        sms = self.streams.sms_of(stream)
        self.ran.append(stream.run(self.took_ms(unit.kind, sms)))
        self.ran_on.append(sms)
        self._last = Mark(stream.tail_ms)

    def took_ms(self, kind: UnitKind, sms: int) -> float:
        """How long a unit really takes."""
        return unit_ms(kind, 1024, sms)


def unit_ms(kind: UnitKind, _tokens: int, sms: int) -> float:
    """Backward 2 ms and others 1 ms on the whole chip, and in proportion on a part of it."""
    return (2.0 if kind == "backward" else 1.0) * 132 / sms
