"""What the regressions share: the solver they are handed, relative errors, and leave-one-group-out folds."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

LeastSquares = Callable[[Sequence[Sequence[float]], Sequence[float]], tuple[float, ...]]
"""(rows of features, positive targets) -> the coefficients with the least sum of squared *relative* errors."""

Point = TypeVar("Point")


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Absolute relative errors, |predicted / measured - 1|, of ``count`` predictions; p99 is the nearest rank."""

    count: int
    mean: float
    p99: float
    max: float


def summarise(predicted: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """Summarise the relative errors of at least one prediction."""
    errors = sorted(abs(p / m - 1.0) for p, m in zip(predicted, measured, strict=True))
    rank = math.ceil(0.99 * len(errors)) - 1
    return ErrorSummary(len(errors), sum(errors) / len(errors), errors[rank], errors[-1])


def dot(coefficients: Sequence[float], row: Sequence[float]) -> float:
    """Sum of products, left to right."""
    total = 0.0
    for coefficient, feature in zip(coefficients, row, strict=True):
        total += coefficient * feature
    return total


def left_out_folds(
    points: Sequence[Point], group: Callable[[Point], Hashable]
) -> list[tuple[list[Point], list[Point]]]:
    """One (rest, group) pair for each group of points, in the order in which the groups first appear."""
    keys = list(dict.fromkeys(group(point) for point in points))
    return [
        ([point for point in points if group(point) != key], [point for point in points if group(point) == key])
        for key in keys
    ]


def quantiles(values: Sequence[float], count: int = 33) -> tuple[float, ...]:
    """``count`` evenly spaced quantiles from minimum to maximum, interpolated between order statistics."""
    ordered = sorted(values)
    last = len(ordered) - 1
    found: list[float] = []
    for index in range(count):
        place = index * last / (count - 1)
        below = min(int(place), last - 1) if last else 0
        above = min(below + 1, last)
        found.append(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
    return tuple(found)
