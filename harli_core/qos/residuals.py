"""Online residual correction: what measured latencies were, relative to the prediction."""

from __future__ import annotations

from collections.abc import Sequence


class ResidualRing:
    """The last ``window`` ratios measured / predicted of one choice of partitions.

    It begins with ``prior`` (the ratios seen when the profile was fitted), so the first steps are corrected too.
    ``centre`` is the median, ``bound`` the ``quantile`` of the ring; both are brought up to date every ``refresh``
    additions.
    """

    __slots__ = ("_next", "_pending", "_ratios", "_refresh", "_window", "bound", "centre", "quantile")

    def __init__(
        self, prior: Sequence[float], quantile: float, window: int = 256, refresh: int = 32
    ) -> None:
        """``quantile`` in (0, 1]; an empty prior stands for a perfect predictor."""
        self.quantile = quantile
        self._window = window
        self._refresh = refresh
        self._ratios = list(prior)[-window:] or [1.0]
        self._next = 0
        self._pending = 0
        self._update()

    def add(self, ratios: Sequence[float]) -> None:
        """Take in new ratios, oldest first."""
        ring = self._ratios
        for ratio in ratios:
            if len(ring) < self._window:
                ring.append(ratio)
            else:
                ring[self._next] = ratio
                self._next = (self._next + 1) % self._window
        self._pending += len(ratios)
        if self._pending >= self._refresh:
            self._update()

    def _update(self) -> None:
        ordered = sorted(self._ratios)
        self.centre = ordered[len(ordered) // 2]
        self.bound = ordered[min(len(ordered) - 1, int(self.quantile * len(ordered)))]
        self._pending = 0
