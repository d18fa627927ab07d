"""The profiler's lines are samples: they parse, cover every split, and a profile can be fitted to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.cuda.serving.profiler import Grid, Profiler
from harli_core.predict.fit import fit_profile
from harli_core.predict.samples import parse_samples
from tests.sglang import scenes

pytestmark = pytest.mark.filterwarnings("ignore")

GRID = Grid(
    points=((1, 16), (2, 32), (4, 16), (6, 32)), beside=((2, 32), (4, 16)), repeats=2, beside_steps=2, unit_repeats=3,
    sequence_batch=2, sequence_context=16, sequence_steps=260,
)  # fmt: skip


def test_lines_parse_and_fit(instance: Any, model: tuple[Path, dict[str, Any]]) -> None:
    """Every kind of sample is there on every split, so that a profile can be fitted (to a CPU's noise, it means nothing)."""
    instance.add_job(scenes.job_of(model[1], 16))
    instance.decoder.prefill = "elsewhere"
    try:
        lines = list(Profiler(instance, GRID).lines("llama3-8b", "llama3-8b", "a CPU", 13000, "2.13"))
    finally:
        instance.decoder.prefill = "local"
    samples = parse_samples([json.dumps(line) for line in lines], "measured")
    splits = len(instance.partitions.lanes)
    assert len(samples.decode_solo) == len(GRID.points) * (splits + 1)
    assert len(samples.colocated) == len(GRID.beside) * splits
    assert len(samples.finetune_units) == 4 * (splits + 1)
    assert all(sample.ms for sample in samples.decode_solo)
    profile = fit_profile(samples, "llama3-8b")
    assert profile.splits == tuple(lane.split for lane in instance.partitions.lanes)
    instance.decoder.check_idle()
