"""Cells that the results have from earlier runs, and whether they were measured under the same samples."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.colocation.plan import Group, Point, result_name


def cells_of(folder: Path, group: Group, point: Point) -> dict[str, Any]:
    """The cells of a point by policy; none where it has no file."""
    path = folder / f"{result_name(group, point)}.json"
    cells: dict[str, Any] = json.loads(path.read_text("utf-8"))["cells"] if path.exists() else {}
    return cells


def of_other_samples(
    folder: Path, group: Group, points: Sequence[Point], policies: Collection[str], samples: str | None
) -> Iterator[str]:
    """A line for each cell that would be taken for measured and was not under the file ``samples`` (`None`: what ships)."""
    wanted = _named(samples)
    for point in points:
        for policy, cell in cells_of(folder, group, point).items():
            found = _named(cell.get("samples"))
            if policy in policies and found != wanted:
                yield (
                    f"{result_name(group, point)}, {policy}: measured under {found}, not under {wanted}; "
                    "--again measures it anew, HARLI_RESULTS names another folder"
                )


def _named(samples: str | None) -> str:
    return "the profile that ships" if samples is None else f"--samples {Path(samples).name}"
