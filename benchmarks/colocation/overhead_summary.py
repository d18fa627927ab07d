"""What the measured overheads come to: each figure that there is a limit for, from the parts that it takes."""

from __future__ import annotations

from typing import Any

Variants = dict[str, dict[str, Any]]

LIMITS = {"decode_over_sglang": 1.02, "startup_s": 60.0, "decide_us_a_step": 50.0, "launch_added_p99_us": 200.0}
"""What is aimed at: at most this."""


def summary(variants: Variants) -> dict[str, Any]:
    """Ratios of medians, start-up, graph sets, decisions and launches; `None` where a part is yet to be measured."""
    return {
        "limits": LIMITS,
        "decode_over_sglang": ratios(variants, "harli", "sglang"),
        "decode_over_sglang_overlap": ratios(variants, "harli", "sglang_overlap"),
        "one_graph_set_over_sglang": ratios(variants, "one_graph_set", "sglang"),
        "startup_s": {name: of(variants, name, "startup", "total_s") for name in ("harli", "one_graph_set", "sglang")}
        | {"harli_job": of(variants, "harli", "job", "total_s")},
        "graph_sets": graph_sets(variants),
        "decide_us_a_step": of(variants, "harli", "decisions", "decide_us_a_step"),
        "launch_added_us": of(variants, "harli", "launch", "added_us"),
    }


def of(variants: Variants, variant: str, part: str, name: str) -> Any:
    """One figure, `None` where it is not there."""
    return variants.get(variant, {}).get(part, {}).get(name)


def ratios(variants: Variants, ours: str, theirs: str) -> dict[str, float] | None:
    """Median step of ``ours`` over that of ``theirs``, batch by batch."""
    one, other = (of(variants, name, "decode", "batches") for name in (ours, theirs))
    if one is None or other is None:
        return None
    return {
        batch: round(figures["step_ms"]["p50"] / other[batch]["step_ms"]["p50"], 4) for batch, figures in one.items()
    }


def graph_sets(variants: Variants) -> dict[str, Any] | None:
    """How many, and what all of them take against one: their attention backends and the graphs."""
    found = {name: variants.get(name, {}).get("startup") for name in ("harli", "one_graph_set")}
    return {
        name: {
            "sets": start["graph_sets"],
            "batch_sizes": start["batch_sizes"],
            "graphs": start["graphs"],
            "gib": start["graph_sets_gib"],
            "seconds": start["graph_sets_s"],
            "gpu_used_gib": start["gpu_used_gib"],
        }
        for name, start in found.items()
        if start is not None
    } or None
