"""Measures a GPU's operating points: what a profile is fitted to, in the schema of `harli_core.predict.samples`.

For each (batch, context) requests are put in place once, their KV taken as arrived, and every graph set decodes a few
steps: alone, then beside units of the job on the split's other SMs. Units alone, prompts, and two long sequences follow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from backends.cuda.serving.instance import Instance
from backends.cuda.serving.partitions import Lane
from harli_core.types import UnitKind
from harli_core.units import Unit

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. Batches and contexts are the corners of the region that steps lie in, and points between."""

    points: Sequence[tuple[int, int]]
    beside: Sequence[tuple[int, int]]
    repeats: int = 4
    beside_steps: int = 6
    unit_repeats: int = 8
    sequence_batch: int = 64
    sequence_context: int = 1024
    sequence_steps: int = 600


QUICK = Grid(
    points=(
        (1, 256),
        (8, 512),
        (16, 2048),
        (32, 512),
        (32, 2048),
        (64, 512),
        (64, 1024),
        (128, 512),
        (128, 1024),
        (256, 512),
    ),
    beside=((8, 512), (32, 1024), (64, 512), (64, 1024), (128, 1024)),
)
"""Well under five minutes on an H200 for one finetuned model."""


class Profiler:
    """Takes an instance that has a job and serves with prefill ``elsewhere``."""

    def __init__(self, instance: Instance, grid: Grid) -> None:
        """Nothing is measured yet; raises `ValueError` without a job."""
        if instance.job is None:
            raise ValueError("a profile is measured beside a finetuning job: add one first")
        self._instance = instance
        self._job = instance.job
        self._decoder = instance.decoder
        self._timeline = instance.timeline
        self._grid = grid
        self._next = 0
        self._alone: dict[tuple[UnitKind, int], float] = {}

    def lines(self, model: str, finetune_model: str, gpu: str, driver: int, torch_version: str) -> Iterator[Line]:
        """All samples, the machine first; each as soon as it is measured."""
        partitions = self._instance.partitions
        layers = int(self._decoder.scheduler.model_config.num_hidden_layers)
        splits = [[lane.split.decode_sms, lane.split.finetune_sms] for lane in partitions.lanes]
        yield {
            "kind": "device", "gpu": gpu, "sms": partitions.total_sms, "driver": driver, "torch": torch_version,
            "model": model, "layers": layers, "splits": splits,
        }  # fmt: skip
        pairs: dict[int, float] = {}
        for lane in (partitions.whole, *partitions.lanes):
            for line in self._units(finetune_model, lane):
                if line["unit"] in ("forward", "backward"):
                    pairs[line["sm"]] = pairs.get(line["sm"], 0.0) + median(line["ms"])
                yield line
        steps = (self._grid.repeats + self._grid.beside_steps + 2) * partitions.groups
        for batch, context in sorted({*self._grid.points, *self._grid.beside}):
            self._put_in_place(batch, context, steps)
            for lane in (partitions.whole, *partitions.lanes):
                solo = self._decode(lane, self._grid.repeats)
                if (batch, context) in self._grid.points:
                    yield {
                        "kind": "decode_solo", "batch": batch, "context": context, "sm": lane.split.decode_sms,
                        "sm_count_target": False, "ms": solo,
                    }  # fmt: skip
                if (batch, context) in self._grid.beside and lane is not partitions.whole:
                    yield self._beside(lane, batch, context, median(solo), pairs, finetune_model)
            self._clear()
        yield from self._sequences()

    def _put_in_place(self, batch: int, context: int, steps: int) -> None:
        """``batch`` requests of about ``context`` tokens each, ready to decode ``steps`` steps."""
        ids = [1] * context
        for _ in range(batch):
            self._next += 1
            self._decoder.submit(-self._next, ids, steps + 4, 0.0)
        while len(self._decoder.running) < batch:
            self._decoder.admit(lambda: None)
            self._decoder.take_prefilled(0.0)

    def _clear(self) -> None:
        self._instance.settle()

    def _decode(self, lane: Lane, steps: int, *, beside: bool = False) -> list[float]:
        """Durations of ``steps`` decode graphs after a first one that is not counted."""
        group = self._instance.partitions.group(lane.split.decode_sms)
        found = []
        for _ in range(steps + 1):
            self._decoder.launch(group)
            while not self._decoder.done():
                if beside:
                    self._job.pump.keep_busy(lane.split.finetune_sms)
            found.append(round(self._decoder.finish(0.0).decode_ms, 4))
        return found[1:]

    def _beside(
        self, lane: Lane, batch: int, context: int, solo_ms: float, pairs: dict[int, float], finetune_model: str
    ) -> Line:
        """Decode beside forward and backward units, and how long those take then."""
        pump = self._job.pump
        while self._next_kind() not in ("forward", "backward"):
            pump.keep_busy(lane.split.finetune_sms)
        pump.watch()
        decode_ms = self._decode(lane, self._grid.beside_steps, beside=True)
        while not pump.drained():
            pass
        units = pump.watched()
        sms = lane.split.finetune_sms
        ratios = [took / alone for kind, took in units if (alone := self._alone_ms(kind, sms)) > 0.0]
        pair_ms = pairs[sms]
        return {
            "kind": "colocated", "finetune_model": finetune_model, "ft_tokens": self._job.unit_tokens, "batch": batch,
            "context": context, "sm_infer": lane.split.decode_sms, "sm_ft": sms, "sm_count_target": True,
            "decode_solo_ms": solo_ms, "decode_ms": decode_ms, "unit_pair_solo_ms": round(pair_ms, 4),
            "unit_pair_ms": round(pair_ms * (median(ratios) if ratios else 1.0), 4),
        }  # fmt: skip

    def _units(self, model: str, lane: Lane) -> Iterator[Line]:
        """Each kind of unit alone on the lane's finetune SMs."""
        sms = lane.split.finetune_sms
        wanted: dict[UnitKind, list[float]] = {"forward": [], "head_loss": [], "backward": [], "optimizer": []}
        work = self._job.pump.work
        assert work is not None
        until_s = time.perf_counter() + 60.0
        while min(len(found) for found in wanted.values()) < min(3, self._grid.unit_repeats):
            unit = work.next_unit()
            if unit is None or time.perf_counter() > until_s:
                raise RuntimeError(f"the job gives no units: {work.state}")
            took_ms = self._run_alone(unit, lane)
            if len(wanted[unit.kind]) < self._grid.unit_repeats:
                wanted[unit.kind].append(round(max(took_ms, 1e-4), 4))
        for kind, found in wanted.items():
            self._alone[kind, sms] = median(found)
            yield {
                "kind": "finetune_unit", "model": model, "unit": kind, "tokens": self._job.unit_tokens, "sm": sms,
                "sm_count_target": True, "ms": found,
            }  # fmt: skip

    def _run_alone(self, unit: Unit, lane: Lane) -> float:
        work = self._job.pump.work
        assert work is not None
        stream = lane.finetune_stream
        begin = self._timeline.mark(stream)
        work.run(unit, stream)
        end = self._timeline.mark(stream)
        while not self._timeline.passed(end):
            pass
        return self._timeline.between_ms(begin, end)

    def _sequences(self) -> Iterator[Line]:
        """Many consecutive steps alone, and beside finetuning on two splits, for the tail."""
        grid, partitions = self._grid, self._instance.partitions
        middle = partitions.lanes[len(partitions.lanes) // 2 :][:1] + partitions.lanes[:1]
        for lane, beside in ((partitions.whole, False), *((lane, True) for lane in middle)):
            self._put_in_place(grid.sequence_batch, grid.sequence_context, grid.sequence_steps + 1)
            ms = self._decode(lane, grid.sequence_steps, beside=beside)
            yield {
                "kind": "colocated_sequence" if beside else "decode_sequence", "batch": grid.sequence_batch,
                "context": grid.sequence_context + grid.sequence_steps // 2, "sm_infer": lane.split.decode_sms,
                "sm_ft": lane.split.finetune_sms if beside else 0, "ms": ms,
            }  # fmt: skip
            self._clear()

    def _next_kind(self) -> UnitKind:
        work = self._job.pump.work
        unit = work.next_unit() if work is not None else None
        if unit is None:
            raise RuntimeError(f"the job stopped: {self._job.pump.failure}")
        return unit.kind

    def _alone_ms(self, kind: UnitKind, sms: int) -> float:
        return self._alone.get((kind, sms), 0.0) if kind in ("forward", "backward") else 0.0
