"""The table of the co-location benchmark: every cell of the plan is in it, measured or named as not measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "colocation" / "readme_table.py"

sys.path.append(str(ROOT))

from benchmarks.colocation.plan import HEADLINE, PLAN, POLICIES, group_of, result_name  # noqa: E402
from benchmarks.colocation.readme_table import table  # noqa: E402


def test_readme_has_the_table_of_the_results() -> None:
    """The script would write nothing else than what stands there."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False)
    assert done.returncode == 0, "run python benchmarks/colocation/readme_table.py"


def test_cells_without_a_result_are_named(tmp_path: Path) -> None:
    """Without any result all of them; a measured cell moves from the list to the table."""
    empty = table(tmp_path)
    assert empty.count(": all") == sum(len(points) for points in PLAN.values())
    group = next(iter(PLAN))
    cell = {"finetune": {"tokens_per_s": 7000.4}, "offered_tokens_per_s": 1600}
    document = {"cells": {"hybrid": cell}, "target_ms": 40.0, "gain_over_separate": {"hybrid": 0.5}}
    (tmp_path / f"{result_name(group, HEADLINE)}.json").write_text(json.dumps(document))
    found = table(tmp_path)
    assert "| `hybrid` | 7,000 | +50.0 % |" in found
    line = next(
        line
        for line in found.splitlines()
        if line.startswith("- llama3-8b, llama3-8b, one copy; 1,600 tokens/s, 40 ms:")
    )
    assert line.count("`") == 2 * (len(POLICIES) - 1)


def test_files_of_different_points_differ() -> None:
    """One file a group and point."""
    names = [result_name(group, point) for group, points in PLAN.items() for point in points]
    assert len(set(names)) == len(names)
    assert "llama3-8b__llama3-8b_1600tps_40ms" in names
    with pytest.raises(ValueError, match="there are llama3-8b__llama3-8b, "):
        group_of("gpt")
