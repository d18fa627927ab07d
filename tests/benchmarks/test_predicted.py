"""Measured cells, simulated again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_each_cell_has_its_simulated_figures(tmp_path: Path) -> None:
    """The policies of a result file, with gains of both; what only serves has none."""
    trace = tmp_path / "steady.csv"
    rows = "".join(f"{index},500,200\n" for index in range(1500))
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    latency = {"step_latency_ms": {"p50": 30.0, "p99": 38.0}, "steps_over_target": 0}
    cells = {
        "hybrid": {"finetune": {"tokens_per_s": 8000.0}, **latency},
        "separate_finetuning": {"finetune": {"tokens_per_s": 10_000.0}},
        "inference_only": latency,
    }
    name = "llama3-8b__llama3-8b_400tps_40ms"
    document = {"target_ms": 40.0, "cells": cells, "gain_over_separate": {"hybrid": 0.6}}
    (tmp_path / f"{name}.json").write_text(json.dumps(document))
    script = ROOT / "benchmarks" / "colocation" / "predicted.py"
    done = subprocess.run(
        [sys.executable, str(script), "--trace", str(trace)],
        env={**os.environ, "HARLI_RESULTS": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (point,) = json.loads((tmp_path / "predicted.json").read_text())["points"]
    policies = point["policies"]
    measured, simulated = policies["hybrid"]["gain_over_separate"]
    assert abs(measured - 0.6) < 1e-9
    assert 0.3 < simulated < 1.0
    assert policies["hybrid"]["simulated"]["p99_ms"] <= 40.0
    assert policies["inference_only"]["gain_over_separate"] == [None, None]
    assert policies["inference_only"]["simulated"]["p50_ms"] < policies["hybrid"]["simulated"]["p50_ms"]
    assert "| `hybrid` | 8,000 / " in done.stdout


@pytest.mark.parametrize("content", ["no samples\n", None])
def test_samples_that_serve_for_nothing_write_nothing(tmp_path: Path, content: str | None) -> None:
    """The run fails with what was wrong with them, and the earlier result stays."""
    samples, earlier = tmp_path / "mine.jsonl", tmp_path / "predicted_from_mine.json"
    if content is not None:
        samples.write_text(content)
    earlier.write_text("earlier")
    document = {"target_ms": 40.0, "cells": {"inference_only": {}}, "gain_over_separate": {}}
    (tmp_path / "llama3-8b__llama3-8b_400tps_40ms.json").write_text(json.dumps(document))
    rows = "".join(f"{index},500,200\n" for index in range(1500))
    (tmp_path / "steady.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    script = ROOT / "benchmarks" / "colocation" / "predicted.py"
    done = subprocess.run(
        [sys.executable, str(script), "--trace", str(tmp_path / "steady.csv"), "--samples", str(samples)],
        env={**os.environ, "HARLI_RESULTS": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "left out: llama3-8b__llama3-8b, 400tps_40ms: " in done.stderr
    assert "mine.jsonl" in done.stderr
    assert earlier.read_text() == "earlier"
