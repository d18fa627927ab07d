"""The columns of a comparison: a name for ``--check`` and files, and where a summary has the figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a summary. ``path`` leads through its sections; ``shape`` is how a table prints it.

    ``of``: the figure is a share of what lies there; then nothing at ``path`` is none.
    """

    name: str
    heading: str
    path: tuple[str, ...]
    shape: str
    meaning: str
    of: tuple[str, ...] | None = None


MEASURES = (
    Measure("finetune_tokens_per_s", "finetune tokens/s", ("finetune", "tokens_per_s"), ",.0f",
            "tokens of completed optimizer steps a second, all GPUs together"),
    Measure("step_p50_ms", "step p50", ("steps", "latency_ms", "p50"), ",.1f", "median step latency in ms"),
    Measure("step_p99_ms", "p99", ("steps", "latency_ms", "p99"), ",.1f", "99th percentile of step latency in ms"),
    Measure("step_p99_9_ms", "p99.9", ("steps", "latency_ms", "p99.9"), ",.1f", "99.9th percentile of step latency in ms"),
    Measure("step_max_ms", "max", ("steps", "latency_ms", "max"), ",.1f", "longest step in ms"),
    Measure("violations_solo", "over: solo", ("steps", "violations", "solo"), ",.1f",
            "steps over target that decode alone would have put there too"),
    Measure("violations_finetune_caused", "finetune", ("steps", "violations", "finetune_caused"), ",.1f",
            "steps over target because of finetuning"),
    Measure("steps", "steps", ("steps", "count"), ",.0f", "decode steps"),
    Measure("mean_batch", "batch", ("steps", "mean_batch"), ",.1f", "requests that decode together, mean over steps"),
    Measure("ttft_p99_ms", "TTFT p99", ("ttft_ms", "p99"), ",.0f", "99th percentile of time to first token in ms"),
    Measure("tpot_p99_ms", "TPOT p99", ("tpot_ms", "p99"), ",.1f", "99th percentile of time per output token in ms"),
    Measure("itl_p99_ms", "ITL p99", ("itl_ms", "p99"), ",.1f", "99th percentile of gaps between tokens in ms"),
    Measure("slo_attainment", "SLO", ("slo_attainment",), ".2%", "share of finished requests within both limits"),
    Measure("goodput_rps", "goodput", ("goodput_rps",), ",.2f", "requests a second within both limits"),
    Measure("completed", "completed", ("requests", "completed"), ",.0f", "requests completed"),
    Measure("rejected", "rejected", ("requests", "rejected"), ",.0f", "requests rejected"),
    Measure("unfinished", "unfinished", ("requests", "unfinished"), ",.0f", "requests under way when the run ended"),
    Measure("preemptions", "preemptions", ("requests", "preemptions"), ",.1f", "requests that lost their KV cache"),
    Measure("sm_decode", "SMs decode", ("steps", "sm_allotment", "decode"), ".1%", "share of SM time given to decode"),
    Measure("sm_finetune", "finetune", ("steps", "sm_allotment", "finetune"), ".1%",
            "share of SM time given to finetuning"),
    Measure("prediction_error_mean", "prediction error", ("steps", "prediction_error", "mean"), ".2%",
            "relative error of the step latency that the policy expected, mean"),
    Measure("extrapolated", "extrapolated", ("device_model", "extrapolated", "colocated"), ".1%",
            "share of steps beside finetuning whose duration lies outside the measured range",
            ("device_model", "evaluated", "colocated")),
)  # fmt: skip
"""Figures taken from each run's summary."""

GAINS = {"gain_over_separate": "separate", "gain_over_static_split": "static_split"}
"""Figures that compare the finetune throughput of two runs with equal seed and GPUs, minus 1."""

NAMES = (*(measure.name for measure in MEASURES), *GAINS)
"""Every name that a check may ask for."""


def figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The measures of one summary; `None` where it has none (no step, say)."""
    return {measure.name: _figure(summary, measure) for measure in MEASURES}


def _figure(summary: Mapping[str, Any], measure: Measure) -> float | None:
    found = _at(summary, measure.path)
    if measure.of is None:
        return found
    whole = _at(summary, measure.of)
    return (found or 0.0) / whole if whole else None


def _at(summary: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    found: Any = summary
    for key in path:
        if found is None:
            return None
        found = found.get(key)
    return None if found is None else float(found)
