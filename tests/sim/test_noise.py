"""Recorded noise is a function of (seed, instance, stream, step) and keeps the order in which it was recorded."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.sim.noise import RecordedNoise

RATIOS = [1.0 + k / 1000 for k in range(97)]


def noise(seed: int = 0, stream: int = 0) -> RecordedNoise:
    """A ring of 97 ratios that are all different."""
    return RecordedNoise(RATIOS, seed, stream)


@given(instance=st.integers(0, 9), step=st.integers(0, 5000), count=st.integers(0, 300))
def test_steps_see_adjacent_entries(instance: int, step: int, count: int) -> None:
    """Any slice is a piece of the ring: its autocorrelation is that of the recording."""
    found = list(noise().take(instance, step, count))
    places = [RATIOS.index(ratio) for ratio in found]
    assert all((after - before) % 97 == 1 for before, after in itertools.pairwise(places))
    assert len(found) == count


@given(step=st.integers(0, 5000), count=st.integers(1, 300), order=st.randoms(use_true_random=False))
def test_asking_in_any_order_gives_the_same(step: int, count: int, order: object) -> None:
    """One by one, shuffled and with other questions between: step k is step k."""
    asked = noise()
    steps = list(range(step, step + count))
    order.shuffle(steps)  # type: ignore[attr-defined]
    single = {}
    for at in steps:
        asked.take(1, at + 7, 3)
        (single[at],) = asked.take(0, at, 1)
    assert [single[at] for at in sorted(single)] == list(noise().take(0, step, count))


def test_a_slice_can_be_longer_than_the_recording() -> None:
    """It goes round, as often as necessary."""
    found = list(noise().take(0, 0, 2 * 97 + 5))
    assert found[:97] == found[97 : 2 * 97]
    assert sorted(found[:97]) == RATIOS


def test_instances_seeds_and_streams_begin_elsewhere() -> None:
    """Each is deterministic; together they are not all in step."""
    starts = [
        noise(seed, stream).take(instance, 0, 1)[0] for seed in range(3) for stream in range(3) for instance in range(3)
    ]
    again = [
        noise(seed, stream).take(instance, 0, 1)[0] for seed in range(3) for stream in range(3) for instance in range(3)
    ]
    assert starts == again
    assert len(set(starts)) > 15


def test_autocorrelation_survives() -> None:
    """A slowly drifting recording is still one when it is replayed."""
    rng = np.random.default_rng(0)
    drift = np.cumsum(rng.standard_normal(1000))
    replayed = np.array(RecordedNoise((drift - drift.mean()).tolist(), 0, 0).take(3, 100, 800))
    assert np.corrcoef(replayed[:-1], replayed[1:])[0, 1] > 0.9
