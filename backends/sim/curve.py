"""Piecewise linear curves over total KV tokens, and their interpolation over the logarithm of the batch size."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

FAR = 1e15
"""Further out than any number of tokens."""


@dataclass(frozen=True, slots=True)
class Curve:
    """``ys`` at ``xs`` (ascending, at least one); straight lines between and, beyond the ends, the last lines prolonged."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @classmethod
    def level_ends(cls, points: Mapping[float, float]) -> Curve:
        """A curve through ``points`` that stays level beyond its ends."""
        xs = sorted(points)
        ys = [points[x] for x in xs]
        return cls((-FAR, *xs, FAR), (ys[0], *ys, ys[-1]))

    def at(self, x: float) -> float:
        """The value at ``x``."""
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return ys[0]
        right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
        left = right - 1
        return ys[left] + (ys[right] - ys[left]) / (xs[right] - xs[left]) * (x - xs[left])

    def run(self, x: int, step: int, ratios: list[float]) -> list[float]:
        """Values at ``x``, ``x + step``, .. (``step >= 1``) times one of ``ratios`` each: `at` gives the same one by one."""
        xs, ys = self.xs, self.ys
        if len(xs) == 1:
            return [ys[0] * ratio for ratio in ratios]
        last = len(xs) - 1
        right = min(max(bisect_left(xs, x), 1), last)
        places = range(x, x + step * len(ratios), step)
        values: list[float] = []
        while places and places[-1] > xs[right] and right < last:
            on_line = bisect_right(places, xs[right])
            values += self._left_of(right, places[:on_line], ratios[:on_line])
            places, ratios = places[on_line:], ratios[on_line:]
            right += 1
        rest = self._left_of(right, places, ratios)
        return values + rest if values else rest

    def _left_of(self, right: int, places: range, ratios: list[float]) -> list[float]:
        """Values on the line that ends at knot ``right``."""
        base_x, base_y = self.xs[right - 1], self.ys[right - 1]
        slope = (self.ys[right] - base_y) / (self.xs[right] - base_x)
        return [(base_y + slope * (x - base_x)) * ratio for x, ratio in zip(places, ratios, strict=True)]


def product(first: Curve, second: Curve) -> Curve:
    """First times second at the knots of both (within the first's range), straight lines between."""
    xs = tuple(sorted({*first.xs, *(x for x in second.xs if first.xs[0] <= x <= first.xs[-1])}))
    return Curve(xs, tuple(first.at(x) * second.at(x) for x in xs))


class BatchCurves:
    """One curve a measured batch size; between two of them linear in log(batch) at equal total KV tokens."""

    def __init__(self, curves: Mapping[int, Curve]) -> None:
        """``curves`` maps a batch size to values over total KV tokens."""
        self.batches = tuple(sorted(curves))
        self._curves = dict(curves)

    def curve(self, batch: int) -> Curve:
        """The curve of any batch size; beyond the measured sizes the two outermost are prolonged."""
        known = self._curves.get(batch)
        if known is not None:
            return known
        batches = self.batches
        if len(batches) == 1:
            return self._curves[batches[0]]
        right = min(max(bisect_left(batches, batch), 1), len(batches) - 1)
        low, high = batches[right - 1], batches[right]
        weight = math.log(batch / low) / math.log(high / low)
        below, above = self._curves[low], self._curves[high]
        xs = tuple(sorted({*below.xs, *above.xs}))
        return Curve(xs, tuple((1.0 - weight) * below.at(x) + weight * above.at(x) for x in xs))

    def measured_contexts(self, batch: int) -> tuple[float, float] | None:
        """Least and largest context (tokens a request) measured at both neighbouring sizes; `None` beyond all sizes."""
        batches = self.batches
        if not batches[0] <= batch <= batches[-1]:
            return None
        right = bisect_left(batches, batch)
        neighbours = {batches[right]} if batches[right] == batch else {batches[right - 1], batches[right]}
        least = max(self._curves[known].xs[0] / known for known in neighbours)
        largest = min(self._curves[known].xs[-1] / known for known in neighbours)
        return least, largest
