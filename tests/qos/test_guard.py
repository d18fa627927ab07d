"""The guard pauses finetuning after a step over target, longer each time it fails again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.qos.guard import Guard


def wait_out(guard: Guard) -> int:
    """Steps until the pause is over, one at a time."""
    steps = 0
    while guard.paused:
        guard.observe([1.0], finetuning=False)
        steps += 1
    return steps


def test_a_step_over_target_trips() -> None:
    """One slow step among fast ones pauses finetuning."""
    guard = Guard(40.0, cooldown_steps=16)
    guard.observe([39.0, 40.001, 10.0], finetuning=True)
    assert (guard.paused, guard.paused_steps, guard.trips) == (True, 16, 1)


def test_the_target_itself_is_kept() -> None:
    """A step of exactly the target is within it."""
    guard = Guard(40.0)
    guard.observe([40.0] * 10, finetuning=True)
    assert (guard.paused, guard.trips) == (False, 0)


def test_without_finetuning_nothing_trips() -> None:
    """A slow step of decode alone says nothing against finetuning; neither does a plan without steps."""
    guard = Guard(40.0)
    guard.observe([400.0], finetuning=False)
    guard.observe([], finetuning=True)
    assert (guard.paused, guard.trips) == (False, 0)


def test_the_pause_is_counted_in_steps() -> None:
    """It ends after its steps, however they are bundled, and slow steps meanwhile do not prolong it."""
    guard = Guard(40.0, cooldown_steps=10)
    guard.observe([50.0], finetuning=True)
    guard.observe([50.0] * 9, finetuning=True)
    assert guard.paused
    guard.observe([50.0] * 5, finetuning=True)
    assert (guard.paused, guard.trips) == (False, 1)


def test_the_pause_doubles_up_to_its_limit() -> None:
    """Failing again and again doubles the pause once more is late than bad luck explains: 4, 4, 8, 16, 20, 20."""
    guard = Guard(40.0, cooldown_steps=4, max_cooldown_steps=20, memory_steps=100, tolerated=2)
    pauses = []
    for _ in range(6):
        guard.observe([41.0], finetuning=True)
        pauses.append(wait_out(guard))
    assert pauses == [4, 4, 8, 16, 20, 20]


@pytest.mark.parametrize(("quiet_steps", "expected"), [(97, 8), (98, 4)])
def test_late_steps_are_forgotten(quiet_steps: int, expected: int) -> None:
    """The first of three late steps counts for ``memory_steps`` steps without a pause, itself included, and no longer."""
    guard = Guard(40.0, cooldown_steps=4, max_cooldown_steps=64, memory_steps=100, tolerated=2)
    for _ in range(2):
        guard.observe([41.0], finetuning=True)
        wait_out(guard)
    guard.observe([10.0] * quiet_steps, finetuning=True)
    guard.observe([41.0], finetuning=True)
    assert wait_out(guard) == expected


def test_late_steps_stay_rare_whatever_the_model_does() -> None:
    """Every step with finetuning is late, and yet fewer than one step in a hundred is."""
    guard, late, steps = Guard(40.0), 0, 0
    while steps < 20_000:
        finetuning = not guard.paused
        guard.observe([41.0 if finetuning else 10.0], finetuning=finetuning)
        late, steps = late + finetuning, steps + 1
    assert late / steps < 0.01


@given(st.lists(st.tuples(st.lists(st.floats(0.1, 80.0), max_size=20), st.booleans()), max_size=60))
def test_pauses_stay_within_their_bounds(bundles: list[tuple[list[float], bool]]) -> None:
    """Whatever comes: a pause is never negative nor over the limit, and there is one only after a trip."""
    guard = Guard(40.0, cooldown_steps=4, max_cooldown_steps=32, memory_steps=50)
    for latency_ms, finetuning in bundles:
        before = guard.trips
        guard.observe(latency_ms, finetuning)
        assert 0 <= guard.paused_steps <= 32
        assert guard.paused == (guard.paused_steps > 0)
        assert guard.trips - before in ((0, 1) if finetuning and max(latency_ms, default=0) > 40.0 else (0,))
        assert guard.trips or not guard.paused
