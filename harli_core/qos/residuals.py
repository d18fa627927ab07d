"""Online residual correction: what measured latencies were, relative to the prediction."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class ResidualRing:
    """The last ``window`` ratios measured / predicted of one choice of partitions.

    It begins with ``prior`` (the ratios seen when the profile was fitted), so the first steps are corrected too.
    ``centre`` is the median, ``bound`` the ``quantile`` of the ring; both are brought up to date every ``refresh``
    additions.
    """

    __slots__ = ("_pending", "_ratios", "_refresh", "bound", "centre", "quantile")

    def __init__(self, prior: Sequence[float], quantile: float, window: int = 256, refresh: int = 64) -> None:
        """``quantile`` in (0, 1]; an empty prior stands for a perfect predictor."""
        self.quantile = quantile
        self._refresh = refresh
        self._ratios = deque(prior or [1.0], maxlen=window)
        self._pending = 0
        self._update()

    def add(self, ratios: Sequence[float]) -> None:
        """Take in new ratios, oldest first."""
        self._ratios.extend(ratios)
        self._pending += len(ratios)
        if self._pending >= self._refresh:
            self._update()

    def _update(self) -> None:
        ordered = sorted(self._ratios)
        self.centre = ordered[len(ordered) // 2]
        self.bound = ordered[min(len(ordered) - 1, int(self.quantile * len(ordered)))]
        self._pending = 0
