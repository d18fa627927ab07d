"""What a reader should know beside the table: why requests were rejected, and how far the figures can be trusted."""

from __future__ import annotations

from typing import Any

TRUSTED_SHARE = 0.05
"""Share of extrapolated durations of one kind from which on a warning is due."""

WHERE = "docs/adr/0002-device-model-from-samples.md"
CAUSES = {"colocated": "usually batches under 8 beside finetuning, which were not measured; "}
"""Why durations of a kind lie outside the measured range, where there is a usual reason."""


def remarks(summary: dict[str, Any]) -> list[str]:
    """Lines to print below the table."""
    return [*rejections(summary), *extrapolation_warnings(summary)]


def rejections(summary: dict[str, Any]) -> list[str]:
    """One line a reason, most frequent first."""
    reasons = summary["requests"]["rejection_reasons"]
    return [f"{count:,} rejected: {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]


def extrapolation_warnings(summary: dict[str, Any]) -> list[str]:
    """One line for each kind of duration of which more than `TRUSTED_SHARE` lies outside the measured range."""
    counts = summary.get("device_model", {"evaluated": {}, "extrapolated": {}})  # only a simulation has one
    found: list[str] = []
    for kind, outside in counts["extrapolated"].items():
        share = outside / counts["evaluated"][kind]
        if share > TRUSTED_SHARE:
            found.append(
                f"warning: {share:.1%} of {kind} durations lie outside the measured range "
                f"({CAUSES.get(kind, '')}see {WHERE})"
            )
    return found
