"""The monitor turns results into residuals of the choice that was made, and shows them to the guard."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from harli_core.qos.monitor import WHOLE_CHIP, LatencyMonitor
from harli_core.types import StepResult


def result_of(decode_ms: list[float], latency_ms: list[float] | None = None) -> StepResult:
    """What steps took."""
    return StepResult(0, 0, 8, 8000, tuple(latency_ms or decode_ms), tuple(decode_ms), (0.0,) * len(decode_ms))


@pytest.fixture
def monitor(context_of: Any) -> LatencyMonitor:
    """A monitor for a target of 40 ms."""
    return LatencyMonitor(context_of(), 0.99, window_steps=64)


def predicted_ms(context: Any, choice: int, steps: int) -> list[float]:
    """What the predictor says of ``steps`` consecutive steps of 8 requests with 8,000 tokens."""
    found = [context.predictor.predict(8, 8000 + 8 * step) for step in range(steps)]
    return [step.whole_chip_ms if choice == WHOLE_CHIP else step.colocated_ms[choice] for step in found]


def test_rings_begin_with_the_tail_of_the_profile(monitor: LatencyMonitor, profile: Any) -> None:
    """Sharing begins above 1, at the level of the recorded sequences."""
    tail = sorted(profile.tail.colocated)
    assert monitor.ring(0).centre == tail[len(tail) // 2]
    assert monitor.ring(WHOLE_CHIP).bound == max(profile.tail.solo)


@pytest.mark.parametrize("choice", [WHOLE_CHIP, 0, 4])
def test_ratios_follow_the_growing_context(monitor: LatencyMonitor, context_of: Any, choice: int) -> None:
    """Steps that each take 1.25 times their own prediction give 1.25, in the ring of that choice only."""
    other = monitor.ring(2).centre
    monitor.expect(choice, 8, 8000, finetuning=True)
    monitor.observe(result_of([1.25 * ms for ms in predicted_ms(context_of(), choice, 64)]))
    assert monitor.ring(choice).centre == pytest.approx(1.25, rel=1e-12)
    assert monitor.ring(choice).bound == pytest.approx(1.25, rel=1e-12)
    assert monitor.ring(2).centre == other


def test_units_beside_decode_are_learnt_split_by_split(monitor: LatencyMonitor) -> None:
    """Results that have a ratio move the level of the choice in force towards it; odd ones not beyond reason."""
    assert [monitor.unit_levels[choice] for choice in (0, 3)] == [1.0, 1.0]
    monitor.expect(3, 8, 8000, finetuning=True)
    for _ in range(100):
        monitor.observe(dataclasses.replace(result_of([10.0]), unit_ratio=1.2))
    assert monitor.unit_levels[3] == pytest.approx(1.2, rel=1e-3)
    monitor.observe(result_of([10.0]))
    assert monitor.unit_levels[3] == pytest.approx(1.2, rel=1e-3)
    for _ in range(100):
        monitor.observe(dataclasses.replace(result_of([10.0]), unit_ratio=50.0))
    assert monitor.unit_levels[3] == pytest.approx(2.0, rel=1e-3)
    assert monitor.unit_levels[0] == 1.0


def test_a_ratio_that_is_no_number_teaches_nothing(monitor: LatencyMonitor) -> None:
    """One NaN, in a log or from a backend, would be there in every later rate of the split."""
    monitor.expect(3, 8, 8000, finetuning=True)
    monitor.observe(dataclasses.replace(result_of([10.0]), unit_ratio=math.nan))
    assert monitor.unit_levels[3] == 1.0


def test_the_correction_is_of_the_first_step(monitor: LatencyMonitor, context_of: Any) -> None:
    """What is expected is the prediction times the median ratio of that choice."""
    expected_ms = monitor.expect(3, 8, 8000, finetuning=True)
    assert expected_ms == pytest.approx(predicted_ms(context_of(), 3, 1)[0] * monitor.ring(3).centre, rel=1e-12)


def test_residuals_are_of_decode_the_guard_of_the_step(monitor: LatencyMonitor, context_of: Any) -> None:
    """A long turn trips the guard though decode was as fast as predicted."""
    monitor.expect(0, 8, 8000, finetuning=True)
    monitor.observe(result_of(predicted_ms(context_of(), 0, 1), [41.0]))
    assert monitor.guard.paused


def test_what_the_host_needs_around_decoding_counts_as_decoding(monitor: LatencyMonitor, context_of: Any) -> None:
    """A turn of 10 ms, decoding, and another millisecond: that is part of what the next step is expected to take."""
    decode_ms = predicted_ms(context_of(), 0, 64)
    monitor.expect(0, 8, 8000, finetuning=True, turn_ms=10.0)
    monitor.observe(result_of(decode_ms, [10.0 + ms + 1.0 for ms in decode_ms]))
    assert monitor.ring(0).centre == pytest.approx(1.0 + 1.0 / decode_ms[32], rel=1e-3)


def test_a_turn_that_was_not_used_up_hides_nothing_of_decoding(monitor: LatencyMonitor, context_of: Any) -> None:
    """Decode took as long as it did, however short the step was."""
    decode_ms = predicted_ms(context_of(), 0, 64)
    monitor.expect(0, 8, 8000, finetuning=True, turn_ms=30.0)
    monitor.observe(result_of([1.1 * ms for ms in decode_ms], [1.1 * ms + 2.0 for ms in decode_ms]))
    assert monitor.ring(0).centre == pytest.approx(1.1, rel=1e-9)


def test_what_was_gone_before_the_first_step_is_not_its_own(monitor: LatencyMonitor, context_of: Any) -> None:
    """Waiting that the policy knew of is no reason to expect more of later steps."""
    decode_ms = predicted_ms(context_of(), 0, 64)
    monitor.expect(0, 8, 8000, finetuning=True, turn_ms=5.0, spent_ms=20.0)
    monitor.observe(
        result_of(decode_ms, [5.0 + ms + (20.0 if step == 0 else 0.0) for step, ms in enumerate(decode_ms)])
    )
    assert monitor.ring(0).bound == pytest.approx(1.0, rel=1e-9)


def test_a_pausing_plan_cannot_trip(monitor: LatencyMonitor) -> None:
    """Without finetuning a step over target is decode's own."""
    monitor.expect(WHOLE_CHIP, 8, 8000, finetuning=False)
    monitor.observe(result_of([60.0]))
    assert not monitor.guard.paused


def test_nothing_is_learned_from_idle_time(monitor: LatencyMonitor) -> None:
    """A result without steps changes nothing, also before anything was expected."""
    before = monitor.ring(WHOLE_CHIP).centre
    monitor.observe(StepResult(0, 0, 0, 0, (), (), (), 1.5))
    assert monitor.ring(WHOLE_CHIP).centre == before
    assert not monitor.guard.paused
