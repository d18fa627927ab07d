"""Cells of earlier runs count as measured only under the same samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks.*, after the installed packages

from benchmarks.colocation.earlier_cells import cells_of, of_other_samples
from benchmarks.colocation.plan import HEADLINE, LLAMA, POLICIES, Group, Point, result_name

GROUP, LIGHT = Group(LLAMA, LLAMA), Point(400, 40.0)


def measured(folder: Path, point: Point, **samples: str | None) -> None:
    """A result file with a cell a policy, each under its samples."""
    cells = {policy: {} if name is None else {"samples": name} for policy, name in samples.items()}
    (folder / f"{result_name(GROUP, point)}.json").write_text(json.dumps({"cells": cells}))


def told(folder: Path, samples: str | None, *policies: str) -> list[str]:
    """What a run of both points would say."""
    return list(of_other_samples(folder, GROUP, (HEADLINE, LIGHT), policies or POLICIES, samples))


def test_cells_under_the_same_samples_go_on(tmp_path: Path) -> None:
    """By the name of the file, wherever it lies; without any, under what ships; where nothing is measured, always."""
    assert told(tmp_path, "a.jsonl") == told(tmp_path, None) == []
    measured(tmp_path, HEADLINE, hybrid="a.jsonl", harli="a.jsonl")
    assert told(tmp_path, "elsewhere/a.jsonl") == []
    measured(tmp_path, HEADLINE, hybrid=None)
    assert told(tmp_path, None) == []
    assert cells_of(tmp_path, GROUP, HEADLINE) == {"hybrid": {}}
    assert cells_of(tmp_path, GROUP, LIGHT) == {}


def test_a_cell_under_other_samples_is_named_with_both_and_what_to_do(tmp_path: Path) -> None:
    """One line a cell, in every direction."""
    measured(tmp_path, HEADLINE, hybrid="a.jsonl", harli="b.jsonl")
    measured(tmp_path, LIGHT, hybrid=None)
    what_to_do = "--again measures it anew, HARLI_RESULTS names another folder"
    assert told(tmp_path, "b.jsonl") == [
        "llama3-8b__llama3-8b_1600tps_40ms, hybrid: measured under --samples a.jsonl, not under --samples b.jsonl; "
        + what_to_do,
        "llama3-8b__llama3-8b_400tps_40ms, hybrid: measured under the profile that ships, not under --samples b.jsonl; "
        + what_to_do,
    ]
    assert [line.partition(":")[0] for line in told(tmp_path, None)] == [
        "llama3-8b__llama3-8b_1600tps_40ms, hybrid", "llama3-8b__llama3-8b_1600tps_40ms, harli"
    ]  # fmt: skip


def test_cells_that_are_not_asked_for_are_nobodys_concern(tmp_path: Path) -> None:
    """A run may add another policy under other samples."""
    measured(tmp_path, HEADLINE, hybrid="a.jsonl")
    assert told(tmp_path, None, "harli") == []
