"""What a profiler's bench measures of units; on streams of arithmetic."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from backends.cuda.serving.bench import HOT_UNITS_MS, KINDS, InstanceBench
from backends.cuda.serving.unit_pump import UnitPump
from harli_core.types import Split
from tests.native.software_gpu import Mark, SoftwareGpu, Stream, Streams, UnitWork, unit_ms

COPY_MS = 9.0


class WatchedGpu(SoftwareGpu):
    """A host that does nothing but look."""

    def passed(self, mark: Mark) -> bool:
        """Looking takes a little."""
        self.now += 0.01
        return super().passed(mark)


class SwappedWork(UnitWork):
    """The layer of each unit comes from the host, and is on its way once somebody has asked for it or must have it."""

    def __init__(self, gpu: SoftwareGpu, streams: Streams) -> None:
        """No layer is there."""
        super().__init__(gpu, streams, KINDS)
        self.copies: dict[int, Mark] = {}
        self.link = Stream(gpu)

    def _copy(self) -> Mark:
        if len(self.ran) not in self.copies:
            self.link.run(COPY_MS)
            self.copies[len(self.ran)] = Mark(self.link.tail_ms)
        return self.copies[len(self.ran)]

    def ready(self) -> bool:
        """Whether the copy is over."""
        return self.gpu.passed(self._copy())

    def run(self, unit: Any, stream: Stream, host_ms: float | None = None) -> None:
        """Behind the copy."""
        stream.wait_event(self._copy())
        super().run(unit, stream, host_ms)


def bench_of(gpu: SoftwareGpu, work: UnitWork, split: Split) -> InstanceBench:
    """A bench with one lane."""
    pump = UnitPump(work, work.streams, gpu, unit_ms)  # type: ignore[arg-type]
    lane, whole = (
        SimpleNamespace(split=one, finetune_stream=work.streams.finetune_stream(one.finetune_sms))
        for one in (split, Split(132, 132))
    )
    partitions = SimpleNamespace(lanes=[lane], whole=whole, total_sms=132)
    job = SimpleNamespace(pump=pump, engine=None, unit_tokens=1024)
    return InstanceBench(SimpleNamespace(job=job, decoder=None, timeline=gpu, partitions=partitions))  # type: ignore[arg-type]


def test_a_unit_takes_as_long_as_it_does_with_its_layer_there() -> None:
    """Copies of a window that is too small for the job are none of a unit's time, as serving launches none before."""
    gpu, split = WatchedGpu(), Split(66, 66)
    work = SwappedWork(gpu, Streams(gpu))
    found = bench_of(gpu, work, split).units(split, 4)
    assert {kind: max(times) for kind, times in found.items()} == pytest.approx(
        {kind: unit_ms(kind, 1024, 66) for kind in KINDS}, abs=0.2
    )
    assert all(len(times) >= 3 for times in found.values())


def test_units_are_measured_on_a_hot_chip() -> None:
    """On the whole chip for long enough, one right behind the other, and those are not counted."""
    gpu, split = WatchedGpu(), Split(66, 66)
    work = UnitWork(gpu, Streams(gpu), KINDS)
    found = bench_of(gpu, work, split).units(split, 4)
    hot = [(begin, end) for (begin, end), sms in zip(work.ran, work.ran_on, strict=True) if sms == 132]
    assert work.ran_on[: len(hot)] == [132] * len(hot)
    assert hot[-1][1] - hot[0][0] >= HOT_UNITS_MS
    assert max(later - earlier for (_, earlier), (later, _) in pairwise(hot)) < 0.2
    assert min(min(times) for times in found.values()) > 1.9
