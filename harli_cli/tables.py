"""The result of a run as a table for a terminal: title, then requests, latency, finetuning, GPU and trust."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from harli_cli.wording import milliseconds, number, quantiles, share, title

KEPT_VIOLATIONS = 0.001
"""Share of finetune-caused violations above which a gain was not had within the target."""

Row = tuple[str, str]


def result_table(summary: dict[str, Any]) -> Table:
    """Headline numbers of a summary, one a row."""
    table = Table(title=Text(title(summary)), title_justify="left", show_header=False, padding=(0, 1))
    table.add_column("figure")
    table.add_column("value", justify="right")
    sections = {
        "requests": _request_rows(summary),
        "latency": _latency_rows(summary),
        "finetuning": _finetune_rows(summary),
        "GPU": _gpu_rows(summary),
        "trust": _trust_rows(summary),
    }
    for name, rows in sections.items():
        table.add_section()
        table.add_row(name, "", style="bold")
        for label, value in rows:
            table.add_row(label, value)
    return table


def _request_rows(summary: dict[str, Any]) -> list[Row]:
    requests = summary["requests"]
    ends = " + ".join(f"{requests[end]:,}" for end in ("completed", "rejected", "unfinished"))
    tokens = f"{requests['output_tokens_produced']:,} / {requests['output_tokens_asked']:,}"
    return [
        ("arrivals = completed + rejected + unfinished", f"{requests['arrivals']:,} = {ends}"),
        ("output tokens produced / asked", tokens),
        ("SLO attainment", share(summary["slo_attainment"])),
        ("goodput (requests/s)", number(summary["goodput_rps"], 2)),
        ("preemptions", f"{requests['preemptions']:,}"),
    ]


def _latency_rows(summary: dict[str, Any]) -> list[Row]:
    steps = summary["steps"]
    named = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms"}
    rows = [(f"{name} mean / p50 / p99 / max (ms)", quantiles(summary[key])) for name, key in named.items()]
    over, violations = summary["itl_over_target"], steps["violations"]
    return [
        *rows,
        ("token gaps over target", f"{over['count']:,} ({share(over['share'], 2)})"),
        ("step latency mean / p50 / p99 / max (ms)", quantiles(steps["latency_ms"])),
        ("step latency p99.9 (ms)", milliseconds(steps["latency_ms"], "p99.9")),
        ("steps over target: solo / finetune-caused", f"{violations['solo']:,} / {violations['finetune_caused']:,}"),
    ]


def _finetune_rows(summary: dict[str, Any]) -> list[Row]:
    finetune = summary["finetune"]
    gpus = f"{finetune['gpus']} GPU{'' if finetune['gpus'] == 1 else 's'}"
    rows = [
        ("finetune throughput (tokens/s)", f"{number(finetune['tokens_per_s'])} on {gpus}"),
        ("finetune optimizer steps", f"{finetune['optimizer_steps']:,}"),
    ]
    if "baselines" in summary:
        separate, alone = summary["baselines"]["separate"], summary["baselines"]["inference_only"]
        gain = "-" if separate["gain"] is None else f"{separate['gain']:+.1%}"
        steps = summary["steps"]
        if steps["violations"]["finetune_caused"] > KEPT_VIOLATIONS * steps["count"]:
            gain += " (target not kept)"
        rows.append((f"gain over separate ({separate['serving_gpus']} serving)", gain))
        rows.append(("violations above inference_only", f"{alone['excess_violations']:,}"))
    return rows


def _gpu_rows(summary: dict[str, Any]) -> list[Row]:
    steps, memory, used = summary["steps"], summary["memory"], summary["utilisation_estimated"]
    decode, finetune = steps["sm_allotment"]["decode"], steps["sm_allotment"]["finetune"]
    idle = None if decode is None else max(0.0, 1.0 - decode - finetune)
    moved = [
        f"{memory[rows]:,} ({memory[rows] * memory['row_bytes'] / (1 << 30):,.1f} GiB)"
        for rows in ("rows_lent", "rows_reclaimed")
    ]
    return [
        ("mean batch an instance", number(steps["mean_batch"], 1)),
        ("SM allotment decode / finetune / idle", f"{share(decode)} / {share(finetune)} / {share(idle)}"),
        ("utilisation SM / DRAM (estimated)", f"{share(used['sm'])} / {share(used['dram'])}"),
        ("rows lent / reclaimed", " / ".join(moved)),
    ]


def _trust_rows(summary: dict[str, Any]) -> list[Row]:
    error, counts = (
        summary["steps"]["prediction_error"],
        summary.get("device_model", {"evaluated": {}, "extrapolated": {}}),
    )
    found = "-" if error is None else f"{share(error['mean'])} / {share(error['p99'])}"
    rows = [("prediction error (first step of each plan) mean / p99", found)]
    for kind, outside in counts["extrapolated"].items():
        found = f"{outside:,} ({share(outside / counts['evaluated'][kind])})"
        rows.append((f"outside the measured range: {kind}", found))
    return rows
