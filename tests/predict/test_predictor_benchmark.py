"""How long one prediction takes; asserts no time, `benchmarks/predictor` keeps the record.

A round is 1,000 predictions, so the milliseconds that pytest-benchmark shows are microseconds a prediction.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import cast

from pytest_benchmark.fixture import BenchmarkFixture

from harli_core.predict.predictor import StepPrediction, StepPredictor
from harli_core.predict.profile import Profile

DATA = Path(__file__).resolve().parents[2] / "harli_cli" / "data"
CALLS = 1000


def test_predict_all_splits(benchmark: BenchmarkFixture) -> None:
    """One `predict` covers every split, alone and co-run; random batches and tokens, batch sizes seen before."""
    text = (DATA / "profile_h200_llama3-8b__llama3-8b.json").read_text(encoding="utf-8")
    predictor = StepPredictor(Profile.from_dict(json.loads(text)))
    draw = random.Random(0)
    batches = [draw.randint(1, 384) for _ in range(CALLS)]
    steps = [(batch, batch * draw.randint(1, 4096)) for batch in batches]
    for batch, kv_tokens in steps:
        predictor.predict(batch, kv_tokens)

    def predict_steps() -> StepPrediction:
        found = predictor.predict(*steps[0])
        for batch, kv_tokens in steps[1:]:
            found = predictor.predict(batch, kv_tokens)
        return found

    last = cast("StepPrediction", benchmark(predict_steps))
    assert last == predictor.predict(*steps[-1])
