"""Figures of a summary as words: numbers, shares, and the title that says what was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLE_WIDTH = 84
"""Columns of a title's line."""


def title(summary: dict[str, Any]) -> str:
    """What ran on what: policy, trace, GPUs, models, target and seed, in lines of whole parts."""
    config, requests = summary["config"], summary["requests"]
    finetuned = config["finetune_model"] or config["model"]
    finetuning = f"finetuning {finetuned}" if summary["finetune"]["gpus"] else "no finetuning"
    prefill = f" + {config['prefill_gpus']} prefill" if config["prefill_gpus"] else ""
    arrivals = f"{requests['arrivals']:,} request{'' if requests['arrivals'] == 1 else 's'}"
    when = f"stopped at {config['horizon_s']:,g} s" if cut_short(summary) else f"in {summary['duration_s']:,.0f} s"
    parts = (
        config["policy"],
        f"{Path(config['trace']).name}, {arrivals}{',' if cut_short(summary) else ''} {when}",
        f"{config['gpus']} decode{prefill} {config['gpu']}",
        f"{config['model']}, {finetuning}",
        f"target {config['qos_ms']:g} ms, seed {config['seed']}",
    )
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= TITLE_WIDTH:
            lines[-1] += f" | {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def cut_short(summary: dict[str, Any]) -> bool:
    """Whether a horizon ended the run before every request of the trace was done."""
    requests = summary["requests"]
    return summary["config"]["horizon_s"] is not None and requests["unfinished"] + requests["not_arrived"] > 0


def quantiles(found: dict[str, Any] | None) -> str:
    """Mean, median, p99 and maximum of a distribution."""
    return "-" if found is None else " / ".join(f"{found[key]:,.1f}" for key in ("mean", "p50", "p99", "max"))


def milliseconds(found: dict[str, Any] | None, key: str) -> str:
    """One figure of a distribution."""
    return "-" if found is None else f"{found[key]:,.1f}"


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands apart."""
    return "-" if value is None else f"{value:,.{digits}f}"


def share(value: float | None, digits: int = 1) -> str:
    """A share in percent."""
    return "-" if value is None else f"{value:.{digits}%}"
