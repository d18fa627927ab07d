"""The shipped profiles: equal to a refit of the shipped samples, read strictly, sensible between measurements."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import cast

import pytest

from harli_core.errors import SampleError
from harli_core.predict.fit import fit_profile
from harli_core.predict.predictor import StepPredictor
from harli_core.predict.profile import Profile
from harli_core.predict.samples import Samples, parse_samples

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "harli_cli" / "data"
MODELS = ("llama3-8b", "qwen2.5-7b")
PAIRS = [(model, finetune_model) for model in MODELS for finetune_model in MODELS]


def document(model: str, finetune_model: str) -> dict[str, object]:
    """The shipped profile of a pair, as parsed JSON."""
    path = DATA / f"profile_h200_{model}__{finetune_model}.json"
    return cast("dict[str, object]", json.loads(path.read_text(encoding="utf-8")))


def samples_of(model: str) -> Samples:
    """The shipped samples of a served model."""
    name = f"operating_points_{model}.jsonl"
    return parse_samples((DATA / name).read_text(encoding="utf-8").splitlines(), name)


def shipped(model: str, finetune_model: str) -> Profile:
    """The shipped profile of a pair."""
    return Profile.from_dict(document(model, finetune_model))


def assert_close(found: object, expected: object, where: str = "profile") -> None:
    """Equal, numbers within 1e-6 relative."""
    if isinstance(expected, dict):
        pairs, others = cast("dict[str, object]", expected), cast("dict[str, object]", found)
        assert pairs.keys() == others.keys(), where
        for key, value in pairs.items():
            assert_close(others[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        items, others_list = cast("list[object]", expected), cast("list[object]", found)
        assert len(items) == len(others_list), where
        for index, value in enumerate(items):
            assert_close(others_list[index], value, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-12), where
    else:
        assert found == expected, where


@pytest.mark.parametrize(("model", "finetune_model"), PAIRS)
def test_shipped_profile_equals_a_refit(model: str, finetune_model: str) -> None:
    """Nobody edited a profile by hand, and the fit is reproducible."""
    assert_close(fit_profile(samples_of(model), finetune_model).to_dict(), document(model, finetune_model))


@pytest.mark.parametrize(("model", "finetune_model"), PAIRS)
def test_round_trip_is_exact(model: str, finetune_model: str) -> None:
    """Profile -> dict -> JSON -> dict -> profile loses nothing."""
    profile = shipped(model, finetune_model)
    assert Profile.from_dict(cast("dict[str, object]", json.loads(json.dumps(profile.to_dict())))) == profile
    assert profile.to_dict() == document(model, finetune_model)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema_version",), 2, "schema_version 2 is not 1"),
        (("gpu",), "", "field 'gpu': expected a text"),
        (("extra",), 1, "unknown field 'extra'"),
        (("solo", "basis"), "cubic", "field 'basis': expected one of paper, stepped"),
        (("solo", "knots"), [8], "field 'solo.coefficients'"),
        (("solo", "sms"), [20, 36], "field 'solo.sms'"),
        (("colocated", "coefficients"), [1.0], "field 'colocated.coefficients': expected 2 numbers"),
        (("colocated", "coefficients"), [1.0, None], "p, colocated: field 'coefficients': expected a list of finite"),
        (("finetune", "units"), [], "field 'finetune.units': expected each of"),
        (("finetune", "beside"), [1.1], "field 'finetune.beside': expected one factor a split (7)"),
        (("tail", "solo"), [], "p, tail: field 'solo'"),
        (("splits",), [], "field 'splits'"),
        (("total_sms",), 100, "needs more than total_sms"),
    ],
)
def test_malformed_profiles_are_refused(path: tuple[str, ...], value: object, message: str) -> None:
    """One wrong field is one `SampleError` that names it."""
    broken = copy.deepcopy(document("llama3-8b", "llama3-8b"))
    place = broken
    for key in path[:-1]:
        place = cast("dict[str, object]", place[key])
    place[path[-1]] = value
    with pytest.raises(SampleError) as caught:
        Profile.from_dict(broken, "p")
    assert message in str(caught.value)


def test_a_missing_field_is_refused() -> None:
    """No default stands in for what is absent."""
    broken = document("llama3-8b", "llama3-8b")
    del broken["tail"]
    with pytest.raises(SampleError, match="p: field 'tail' is missing"):
        Profile.from_dict(broken, "p")


def test_missing_samples_are_named() -> None:
    """A fit without co-runs of the finetuned model says which are missing."""
    with pytest.raises(SampleError, match="colocated with 'gpt' on 20 \\+ 112 SMs"):
        fit_profile(samples_of("llama3-8b"), "gpt")


@pytest.mark.parametrize(("model", "finetune_model"), PAIRS)
def test_predictions_rise_with_kv_and_stay_sensible_in_batch(model: str, finetune_model: str) -> None:
    """More KV is never faster, finetuning never speeds decode up beyond fit error, no batch gives a wild value."""
    predictor = StepPredictor(shipped(model, finetune_model))
    floor_ms = predictor.predict(1, 1)
    for batch in range(1, 1200):
        little, much = predictor.predict(batch, batch), predictor.predict(batch, 4096 * batch)
        for low, high in zip((*little.solo_ms, little.whole_chip_ms), (*much.solo_ms, much.whole_chip_ms), strict=True):
            assert 0.0 < low < high
        for alone, beside in zip(much.solo_ms, much.colocated_ms, strict=True):
            assert 0.98 < beside / alone < 1.35
        for low, first in zip(little.solo_ms, floor_ms.solo_ms, strict=True):
            assert low > 0.95 * first
        assert little.whole_chip_ms < 1.05 * min(little.solo_ms)


@pytest.mark.parametrize(("model", "finetune_model"), PAIRS)
def test_units_are_slower_on_fewer_sms_and_beside_decode(model: str, finetune_model: str) -> None:
    """Forward, backward and head + loss speed up with SMs and tokens saved, and run longer beside decode than alone."""
    profile = shipped(model, finetune_model)
    predictor = StepPredictor(profile)
    for kind in ("forward", "backward", "head_loss"):
        by_sms = [predictor.unit_ms(kind, 1024, sms) for sms in range(16, 133, 4)]
        assert by_sms == sorted(by_sms, reverse=True)
        assert predictor.unit_ms(kind, 512, 64) < predictor.unit_ms(kind, 1024, 64)
        for index, split in enumerate(profile.splits):
            assert predictor.unit_beside_ms(kind, 1024, index) > predictor.unit_ms(kind, 1024, split.finetune_sms)


@pytest.mark.parametrize(("model", "finetune_model"), PAIRS)
def test_units_beside_decode_are_right_on_every_split(model: str, finetune_model: str) -> None:
    """The factor makes up for what the model of units alone misses on a split's SMs: none looks better than it was."""
    predictor = StepPredictor(shipped(model, finetune_model))
    for index, split in enumerate(predictor.profile.splits):
        ratios = [
            sample.unit_pair_ms
            / sum(predictor.unit_beside_ms(kind, sample.finetune_tokens, index) for kind in ("forward", "backward"))
            for sample in samples_of(model).colocated
            if sample.split == split and sample.finetune_model == finetune_model
        ]
        assert median(ratios) == pytest.approx(1.0, rel=1e-9)


