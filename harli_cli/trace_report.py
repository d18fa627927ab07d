"""What ``harli trace inspect`` prints: a table, and the rate over time as a line of blocks."""

from __future__ import annotations

import sys
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harli_cli.remarks import repairs
from harli_cli.wording import number
from traces import LoadedTrace
from traces.statistics import QUANTILES, TraceFacts, rate_profile

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
SPARKLINE_WIDTH = 40


def print_report(loaded: LoadedTrace, facts: TraceFacts) -> None:
    """Print it, in ASCII where the terminal has no blocks."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table(title=Text(loaded.trace.source), title_justify="left", show_header=False, padding=(0, 1))
    table.add_column("figure", no_wrap=True)
    table.add_column("value")
    for label, value in report_rows(loaded, facts, _blocks()):
        table.add_row(label, Text(value))
    console.print(table)
    for line in (*repairs({"trace": {"repairs": asdict(loaded.repairs)}}), *facts.oddities):
        console.print(f"odd: {line}" if line in facts.oddities else line, markup=False, highlight=False, soft_wrap=True)


def report_rows(loaded: LoadedTrace, facts: TraceFacts, blocks: str = BLOCKS) -> list[tuple[str, str]]:
    """Label and text of each row."""
    quantiles = "/".join("min" if at == 0 else "max" if at == 1 else f"p{at * 100:g}" for at in QUANTILES)
    over = " / ".join("-" if value is None else f"{value:,.2f}" for value in facts.dispersion.values())
    return [
        ("format", f"{loaded.format}: {loaded.reason}"),
        ("requests", f"{facts.requests:,}"),
        ("span (s)", f"{facts.span_s:,.1f}"),
        ("rate mean / peak (requests/min)", f"{number(facts.rate_per_min, 1)} / {facts.peak_per_min:,}"),
        ("seconds without a request", f"{facts.zero_second_share:.1%}"),
        ("index of dispersion at 1 s / 60 s", over),
        (f"prompt tokens {quantiles}", _numbers(facts.prompt_quantiles)),
        (f"output tokens {quantiles}", _numbers(facts.output_quantiles)),
        ("rate over the span", sparkline(rate_profile(loaded.trace, SPARKLINE_WIDTH), blocks)),
    ]


def sparkline(counts: NDArray[np.int64], blocks: str = BLOCKS) -> str:
    """One block a count, as high as its share of the largest; a blank for none."""
    most = max(int(counts.max()), 1)
    return "".join(" " if not count else blocks[(count * len(blocks) - 1) // most] for count in counts.tolist())


def _blocks() -> str:
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ASCII_BLOCKS
    return BLOCKS


def _numbers(quantiles: dict[float, float]) -> str:
    return " / ".join(f"{value:,.0f}" for value in quantiles.values())
