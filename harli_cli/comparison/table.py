"""A comparison for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from harli_cli.comparison.measures import GAINS, MEASURES
from harli_cli.report.pages import cell

SHOWN = ("finetune_tokens_per_s", "step_p50_ms", "step_p99_ms", "step_max_ms", "violations_solo",
         "violations_finetune_caused", "ttft_p99_ms", "tpot_p99_ms", "slo_attainment")  # fmt: skip
"""What fits on a terminal; the files have all figures."""


def lines(document: Mapping[str, Any]) -> list[list[str]]:
    """Heading, then one line a policy."""
    chosen = {one.name: one for one in MEASURES if one.name in SHOWN}
    first, *rest = SHOWN
    heading = ["policy", "target", chosen[first].heading, *(f"over {name}" for name in GAINS.values())]
    heading += [chosen[name].heading for name in rest]
    found = [heading]
    for row in document["rows"]:
        cells = [cell(row[first], chosen[first].shape), *(cell(row[name], "+.1%") for name in GAINS)]
        cells += [cell(row[name], chosen[name].shape) for name in rest]
        found.append([row["policy"], "kept" if row["keeps_target"] else "missed", *cells])
    return found


def comparison_table(documents: Sequence[Mapping[str, Any]]) -> Table:
    """For `rich`: comparisons that differ in the number of GPUs, each a part; the best policy within the target in bold."""
    config, seeds = documents[0]["config"], documents[0]["seeds"]
    gpus = [str(document["config"]["gpus"]) for document in documents]
    about = (
        f"{config['trace'].rpartition('/')[2]} | {', '.join(gpus)} decode GPUs | target {config['qos_ms']:g} ms | "
        f"{len(seeds)} seeds, mean ± half of the 95 % interval"
    )
    table = Table(title=Text(about), title_justify="left")
    if len(documents) > 1:
        table.add_column("gpus", justify="right")
    for index, name in enumerate(lines(documents[0])[0]):
        table.add_column(name, justify="left" if index < 2 else "right")
    for count, document in zip(gpus, documents, strict=True):
        for cells in lines(document)[1:]:
            style = "bold" if cells[0] == document["best_within_target"] else None
            table.add_row(*([count] if len(documents) > 1 else []), *cells, style=style)
        table.add_section()
    return table


def markdown(document: Mapping[str, Any]) -> str:
    """For a README."""
    heading, *rows = lines(document)
    rows = [[f"`{policy}`", *cells] for policy, *cells in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heading, ["---"] * len(heading), *rows))
