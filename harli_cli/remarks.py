"""What a reader should know beside the table: why requests were rejected, and how far the figures can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TRUSTED_SHARE = 0.05
"""Share of extrapolated durations of one kind from which on a warning is due."""

UNSERVED_SHARE = 0.05
"""Share of requests that were not served by the end from which on a warning is due."""

WHERE = "docs/adr/0002-device-model-from-samples.md"
CAUSES = {"colocated": "usually batches under 8 beside finetuning, which were not measured; "}
"""Why durations of a kind lie outside the measured range, where there is a usual reason."""


def remarks(summary: dict[str, Any]) -> list[str]:
    """Lines to print below the table."""
    return [*repairs(summary), *rejections(summary), *job_lines(summary), *extrapolation_warnings(summary)]


def job_lines(summary: dict[str, Any]) -> list[str]:
    """What became of a finetuning job from a file, or why any job stopped (on a GPU only)."""
    job = summary["finetune"].get("job")
    if job is None:
        return []
    done = "" if job["step"] is None else f" after step {job['step']:,} of {job['max_steps']:,}"
    if job["ending"] in ("failed", "refused"):
        return [f"finetuning {job['ending']}{done}, serving went on: {job['reason']}"]
    if job["adapter"] is not None:
        return [f"finetuning finished{done}; adapter: {job['adapter']}"]
    if job["checkpoint"] is not None:
        return [f"finetuning stopped{done}; it goes on from {job['checkpoint']}"]
    return [f"finetuning {job['ending']}{done}: {job['reason']}"] if job["reason"] is not None else []


REPAIRS = {
    "sorted_rows": "rows of the trace were out of order and were sorted",
    "dropped_failed": "failed requests of the trace were left out",
    "dropped_invalid": "rows of the trace could not be read and were left out",
    "clipped_prompts": "prompts of the trace were cut to --clip-prompt",
    "derived_arrivals": "requests follow others of their session; their arrivals are not in the trace, which gives only "
    "the waiting time between an answer and the next request",
}
"""What each count of `traces.Repairs` says."""


def repairs(summary: dict[str, Any]) -> list[str]:
    """One line for each kind of repair that was made."""
    counts = summary["trace"]["repairs"]
    return [f"{counts[kind]:,} {words}" for kind, words in REPAIRS.items() if counts.get(kind)]


def rejections(summary: dict[str, Any]) -> list[str]:
    """One line a reason, most frequent first."""
    reasons = summary["requests"]["rejection_reasons"]
    return [f"{count:,} rejected: {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]


def overload_warning(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For a comparison: the policies under which more than `UNSERVED_SHARE` of the requests were not served by the end."""
    shares: dict[str, float] = {}
    for row in rows:
        counts = {name: (row.get(name) or {}).get("mean") or 0.0 for name in ("completed", "rejected", "unfinished")}
        if sum(counts.values()):
            shares[str(row["policy"])] = (counts["rejected"] + counts["unfinished"]) / sum(counts.values())
    told = _above(UNSERVED_SHARE, shares)
    if not told:
        return []
    return [
        f"warning: requests rejected, or not finished when the run ended: {told}; either more arrive than these "
        "GPUs serve (see TTFT; more --gpus or --prefill-gpus), or the run is too short (--horizon-s)"
    ]


def trust_warning(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """For a comparison: the policies of which more than `TRUSTED_SHARE` of steps beside finetuning were not measured."""
    shares = {str(row["policy"]): (row.get("extrapolated") or {}).get("mean") or 0.0 for row in rows}
    told = _above(TRUSTED_SHARE, shares)
    if not told:
        return []
    return [
        f"warning: durations of steps beside finetuning outside the measured range: {told} "
        f"({CAUSES['colocated']}see {WHERE})"
    ]


def _above(limit: float, shares: Mapping[str, float]) -> str:
    """The policies whose share is above ``limit``, with it; nothing where there are none."""
    return ", ".join(f"{policy} {share:.1%}" for policy, share in shares.items() if share > limit)


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
