"""The report of a run and of a comparison: what stands in them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harli_cli.comparison.measures import GAINS, MEASURES
from harli_cli.report.columns import read_result
from harli_cli.report.digest import digest
from harli_cli.report.figures import Digests, compare_figures, run_figures
from harli_cli.report.page import Headline, write_page
from harli_cli.results import REPORT
from harli_cli.wording import milliseconds, number, share, title
from harli_core.errors import ConfigError


def run_report(folder: Path) -> Path:
    """Write ``report.html`` into a finished result folder, from what lies there."""
    result = read_result(folder)
    summary = result.summary
    try:
        figures = run_figures(digest(result), summary)
        policy, *rest = title(summary).replace("\n", " | ").split(" | ")
        headlines = run_headlines(summary)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder / 'summary.json'}: not the summary of a run ({type(error).__name__}: {error})"
        ) from None
    path = folder / REPORT
    write_page(path, f"Harli: {policy}", ", ".join(rest), headlines, "", figures)
    return path


def run_headlines(summary: Mapping[str, Any]) -> list[Headline]:
    """The figures that matter most, with their definitions."""
    steps, requests, finetune = summary["steps"], summary["requests"], summary["finetune"]
    target_ms, over = summary["config"]["qos_ms"], steps["violations"]
    found = [
        Headline("finetune tokens/s", number(finetune["tokens_per_s"]),
                 "tokens of completed optimizer steps a second, all GPUs together"),
        Headline("step latency p99, ms", milliseconds(steps["latency_ms"], "p99"),
                 f"99 % of steps took no longer from one emission of tokens to the next; the target is {target_ms:g} ms"),
        Headline("steps over target by finetuning", f"{over['finetune_caused']:,}",
                 "steps over the target that decode alone would have kept"),
        Headline("steps over target solo", f"{over['solo']:,}", "steps that decode alone would have put over it too"),
        Headline("SLO attainment", share(summary["slo_attainment"]),
                 "share of finished requests within the limits of both TTFT and TPOT"),
        Headline("TPOT p99, ms", milliseconds(summary["tpot_ms"], "p99"),
                 "time per output token of a request after its first: 99 % of requests had no more"),
        Headline("TTFT p99, ms", milliseconds(summary["ttft_ms"], "p99"), "arrival to first token: 99 % had no more"),
        Headline("requests completed", f"{requests['completed']:,} of {requests['arrivals']:,}",
                 f"{requests['rejected']:,} were rejected, {requests['unfinished']:,} were unfinished at the end"),
    ]  # fmt: skip
    if "baselines" in summary:
        gain = summary["baselines"]["separate"]["gain"]
        found.insert(1, Headline("gain over separate", "-" if gain is None else f"{gain:+.1%}",
                                 "finetune throughput over that of `separate` on as many GPUs, minus 1"))  # fmt: skip
    return found


def compare_report(path: Path, document: Mapping[str, Any], digests: Digests) -> None:
    """Write the report of a comparison (`harli_cli.comparison.command` says what ``document`` holds)."""
    rows, config, seeds = document["rows"], document["config"], document["seeds"]
    best = document["best_within_target"]
    about = (
        f"{Path(config['trace']).name}, {config['gpus']} decode + {config['prefill_gpus']} prefill {config['gpu']}, "
        f"{config['model']}, target {config['qos_ms']:g} ms, seeds {', '.join(str(seed) for seed in seeds)}; "
        f"figures over time are of seed {seeds[0]}"
    )
    headlines = [Headline("best within the target", best or "none",
                          "highest mean finetune throughput of those that kept the target under every seed")]  # fmt: skip
    for row in rows:
        if row["policy"] == best:
            for name, baseline in GAINS.items():
                gain = row[name]["mean"]
                headlines.append(
                    Headline(f"its gain over {baseline}", "-" if gain is None else f"{gain:+.1%}",
                             "finetune throughput over the other's on as many GPUs, same seeds, minus 1")
                )  # fmt: skip
            headlines.append(Headline("its finetune tokens/s", number(row["finetune_tokens_per_s"]["mean"]),
                                      "tokens of completed optimizer steps a second, mean over seeds"))  # fmt: skip
    figures = compare_figures(rows, digests, config)
    write_page(path, "Harli: policies compared", about, headlines, _table(rows, best), figures)


def _table(rows: Sequence[Mapping[str, Any]], best: str | None) -> str:
    shown = [(name, f"over {baseline}", "+.1%", "finetune throughput over the other's, minus 1, mean over seeds")
             for name, baseline in GAINS.items()]  # fmt: skip
    shown = [(one.name, one.heading, one.shape, one.meaning) for one in MEASURES[:1]] + shown
    shown += [(one.name, one.heading, one.shape, one.meaning) for one in MEASURES[1:]]
    heads = "".join(f'<th title="{html.escape(meaning)}">{html.escape(label)}</th>' for _, label, _, meaning in shown)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{cell(row[name], shape)}</td>" for name, _, shape, _ in shown)
        kept = "kept" if row["keeps_target"] else "missed"
        kind = ' class="best"' if row["policy"] == best else ""
        name = html.escape(str(row["policy"]))
        lines.append(f'<tr{kind}><td>{name}</td><td class="{kept}">{kept}</td>{cells}</tr>')
    target = '<th title="finetuning put 0.1 % of steps or fewer over it">target</th>'
    head = f"<thead><tr><th>policy</th>{target}{heads}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def cell(statistic: Mapping[str, float | None], shape: str) -> str:
    """Mean and half width of its interval."""
    mean, width = statistic["mean"], statistic["half_width"]
    if mean is None:
        return "-"
    text = format(mean, shape)
    return text if not width else f"{text} ± {format(width, shape.lstrip('+'))}"
