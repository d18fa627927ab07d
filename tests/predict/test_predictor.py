"""The run-time predictor: the formulas, evaluated as written, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.errors import ConfigError
from harli_core.predict.predictor import StepPredictor
from harli_core.predict.profile import Profile

DATA = Path(__file__).resolve().parents[2] / "harli_cli" / "data"
PROFILE = Profile.from_dict(
    json.loads((DATA / "profile_h200_llama3-8b__qwen2.5-7b.json").read_text(encoding="utf-8")), "profile"
)
PREDICTOR = StepPredictor(PROFILE)


@given(batch=st.integers(1, 384), kv_tokens=st.integers(0, 2_000_000))
def test_prediction_equals_the_formulas(batch: int, kv_tokens: int) -> None:
    """Eq. 2 with its bends and Eq. 3, written out, give what `predict` gives."""
    found = PREDICTOR.predict(batch, kv_tokens)
    seqlen = kv_tokens / batch
    a1, k1 = PROFILE.colocated.coefficients

    def solo_ms(sms: int) -> float:
        c0, b0, k0, s0, *bends = PROFILE.solo.coefficients[PROFILE.solo.sms.index(sms)]
        stepped = sum(h * max(0, batch - t) for h, t in zip(bends, PROFILE.solo.knots, strict=True))
        return c0 + b0 * batch + k0 * batch * seqlen + s0 * seqlen + stepped

    assert found.whole_chip_ms == pytest.approx(solo_ms(132), rel=1e-9)
    for split, alone_ms, beside_ms in zip(PROFILE.splits, found.solo_ms, found.colocated_ms, strict=True):
        assert alone_ms == pytest.approx(solo_ms(split.decode_sms), rel=1e-9)
        slowdown = a1 + k1 * min(split.finetune_sms / 132, 0.6)
        assert beside_ms == pytest.approx(slowdown * alone_ms, rel=1e-9)


def test_a_batch_takes_what_the_graph_takes_that_it_runs() -> None:
    """Batches are padded to the next size that a decode graph is captured for; those beyond all sizes run as they are."""
    padded = Profile.from_dict(json.loads(json.dumps({**PROFILE.to_dict(), "graph_batches": [8, 64]})), "padded")
    assert padded.graph_batches == (8, 64)
    predictor = StepPredictor(padded)
    for batch, launched in ((1, 8), (8, 8), (9, 64), (64, 64), (65, 65)):
        assert predictor.predict(batch, 5000) == PREDICTOR.predict(launched, 5000)


def test_units_equal_their_models() -> None:
    """Alone as the unit model says; beside decode times the split's factor; asked twice, the same."""
    for index, split in enumerate(PROFILE.splits):
        for kind in ("forward", "backward", "head_loss", "optimizer"):
            alone_ms = PROFILE.finetune.unit(kind).predict_ms(1536, split.finetune_sms)
            for _ in range(2):
                assert PREDICTOR.unit_ms(kind, 1536, split.finetune_sms) == alone_ms
                assert PREDICTOR.unit_beside_ms(kind, 1536, index) == alone_ms * PROFILE.finetune.beside[index]


def test_head_and_loss_are_proportional_to_tokens() -> None:
    """The loss is computed in chunks, so 4,096 tokens take four times as long as 1,024."""
    assert PREDICTOR.unit_ms("head_loss", 4096, 132) == pytest.approx(4 * PREDICTOR.unit_ms("head_loss", 1024, 132))


@pytest.mark.parametrize("batch", [0, -1])
def test_an_empty_batch_has_no_step(batch: int) -> None:
    """Batch 0 is refused, not predicted as the intercept."""
    with pytest.raises(ConfigError, match="need at least 1"):
        PREDICTOR.predict(batch, 0)


def test_impossible_arguments_are_refused() -> None:
    """Negative KV, units without tokens or on SMs that the chip has not, splits that do not exist."""
    with pytest.raises(ConfigError, match="KV tokens"):
        PREDICTOR.predict(1, -1)
    with pytest.raises(ConfigError, match="1 to 132 SMs"):
        PREDICTOR.unit_ms("forward", 1024, 133)
    with pytest.raises(ConfigError, match="1 token or more"):
        PREDICTOR.unit_ms("forward", 0, 64)
    with pytest.raises(ConfigError, match="no split 7"):
        PREDICTOR.unit_beside_ms("forward", 1024, 7)
