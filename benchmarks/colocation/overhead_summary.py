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
        "decode_over_sglang_same_attention": ratios(variants, "harli", "sglang_same_attention"),
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
    """How many there are, and what all of them take more than one: attention backends and graphs."""
    every, one = (variants.get(name, {}).get("startup") for name in ("harli", "one_graph_set"))
    if every is None:
        return None
    found = {name: every[name] for name in ("graph_sets", "batch_sizes", "graphs", "graph_sets_gib", "graph_sets_s")}
    if one is not None:
        found |= {f"one_{name}": one[name] for name in ("graph_sets_gib", "graph_sets_s")}
        used = (every["gpu_used_gib"], one["gpu_used_gib"])
        found["gpu_used_gib_more"] = None if None in used else used[0] - used[1]
    return found