def test_units_that_would_take_no_time_are_refused() -> None:
    """Measured on two SM counts, faster on fewer of them: the line through both is below zero further down."""
    samples = samples_of("llama3-8b")
    units = tuple(
        replace(unit, ms=(1.0,) if unit.sms == 132 or unit.unit not in ("forward", "backward") else (0.8,))
        for unit in samples.finetune_units
        if unit.sms in (112, 132)
    )
    with pytest.raises(
        SampleError, match=r"a backward unit of 1024 tokens on \d+ SMs take -.* ms; measure some on that"
    ):
        fit_profile(replace(samples, finetune_units=units), "llama3-8b")


def test_tail_is_sorted_and_starts_from_the_sustained_level() -> None:
    """Quantiles rise; co-running settles above the short samples' level, decode alone does not."""
    for model, finetune_model in PAIRS:
        tail = shipped(model, finetune_model).tail
        for ratios in (tail.solo, tail.colocated, tail.colocated_spread):
            assert len(ratios) == 33
            assert list(ratios) == sorted(ratios)
        assert tail.colocated[16] > 1.02
        assert tail.solo[16] == pytest.approx(1.0, abs=0.01)
        assert tail.colocated_spread[16] == pytest.approx(1.0, abs=0.01)


def test_run_time_predictor_imports_no_numerical_library() -> None:
    """scikit-learn and numpy are for fitting only."""
    code = "import sys, harli_core.predict.predictor; print(sorted({'sklearn', 'numpy', 'scipy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
