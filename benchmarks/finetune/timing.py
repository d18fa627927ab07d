"""Steps, units and memory of a finetuning job, timed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.feed import SampleFeed
from benchmarks.finetune.random_model import PlainLoop


def plain_step(loop: PlainLoop, feed: SampleFeed, number: int) -> None:
    """Step ``number`` of the plain loop."""
    loop.step(feed.batch(number))


def run_step(engine: FinetuneEngine, stream: Any, after_unit: Callable[[str], None] = lambda _: None) -> None:
    """One optimizer step, unit after unit; ``after_unit`` gets the kind of each."""
    step = engine.cursor.steps
    while engine.cursor.steps == step:
        unit = engine.next_unit()
        if unit is None:
            raise SystemExit(f"the job stopped: {engine.state}")
        engine.run(unit, stream)
        after_unit(unit.kind)


def unit_lengths(engine: FinetuneEngine, stream: Any, steps: int) -> dict[str, list[float]]:
    """GPU time of every unit of ``steps`` steps in ms, by kind; wall time on the CPU."""
    if stream is None:
        found: dict[str, list[float]] = {}
        for _ in range(steps * len(engine.cursor.order)):
            unit = engine.next_unit()
            assert unit is not None
            begin_s = perf_counter()
            engine.run(unit)
            found.setdefault(unit.kind, []).append((perf_counter() - begin_s) * 1e3)
        return found
    marks = []
    for _ in range(steps * len(engine.cursor.order)):
        unit = engine.next_unit()
        assert unit is not None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        engine.run(unit, stream)
        end.record(stream)
        marks.append((unit.kind, begin, end))
    torch.cuda.synchronize()
    by_kind: dict[str, list[float]] = {}
    for kind, begin, end in marks:
        by_kind.setdefault(kind, []).append(begin.elapsed_time(end))
    return by_kind


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile, longest, in ms."""
    middle, high = np.percentile(values, (50, 99))
    return {"p50_ms": float(middle), "p99_ms": float(high), "max_ms": max(values), "units": len(values)}


def reset_peak(device: str) -> None:
    """Begin to look for the peak of allocated memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float | None:
    """Peak of allocated GPU memory since `reset_peak`."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def chip_sms() -> int:
    """SMs of the whole GPU."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def finish(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
