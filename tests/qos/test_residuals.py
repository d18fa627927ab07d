"""Residual rings: the median and a quantile of the latest measured / predicted ratios."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.qos.residuals import ResidualRing

RATIOS = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=100)


def test_the_prior_speaks_first() -> None:
    """Before anything is measured the ring says what the profile saw."""
    ring = ResidualRing([1.0, 1.1, 1.2, 1.3, 2.0], quantile=0.99)
    assert (ring.centre, ring.bound) == (1.2, 2.0)


def test_no_prior_is_a_perfect_predictor() -> None:
    """Nothing known: no correction."""
    ring = ResidualRing([], quantile=0.99)
    assert (ring.centre, ring.bound) == (1.0, 1.0)


def test_measurements_replace_the_prior() -> None:
    """After a window's worth of steps the prior is gone."""
    ring = ResidualRing([1.0] * 10, quantile=0.9, window=10, refresh=1)
    ring.add([1.5] * 4)
    assert ring.centre == 1.0
    ring.add([1.5] * 6)
    assert (ring.centre, ring.bound) == (1.5, 1.5)


def test_a_long_bundle_leaves_its_latest_ratios() -> None:
    """More than a window at once: the last ones count."""
    ring = ResidualRing([1.0], quantile=1.0, window=4, refresh=1)
    ring.add([9.0, 9.0, 1.0, 2.0, 3.0, 4.0])
    assert (ring.centre, ring.bound) == (3.0, 4.0)


def test_updates_come_every_refresh() -> None:
    """Small bundles add up until there are enough to sort again."""
    ring = ResidualRing([1.0], quantile=1.0, window=8, refresh=4)
    ring.add([2.0, 2.0, 2.0])
    assert ring.bound == 1.0
    ring.add([2.0])
    assert (ring.centre, ring.bound) == (2.0, 2.0)


@pytest.mark.parametrize(("quantile", "expected"), [(0.5, 51.0), (0.9, 91.0), (0.99, 100.0), (1.0, 100.0)])
def test_bound_is_the_quantile(quantile: float, expected: float) -> None:
    """Of 1 to 100, the smallest value that more than a share ``quantile`` lies at or below (the largest for 1)."""
    assert ResidualRing([float(k) for k in range(100, 0, -1)], quantile).bound == expected


@given(prior=RATIOS, added=st.lists(RATIOS, max_size=5), quantile=st.floats(0.5, 1.0))
def test_the_window_is_a_sliding_one(prior: list[float], added: list[list[float]], quantile: float) -> None:
    """However ratios are bundled, centre and bound are those of the last ``window`` ratios, sorted."""
    ring = ResidualRing(prior, quantile, window=32, refresh=1)
    for ratios in added:
        ring.add(ratios)
    latest = sorted([*prior, *(ratio for ratios in added for ratio in ratios)][-32:])
    assert ring.centre == latest[len(latest) // 2]
    assert ring.bound in latest
    within = sum(ratio <= ring.bound for ratio in latest) / len(latest)
    assert within >= quantile or ring.bound == latest[-1]
    assert ring.centre <= ring.bound
