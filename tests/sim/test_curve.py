"""Curves over KV tokens and their interpolation over the logarithm of the batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sim.curve import BatchCurves, Curve

CURVE = Curve((0.0, 10.0, 30.0), (1.0, 2.0, 8.0))


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Any curve of 1 to 6 points."""
    xs = sorted(draw(st.sets(st.integers(0, 100_000), min_size=1, max_size=6)))
    ys = draw(st.lists(st.floats(0.1, 100.0), min_size=len(xs), max_size=len(xs)))
    return Curve(tuple(float(x) for x in xs), tuple(ys))


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0, 1.0), (10, 2.0), (30, 8.0), (5, 1.5), (20, 5.0), (-10, 0.0), (40, 11.0)],
)
def test_straight_lines_between_points_and_beyond(x: float, expected: float) -> None:
    """Points themselves, halfway between two, and the outermost lines prolonged."""
    assert CURVE.at(x) == pytest.approx(expected)


def test_a_single_point_is_level() -> None:
    """One measurement says the same everywhere."""
    assert Curve((5.0,), (7.0,)).at(1e6) == 7.0
    assert Curve((5.0,), (7.0,)).run(0, 3, [1.0, 2.0]) == [7.0, 14.0]


def test_level_ends() -> None:
    """Beyond its ends such a curve stays as it is."""
    level = Curve.level_ends({10.0: 2.0, 0.0: 1.0})
    assert [level.at(x) for x in (-1e6, 0.0, 5.0, 10.0, 1e6)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0])


@given(curve=curves(), x=st.integers(0, 120_000), step=st.integers(1, 3000), count=st.integers(0, 200))
def test_a_run_is_its_points_one_by_one(curve: Curve, x: int, step: int, count: int) -> None:
    """Many equal steps at once give the same floats, so how far ahead steps are laid out changes nothing."""
    ratios = [1.0 + k / 7.0 for k in range(count)]
    assert curve.run(x, step, ratios) == [curve.at(x + step * k) * ratio for k, ratio in enumerate(ratios)]


@given(curve=curves(), x=st.integers(0, 120_000), step=st.integers(1, 3000), first=st.integers(0, 50))
def test_a_run_may_be_cut_anywhere(curve: Curve, x: int, step: int, first: int) -> None:
    """A run in two pieces is the run, exactly."""
    pieces = [*curve.run(x, step, [1.0] * first), *curve.run(x + step * first, step, [1.0] * (60 - first))]
    assert pieces == curve.run(x, step, [1.0] * 60)


@given(curve=curves(), share=st.floats(0.0, 1.0))
def test_between_two_points_it_stays_between_them(curve: Curve, share: float) -> None:
    """Inside its range a curve never leaves the range of its values."""
    x = curve.xs[0] + share * (curve.xs[-1] - curve.xs[0])
    assert min(curve.ys) - 1e-9 <= curve.at(x) <= max(curve.ys) + 1e-9


BATCHES = BatchCurves({4: Curve((0.0, 100.0), (1.0, 2.0)), 16: Curve((0.0, 200.0), (3.0, 7.0))})


def test_measured_batches_keep_their_curves() -> None:
    """At a measured batch nothing is interpolated."""
    assert BATCHES.batches == (4, 16)
    assert BATCHES.curve(16).at(100.0) == 5.0


def test_between_batches_it_is_linear_in_the_logarithm() -> None:
    """8 lies halfway between 4 and 16: at equal total KV tokens the mean of both."""
    for tokens in (0.0, 50.0, 100.0, 200.0):
        mean = (BATCHES.curve(4).at(tokens) + BATCHES.curve(16).at(tokens)) / 2
        assert BATCHES.curve(8).at(tokens) == pytest.approx(mean)


@pytest.mark.parametrize("batch", [1, 2, 5, 13, 64])
def test_any_batch_by_the_formula(batch: int) -> None:
    """Inside and beyond the measured batches, weight = log(batch / 4) / log(4)."""
    weight = math.log(batch / 4) / math.log(4)
    expected = (1 - weight) * 1.5 + weight * 4.0
    assert BATCHES.curve(batch).at(50.0) == pytest.approx(expected)


def test_one_measured_batch_serves_all() -> None:
    """Without a second batch there is nothing to interpolate."""
    assert BatchCurves({4: CURVE}).curve(100).at(10) == 2.0


def test_measured_contexts_are_those_of_both_neighbours() -> None:
    """Tokens a request that both neighbouring batches saw; none beyond the measured batches."""
    curves_of = BatchCurves({2: Curve((20.0, 200.0), (1.0, 2.0)), 8: Curve((40.0, 1600.0), (1.0, 2.0))})
    assert curves_of.measured_contexts(2) == (10.0, 100.0)
    assert curves_of.measured_contexts(8) == (5.0, 200.0)
    assert curves_of.measured_contexts(4) == (10.0, 100.0)
    assert curves_of.measured_contexts(1) is None
    assert curves_of.measured_contexts(9) is None
