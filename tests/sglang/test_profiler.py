"""The profiler's lines are samples: they parse, cover every split, and a profile can be fitted to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.cuda.serving.bench import InstanceBench
from backends.cuda.serving.profiler import QUICK, Extent, Profiler
from backends.cuda.serving.scheduler_factory import GRAPH_BATCHES
from harli_core.predict.fit import fit_profile
from harli_core.predict.next_point import OperatingPoint
from harli_core.predict.samples import parse_samples
from tests.sglang import scenes

pytestmark = pytest.mark.filterwarnings("ignore")

EXTENT = Extent(
    corners=tuple(OperatingPoint(*pair) for pair in ((1, 16), (2, 32), (4, 16), (6, 32), (8, 16))),
    batches=(1, 2, 3, 4, 5, 6, 7, 8), contexts=(16, 32), most_kv_tokens=256, prompts=(16, 64), budget_s=10_000.0,
    sure=1e-9, repeats=2, beside_from_batch=2, beside_steps=2, unit_repeats=3, sequence_batch=2, sequence_context=16,
    sequence_steps=260,
)  # fmt: skip
DEVICE = {"gpu": "a CPU", "driver": 13000, "torch": "2.13", "model": "llama3-8b", "layers": 4}


def test_batches_that_are_profiled_are_those_of_decode_graphs() -> None:
    """Others are padded, so that there is nothing to measure in between."""
    assert tuple(QUICK.batches) == GRAPH_BATCHES
    assert {corner.batch for corner in QUICK.corners} <= set(GRAPH_BATCHES)


def test_lines_parse_and_fit(instance: Any, model: tuple[Path, dict[str, Any]]) -> None:
    """Every kind of sample is there on every split, so that a profile can be fitted (to a CPU's noise, it means nothing)."""
    instance.add_job(scenes.job_of(model[1], 16))
    instance.decoder.prefill = "elsewhere"
    try:
        profiler = Profiler(InstanceBench(instance), EXTENT)
        lines = list(profiler.lines(DEVICE, "llama3-8b"))
    finally:
        instance.settle()
        instance.decoder.prefill = "local"
    samples = parse_samples([json.dumps(line) for line in lines], "measured")
    splits = len(instance.partitions.lanes)
    assert len(profiler.measured) == len(set(profiler.measured)) > len(EXTENT.corners)
    assert len(samples.decode_solo) == len(profiler.measured) * (splits + 1)
    assert len(samples.colocated) == sum(point.batch >= 2 for point in profiler.measured) * splits
    assert len(samples.finetune_units) == 4 * (splits + 1)
    assert [sample.tokens for sample in samples.prefill] == [16, 64]
    assert all(sample.ms for sample in samples.decode_solo)
    profile = fit_profile(samples, "llama3-8b")
    assert profile.splits == tuple(lane.split for lane in instance.partitions.lanes)
    instance.decoder.check_idle()
