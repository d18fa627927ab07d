"""The paper's choice (section 6): of all splits, the one whose predicted latency is closest to the target from below."""

from __future__ import annotations

from collections.abc import Sequence


def closest_below(predicted_ms: Sequence[float], target_ms: float) -> int | None:
    """Index of the largest prediction that does not exceed ``target_ms``; `None` when all of them do."""
    best: int | None = None
    for index, latency_ms in enumerate(predicted_ms):
        if latency_ms <= target_ms and (best is None or latency_ms > predicted_ms[best]):
            best = index
    return best
