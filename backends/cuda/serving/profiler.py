"""Measures a GPU's operating points within a time budget: what a profile is fitted to (`harli_core.predict.samples`).

Units alone, prompts and long sequences come first, as every profile needs them. Then decode steps on every split, alone
and beside units: at a few corners, from there on wherever the predictor is least sure, and in the end at a second context of
batches that have one, until the time is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from harli_core.predict.fit import least_squares
from harli_core.predict.next_point import OperatingPoint, next_point
from harli_core.predict.solo import SoloPoint
from harli_core.types import Split

if TYPE_CHECKING:
    from backends.cuda.serving.bench import Bench

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Extent:
    """What is measured at least, what may be chosen, and when it is enough.

    ``corners`` come always (five batch sizes or more, two contexts); ``batches`` x ``contexts`` below ``most_kv_tokens``
    are the candidates. It ends before ``budget_s`` is over, or when the predictor is surer than ``sure`` everywhere and
    batches have two contexts where candidates allow it.
    """

    corners: Sequence[OperatingPoint]
    batches: Sequence[int]
    contexts: Sequence[int]
    most_kv_tokens: int
    prompts: Sequence[int] = (512, 2048, 8192)
    budget_s: float = 280.0
    sure: float = 0.01
    repeats: int = 4
    beside_from_batch: int = 8
    beside_steps: int = 6
    unit_repeats: int = 8
    sequence_batch: int = 64
    sequence_context: int = 1024
    sequence_steps: int = 600

    def candidates(self, measured: Sequence[OperatingPoint]) -> list[OperatingPoint]:
        """Points that were not measured yet."""
        return [
            point
            for batch in self.batches
            for context in self.contexts
            if (point := OperatingPoint(batch, context)).kv_tokens <= self.most_kv_tokens and point not in measured
        ]


QUICK = Extent(
    corners=tuple(
        OperatingPoint(*pair) for pair in ((1, 256), (8, 512), (32, 2048), (64, 512), (128, 1024), (256, 512))
    ),
    batches=(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256),
    contexts=(256, 1024, 2048, 4096),
    most_kv_tokens=192 * 1024 + 1024,  # 96 requests of 2,048 tokens: conversations hold more than 1,024
)
"""For a served model on an H200 in five minutes; batches are those that decode graphs are captured for."""


class Profiler:
    """Drives ``bench``; time is ``clock_s``."""

    def __init__(self, bench: Bench, extent: Extent, clock_s: Callable[[], float] = time.perf_counter) -> None:
        """Nothing is measured yet; the budget begins with `lines`."""
        self._bench, self._extent, self._clock_s = bench, extent, clock_s
        self._solo: list[SoloPoint] = []
        self.measured: list[OperatingPoint] = []
        self.uncertainty: float | None = None
        """At the point that was chosen last, before it was measured."""

    def lines(self, device: Line, finetune_model: str) -> Iterator[Line]:
        """All samples, each once it is measured, ``device`` first: gpu, driver, torch, model, layers, graph_batches."""
        bench, begin_s = self._bench, self._clock_s()
        splits = [[split.decode_sms, split.finetune_sms] for split in bench.splits]
        yield {"kind": "device", **device, "sms": bench.total_sms, "splits": splits}
        pairs: dict[int, float] = {}
        for split in (None, *bench.splits):
            yield from self._units(split, finetune_model, pairs)
        yield from self._prompts()
        yield from self._sequences()
        longest_s = 0.0
        for point in self._points():
            left_s = self._extent.budget_s - (self._clock_s() - begin_s)
            if len(self.measured) >= len(self._extent.corners) and left_s < longest_s:
                return
            before_s = self._clock_s()
            yield from self._measure(point, finetune_model, pairs)
            longest_s = max(longest_s, self._clock_s() - before_s)

    def _points(self) -> Iterator[OperatingPoint]:
        """The corners, then whatever is least sure, then another context for each batch that has one.

        The last ones are for the simulator, which goes straight from one measured context to the next.
        """
        yield from self._extent.corners
        solve = least_squares()
        while (choice := next_point(self._solo, self._extent.candidates(self.measured), solve)) is not None:
            self.uncertainty = choice.uncertainty
            if choice.uncertainty < self._extent.sure:
                break
            yield choice.point
        while (point := self._second_context()) is not None:
            yield point

    def _second_context(self) -> OperatingPoint | None:
        """Of a measured batch with one context, the candidate that is furthest from it."""
        for batch in sorted({point.batch for point in self.measured}):
            contexts = [point.context_tokens for point in self.measured if point.batch == batch]
            others = [point for point in self._extent.candidates(self.measured) if point.batch == batch]
            if len(contexts) == 1 and others:
                return max(others, key=lambda point: abs(point.context_tokens - contexts[0]))
        return None

    def _measure(self, point: OperatingPoint, finetune_model: str, pairs: dict[int, float]) -> Iterator[Line]:
        """Decode at ``point`` on every split, alone and beside units."""
        bench, extent = self._bench, self._extent
        splits = (None, *bench.splits)
        bench.put_in_place(point.batch, point.context_tokens, (extent.repeats + extent.beside_steps + 2) * len(splits))
        for split in splits:
            sms = bench.total_sms if split is None else split.decode_sms
            solo = bench.decode(split, extent.repeats)
            self._solo.append(SoloPoint(sms, point.batch, point.kv_tokens, median(solo)))
            yield {
                "kind": "decode_solo", "batch": point.batch, "context": point.context_tokens, "sm": sms,
                "sm_count_target": False, "ms": solo,
            }  # fmt: skip
            if split is not None and point.batch >= extent.beside_from_batch:
                yield self._beside(split, point, median(solo), pairs[split.finetune_sms], finetune_model)
        self.measured.append(point)

    def _beside(self, split: Split, point: OperatingPoint, solo_ms: float, pair_ms: float, model: str) -> Line:
        decode_ms, ratio = self._bench.decode_beside(split, self._extent.beside_steps)
        return {
            "kind": "colocated", "finetune_model": model, "ft_tokens": self._bench.unit_tokens, "batch": point.batch,
            "context": point.context_tokens, "sm_infer": split.decode_sms, "sm_ft": split.finetune_sms,
            "sm_count_target": True, "decode_solo_ms": solo_ms, "decode_ms": decode_ms,
            "unit_pair_solo_ms": round(pair_ms, 4), "unit_pair_ms": round(pair_ms * ratio, 4),
        }  # fmt: skip

    def _units(self, split: Split | None, model: str, pairs: dict[int, float]) -> Iterator[Line]:
        sms = self._bench.total_sms if split is None else split.finetune_sms
        found = self._bench.units(split, self._extent.unit_repeats)
        pairs[sms] = median(found["forward"]) + median(found["backward"])
        for kind, ms in found.items():
            yield {
                "kind": "finetune_unit", "model": model, "unit": kind, "tokens": self._bench.unit_tokens, "sm": sms,
                "sm_count_target": True, "ms": ms,
            }  # fmt: skip

    def _prompts(self) -> Iterator[Line]:
        for tokens in self._extent.prompts:
            self._bench.prefill(tokens)  # compiles what is compiled
            ms = [self._bench.prefill(tokens) for _ in range(self._extent.repeats)]
            yield {"kind": "prefill", "tokens": tokens, "sm": self._bench.total_sms, "ms": ms}

    def _sequences(self) -> Iterator[Line]:
        """Many consecutive steps alone, and beside finetuning on two splits, for the tail."""
        extent, bench = self._extent, self._bench
        middle = (bench.splits[len(bench.splits) // 2], bench.splits[0])
        for split in (None, *middle):
            bench.put_in_place(extent.sequence_batch, extent.sequence_context, extent.sequence_steps + 1)
            steps = extent.sequence_steps
            ms = bench.decode(None, steps) if split is None else bench.decode_beside(split, steps)[0]
            yield {
                "kind": "decode_sequence" if split is None else "colocated_sequence", "batch": extent.sequence_batch,
                "context": extent.sequence_context + steps // 2,
                "sm_infer": bench.total_sms if split is None else split.decode_sms,
                "sm_ft": 0 if split is None else split.finetune_sms, "ms": ms,
            }  # fmt: skip
