"""The result of a run as a table for a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def result_table(summary: dict[str, Any]) -> Table:
    """Headline numbers of a summary, one a row."""
    config, steps, requests = summary["config"], summary["steps"], summary["requests"]
    finetune = summary["finetune"]
    title = f"{config['policy']}: {config['gpus']} x {config['gpu']}, {config['model']}, target {config['qos_ms']:g} ms"
    table = Table(title=title, title_justify="left", show_header=False, pad_edge=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    counts = (
        f"{requests['arrivals']:,} = {requests['completed']:,} + {requests['rejected']:,} + {requests['unfinished']:,}"
    )
    table.add_row("arrivals = completed + rejected + unfinished", counts)
    tokens = f"{requests['output_tokens_produced']:,} / {requests['output_tokens_asked']:,}"
    table.add_row("output tokens produced / asked", tokens)
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms")):
        table.add_row(f"{name} mean / p50 / p99 / max", _quantiles(summary[key]))
    table.add_row("step latency mean / p50 / p99 / max", _quantiles(steps["latency_ms"]))
    table.add_row("step latency p99.9", _ms(steps["latency_ms"], "p99.9"))
    violations = steps["violations"]
    table.add_row(
        "steps over target: solo / finetune-caused", f"{violations['solo']:,} / {violations['finetune_caused']:,}"
    )
    table.add_row("SLO attainment", _share(summary["slo_attainment"]))
    table.add_row("goodput", f"{summary['goodput_rps']:.2f} requests/s" if summary["goodput_rps"] is not None else "-")
    table.add_row("mean batch an instance", f"{steps['mean_batch']:.1f}" if steps["mean_batch"] is not None else "-")
    table.add_row("finetune throughput", f"{finetune['tokens_per_s']:,.0f} tokens/s on {finetune['gpus']} GPUs")
    table.add_row("finetune optimizer steps", f"{finetune['optimizer_steps']:,}")
    allotted = steps["sm_allotment"]
    table.add_row("SM allotment decode / finetune", f"{_share(allotted['decode'])} / {_share(allotted['finetune'])}")
    used = summary["utilisation_estimated"]
    table.add_row("utilisation SM / DRAM (estimated)", f"{_share(used['sm'])} / {_share(used['dram'])}")
    error = steps["prediction_error"]
    if error is not None:
        table.add_row("prediction error mean / p99", f"{_share(error['mean'])} / {_share(error['p99'])}")
    table.add_row("preemptions", f"{requests['preemptions']:,}")
    memory = summary["memory"]
    table.add_row("rows lent / reclaimed", f"{memory['rows_lent']:,} / {memory['rows_reclaimed']:,}")
    for what, count in summary["device_model"]["extrapolated"].items():
        share = count / summary["device_model"]["evaluated"][what]
        table.add_row(f"outside the measured range: {what}", f"{count:,} ({_share(share)})")
    baselines = summary.get("baselines")
    if baselines is not None:
        separate = baselines["separate"]
        gain = "-" if separate["gain"] is None else f"{separate['gain']:+.1%}"
        table.add_row(f"gain over separate ({separate['serving_gpus']} serving)", gain)
        table.add_row("violations above inference_only", f"{baselines['inference_only']['excess_violations']:,}")
    return table


def rejections(summary: dict[str, Any]) -> list[str]:
    """One line a reason, most frequent first."""
    reasons = summary["requests"]["rejection_reasons"]
    return [f"{count:,} rejected: {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]


def _quantiles(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return " / ".join(f"{found[key]:,.1f}" for key in ("mean", "p50", "p99", "max")) + " ms"


def _ms(found: dict[str, Any] | None, key: str) -> str:
    return "-" if found is None else f"{found[key]:,.1f} ms"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
