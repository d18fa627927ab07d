"""What the figures show, small: a few hundred points each, however long the run was."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harli_cli.report.columns import Column, ResultColumns

BINS = 240
"""Points of a series over time."""

CDF_LEVELS = (*np.linspace(0.0, 0.99, 150).tolist(), *np.linspace(0.9901, 1.0, 100).tolist())
"""Shares of steps at which the latency CDF is drawn: dense where targets are missed."""

WORST_REQUESTS = 15

Series = list[float | None]


def digest(result: ResultColumns) -> dict[str, Any]:
    """Everything that the figures of one run are drawn from, as plain lists; empty ones where there was no step."""
    summary, steps = result.summary, result.steps
    edges = np.linspace(0.0, max(float(summary["duration_s"]), 1e-9), BINS + 1)
    return {
        "time_s": _rounded((edges[:-1] + edges[1:]) / 2.0),
        "series": {**_time_series(steps, edges), "finetune_tokens_per_s": _finetune_rate(summary, steps, edges)},
        "cdf": _cdf(steps["latency_ms"]),
        "errors": _errors(steps),
        "worst": _worst_requests(result),
    }


def _time_series(steps: dict[str, Column], edges: NDArray[np.float64]) -> dict[str, Series]:
    """Means over the steps that end in each bin, weighted by their length; null in a bin without a step."""
    weights = steps["latency_ms"]
    place = np.clip(np.searchsorted(edges, steps["end_s"], side="right") - 1, 0, BINS - 1)
    total = np.bincount(place, weights, BINS)
    names = ("batch", "decode_sms", "finetune_sms", "rows_kv", "rows_lent", "window_layers", "turn_ms", "latency_ms")
    found: dict[str, Series] = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        for name in names:
            found[name] = _rounded(np.bincount(place, weights * steps[name], BINS) / total)
    highest = np.full(BINS, -np.inf)
    np.maximum.at(highest, place, weights)
    found["latency_max_ms"] = _rounded(highest)
    return found


def _finetune_rate(summary: dict[str, Any], steps: dict[str, Column], edges: NDArray[np.float64]) -> Series:
    """Tokens a second, all GPUs together. What no step saw (GPUs that only finetune) is spread evenly."""
    progress = np.zeros(BINS + 1)
    for instance in np.flatnonzero(np.bincount(steps["instance"])):
        own = steps["instance"] == instance
        progress += np.interp(edges, steps["end_s"][own], steps["finetune_tokens"][own], left=0.0)
    unseen = max(float(summary["finetune"]["tokens"]) - progress[-1], 0.0)
    rate = (np.diff(progress) + unseen / BINS) / np.diff(edges)
    return _rounded(rate)


def _cdf(latency_ms: Column) -> dict[str, Series]:
    if not len(latency_ms):
        return {"latency_ms": [], "share": []}
    quantiles = np.quantile(latency_ms, CDF_LEVELS, method="inverted_cdf")
    return {"latency_ms": _rounded(quantiles), "share": [round(level, 6) for level in CDF_LEVELS]}


def _errors(steps: dict[str, Column]) -> list[dict[str, float | str]]:
    """Boxes of predicted / measured - 1 for the first step of each plan: finetuning alone in turns, or beside decode."""
    boxes: list[dict[str, float | str]] = []
    if not len(steps["step"]):
        return boxes
    columns = ("predicted_ms", "batch", "decode_sms", "finetune_sms", "instance", "finetune_tokens")
    changed = np.ones(len(steps["step"]), dtype=bool)
    changed[1:] = np.any([np.diff(steps[name]) != 0 for name in columns], axis=0)
    known = changed & np.isfinite(steps["predicted_ms"])
    error = steps["predicted_ms"][known] / steps["latency_ms"][known] - 1.0
    beside, turns = steps["finetune_sms"][known] > 0, steps["turn_ms"][known] > 0.0
    kinds = {
        "decode alone": ~beside & ~turns,
        "after a turn": ~beside & turns,
        "beside finetuning": beside & ~turns,
        "beside, after a turn": beside & turns,
    }
    for name, chosen in kinds.items():
        if chosen.any():
            low, q1, middle, q3, high = np.quantile(error[chosen], (0.01, 0.25, 0.5, 0.75, 0.99)).tolist()
            boxes.append(
                {
                    "name": name,
                    "count": int(chosen.sum()),
                    "low": low,
                    "q1": q1,
                    "median": middle,
                    "q3": q3,
                    "high": high,
                }
            )
    return boxes


def _worst_requests(result: ResultColumns) -> list[dict[str, float | int | None]]:
    """Those furthest over a limit, or closest to one: the larger of TTFT and TPOT over their limits."""
    config, requests = result.summary["config"], result.requests
    arrived = np.isfinite(requests["first_token_s"].astype(np.float64))
    ttft = requests["ttft_s"] * 1000.0 / config["ttft_slo_ms"]
    tpot = requests["tpot_s"] * 1000.0 / config["qos_ms"]
    badness = np.where(arrived, np.fmax(np.nan_to_num(ttft), np.nan_to_num(tpot)), -1.0)
    order = np.argsort(-badness, kind="stable")[:WORST_REQUESTS]
    found: list[dict[str, float | int | None]] = []
    for index in order[badness[order] >= 0.0].tolist():
        last_s = float(requests["last_token_s"][index])
        found.append(
            {
                "request": int(requests["request"][index]),
                "arrival_s": round(float(requests["arrival_s"][index]), 3),
                "ttft_s": float(requests["ttft_s"][index]),
                "decode_s": last_s - float(requests["first_token_s"][index]) if np.isfinite(last_s) else None,
                "tpot_ms": _finite(float(requests["tpot_s"][index]) * 1000.0),
                "output_tokens": int(requests["output_tokens"][index]),
            }
        )
    return found


def _rounded(values: NDArray[np.float64]) -> Series:
    """Five significant digits are more than a screen shows; null for what is not finite."""
    return [_finite(float(f"{value:.5g}")) for value in values.tolist()]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
