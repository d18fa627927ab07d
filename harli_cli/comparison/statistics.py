"""Mean and confidence interval over seeds, gains between runs of equal seed, and the best policy within the target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harli_cli.comparison.measures import GAINS, MEASURES
from harli_cli.tables import KEPT_VIOLATIONS

LEVEL = 0.95
"""Of the intervals."""

Figures = Mapping[str, float | None]


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and half width of Student's 95 % interval; no width for a single value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return {"mean": mean, "half_width": None}
    from scipy.special import stdtrit  # noqa: PLC0415  (heavy, and only a comparison needs it)

    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = float(stdtrit(count - 1, 0.5 + LEVEL / 2.0))
    return {"mean": mean, "half_width": quantile * math.sqrt(variance / count)}


def with_gains(runs: Mapping[tuple[str, int], Figures]) -> dict[tuple[str, int], dict[str, float | None]]:
    """The figures of each (policy, seed) and its gains over the baselines under the same seed."""
    found: dict[tuple[str, int], dict[str, float | None]] = {}
    for (policy, seed), figures in runs.items():
        own = figures["finetune_tokens_per_s"]
        gains: dict[str, float | None] = {}
        for name, baseline in GAINS.items():
            other = runs[baseline, seed]["finetune_tokens_per_s"]
            gains[name] = own / other - 1.0 if own is not None and other else None
        found[policy, seed] = {**figures, **gains}
    return found


def row(policy: str, seeds: Sequence[int], runs: Mapping[tuple[str, int], Figures]) -> dict[str, Any]:
    """One policy over all seeds: each figure's mean, half width and single values, and whether it kept the target."""
    statistics: dict[str, Any] = {}
    for name in (*(measure.name for measure in MEASURES), *GAINS):
        values = [runs[policy, seed][name] for seed in seeds]
        known = [value for value in values if value is not None]
        summary = interval(known) if len(known) == len(values) else {"mean": None, "half_width": None}
        statistics[name] = {**summary, "values": values}
    return {"policy": policy, "keeps_target": all(keeps_target(runs[policy, seed]) for seed in seeds), **statistics}


def keeps_target(figures: Figures) -> bool:
    """Whether finetuning put no more than `KEPT_VIOLATIONS` of the steps over the target."""
    steps, violations = figures["steps"], figures["violations_finetune_caused"]
    return not steps or (violations or 0.0) / steps <= KEPT_VIOLATIONS


def best(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The policy with the highest mean finetune throughput of those that kept the target under every seed."""
    kept = [row for row in rows if row["keeps_target"] and row["finetune_tokens_per_s"]["mean"]]
    if not kept:
        return None
    return str(max(kept, key=lambda row: row["finetune_tokens_per_s"]["mean"])["policy"])
