"""What units took beside decode, over what the profile says, between two looks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from backends.cuda.serving.beside_units import BesideUnits
from backends.cuda.serving.recorder import HeldPlan, Recorder, Span
from backends.cuda.serving.unit_times import UnitTimes
from harli_core.loop import DecisionLoop
from harli_core.predict.predictor import StepPredictor
from harli_core.predict.profile import Profile
from harli_core.records import RequestBook, StepBook
from harli_core.types import Hold, MemoryView, StepPlan, StepResult, StepView

PROFILE = Path(__file__).parents[2] / "harli_cli" / "data" / "profile_h200_llama3-8b__llama3-8b.json"
SMS, INDEX = 64, 3


@pytest.fixture
def predictor() -> StepPredictor:
    """Of the shipped profile, whose fourth split has 64 SMs for finetuning."""
    return StepPredictor(Profile.from_dict(json.loads(PROFILE.read_text("utf-8"))))


def view(batch: int) -> StepView:
    """Requests of 1,000 tokens, and nothing else."""
    memory = MemoryView(1024, 1 << 27, 200, 0, 0, 200, 0, 0, 204_800, 0)
    return StepView(0, 0, 0.0, batch, 1000 * batch, 0, 0, 0.0, memory, ())


class Alone:
    """Decodes on the whole chip and keeps the ratios that it is told."""

    serves = True
    finetunes = False

    def __init__(self, total_sms: int) -> None:
        """Nothing was told yet."""
        self._total_sms = total_sms
        self.ratios: list[float | None] = []

    def plan(self, view: StepView) -> StepPlan:
        """The same at every step."""
        return StepPlan(self._total_sms, (), Hold(1, None))

    def observe(self, result: StepResult) -> None:
        """Keep the ratio."""
        self.ratios.append(result.unit_ratio)


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


def test_units_of_before_and_of_idle_times_do_not_count(predictor: StepPredictor) -> None:
    """Nothing decoded beside those that ran while no request was there, and another run's units say nothing of this one."""
    times = UnitTimes()
    run(times, predictor, 0.6, 0.6)
    beside = BesideUnits(times, predictor, 1024)
    assert beside.ratio(SMS) is None
    run(times, predictor, 0.5, 0.5)
    beside.skip()
    assert beside.ratio(SMS) is None
    run(times, predictor, 1.2, 1.2)
    assert beside.ratio(SMS) == pytest.approx(1.2)


def test_what_runs_in_an_idle_time_is_not_in_the_next_result(predictor: StepPredictor) -> None:
    """A policy may let finetuning have a split's SMs while nothing decodes; the recorder knows of it."""
    policy, times, idle_view = Alone(predictor.profile.total_sms), UnitTimes(), view(batch=0)
    loop, none = DecisionLoop(policy, predictor.profile.capabilities), np.zeros(0, dtype=np.int64)
    beside = BesideUnits(times, predictor, 1024)
    recorder = Recorder(0, loop, RequestBook(none, none), StepBook(), predictor, 40.0, beside)
    loop.decide(idle_view)
    run(times, predictor, 0.5, 0.5)
    recorder.idle(idle_view, 12.0, SMS)
    held = HeldPlan(loop.decide(view(batch=1)), 1, SMS, 0.0, None, 0.0)
    run(times, predictor, 1.2, 1.2)
    span = Span(held, 0, 1, 1000, 0, 0, 0, 0, 0.0, 0, 0.0)
    recorder.step(span, 9.0, 9.0, 0.0, finetuned=True)
    recorder.settle(span)
    assert policy.ratios == [None, pytest.approx(1.2)]
