"""Residuals of step time, replayed from recorded sequences so that their spread and autocorrelation survive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class RecordedNoise:
    """A recorded series of ratios, read as a ring from a start that depends on (seed, instance, stream).

    Step ``k`` of an instance always sees entry ``start + k``: the noise is a function of (instance, step), not of
    the order in which anybody asks.
    """

    def __init__(self, ratios: Sequence[float], seed: int, stream: int) -> None:
        """``stream`` tells apart the series of one run."""
        self._ratios = list(ratios)
        self._seed = seed
        self._stream = stream
        self._starts: dict[int, int] = {}

    def take(self, instance: int, step: int, count: int) -> list[float]:
        """The ratios of ``count`` steps from ``step`` on."""
        ratios = self._ratios
        size = len(ratios)
        start = self._starts.get(instance)
        if start is None:
            sequence = np.random.SeedSequence((self._seed, instance, self._stream))
            start = int(sequence.generate_state(1)[0]) % size
            self._starts[instance] = start
        first = (start + step) % size
        taken = ratios[first : first + count]
        while len(taken) < count:
            taken += ratios[: count - len(taken)]
        return taken
