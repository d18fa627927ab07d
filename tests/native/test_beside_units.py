"""What units took beside decode, over what the profile says, between two looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.cuda.serving.beside_units import BesideUnits
from backends.cuda.serving.unit_times import UnitTimes
from harli_core.predict.predictor import StepPredictor
from harli_core.predict.profile import Profile

PROFILE = Path(__file__).parents[2] / "harli_cli" / "data" / "profile_h200_llama3-8b__llama3-8b.json"
SMS, INDEX = 64, 3


@pytest.fixture
def predictor() -> StepPredictor:
    """Of the shipped profile, whose fourth split has 64 SMs for finetuning."""
    return StepPredictor(Profile.from_dict(json.loads(PROFILE.read_text("utf-8"))))


def run(times: UnitTimes, predictor: StepPredictor, forward: float, backward: float, sms: int = SMS) -> None:
    """A unit of each kind that took so many times what the profile says."""
    times.ran("forward", sms, forward * predictor.unit_beside_ms("forward", 1024, INDEX), None)
    times.ran("backward", sms, backward * predictor.unit_beside_ms("backward", 1024, INDEX), None)


def test_the_ratio_is_of_units_since_the_last_look(predictor: StepPredictor) -> None:
    """Means of each kind; a look without one of each gives nothing, and loses nothing."""
    times = UnitTimes()
    beside = BesideUnits(times, predictor, 1024)
    assert beside.ratio(SMS) is None
    run(times, predictor, 1.0, 1.0)
    run(times, predictor, 1.4, 1.4)
    assert beside.ratio(SMS) == pytest.approx(1.2)
    assert beside.ratio(SMS) is None
    times.ran("forward", SMS, 3.0 * predictor.unit_beside_ms("forward", 1024, INDEX), None)
    assert beside.ratio(SMS) is None
    times.ran("backward", SMS, 3.0 * predictor.unit_beside_ms("backward", 1024, INDEX), None)
    assert beside.ratio(SMS) == pytest.approx(3.0)


def test_other_partitions_are_others(predictor: StepPredictor) -> None:
    """Units on the whole chip, or on another split's SMs, say nothing of this one."""
    times = UnitTimes()
    beside = BesideUnits(times, predictor, 1024)
    run(times, predictor, 5.0, 5.0, sms=132)
    run(times, predictor, 1.1, 1.1)
    assert beside.ratio(132) is None
    assert beside.ratio(0) is None
    assert beside.ratio(SMS) == pytest.approx(1.1)


def test_times_that_were_cleared_count_from_their_begin(predictor: StepPredictor) -> None:
    """A new run forgets the units of the last one."""
    times = UnitTimes()
    beside = BesideUnits(times, predictor, 1024)
    for _ in range(3):
        run(times, predictor, 2.0, 2.0)
    assert beside.ratio(SMS) == pytest.approx(2.0)
    times.clear()
    run(times, predictor, 1.3, 1.3)
    assert beside.ratio(SMS) == pytest.approx(1.3)
