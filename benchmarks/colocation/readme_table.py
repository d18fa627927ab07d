"""Rewrites the table between the markers in README.md beside this file from the results; cells not measured are named.

python benchmarks/colocation/readme_table.py        # --check only says whether the table is that of the results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.colocation.plan import PLAN, Group, Point, result_name  # noqa: E402

FOLDER = Path(__file__).resolve().parent
README, RESULTS = FOLDER / "README.md", FOLDER / "results"
BEGIN, END = "<!-- cells: begin -->", "<!-- cells: end -->"
HEADER = (
    "| served, finetuned, weights | load, tokens/s | target, ms | policy | finetune tokens/s | over `separate` "
    "| step latency p50 / p99 / max, ms | steps over target | decode tokens/s | mean batch |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def table(results: Path) -> str:
    """All measured cells in the order of the plan, and the others by name."""
    rows, missing = [], []
    for group, points in PLAN.items():
        for point in points:
            path = results / f"{result_name(group, point)}.json"
            document = json.loads(path.read_text("utf-8")) if path.exists() else {"cells": {}}
            for policy in point.policies:
                cell = document["cells"].get(policy)
                if cell is not None:
                    rows.append(row(group, point, document, policy, cell))
            absent = [policy for policy in point.policies if policy not in document["cells"]]
            if absent:
                what = "all" if len(absent) == len(point.policies) else ", ".join(f"`{policy}`" for policy in absent)
                missing.append(f"- {weights(group)}; {load_of(point)}: {what}")
    body = "\n".join([HEADER, *rows])
    return f"{body}\n\nNot measured:\n\n" + "\n".join(missing) if missing else body


def row(group: Group, point: Point, document: dict[str, Any], policy: str, cell: dict[str, Any]) -> str:
    """One cell."""
    finetune = (cell.get("finetune") or {}).get("tokens_per_s")
    gain = document.get("gain_over_separate", {}).get(policy)
    latency = cell.get("step_latency_ms")
    target = document.get("target_ms", point.target_ms)
    columns = (
        weights(group),
        f"{point.load_tokens_per_s:,}"
        + ("" if point.window_s == Point(0, 0.0).window_s else f", {point.window_s:g} s"),
        "-" if target is None else f"{target:g}",
        f"`{policy}`",
        "" if finetune is None or policy in ("inference_only", "separate_serving") else f"{finetune:,.0f}",
        "" if gain is None else f"{gain:+.1%}".replace("%", " %"),
        "" if not latency else " / ".join(f"{latency[name]:.1f}" for name in ("p50", "p99", "max")),
        "" if "steps" not in cell else f"{cell['steps_over_target']} of {cell['steps']:,}",
        "" if "decode_tokens_per_s" not in cell else f"{cell['decode_tokens_per_s']:,.0f}",
        "" if cell.get("mean_batch") is None else f"{cell['mean_batch']:.0f}",
    )
    return "| " + " | ".join(columns) + " |"


def weights(group: Group) -> str:
    """The models, and what is special about their memory."""
    kind = "" if group.served != group.finetuned else ", one copy" if group.shared else ", two copies"
    return f"{group.served}, {group.finetuned}{kind}" + (
        "" if group.memory_gb is None else f", {group.memory_gb:g} GB in all"
    )


def load_of(point: Point) -> str:
    """A point in words."""
    target = "1.3 times solo" if point.target_ms is None else f"{point.target_ms:g} ms"
    return f"{point.load_tokens_per_s:,} tokens/s, {target}" + (
        "" if point.window_s == Point(0, 0.0).window_s else f", {point.window_s:g} s"
    )


def main() -> int:
    """Replace the table, or compare it."""
    before, begin, rest = README.read_text("utf-8").partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{README} lacks {BEGIN} or {END}")
    wanted = f"\n{table(RESULTS)}\n"
    if "--check" in sys.argv[1:]:
        return 0 if inside == wanted else 1
    README.write_text(f"{before}{BEGIN}{wanted}{END}{after}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
