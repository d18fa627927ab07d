"""Where benchmarks write, and how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks.*, after the installed packages

from benchmarks.record import results_folder, write_json


def test_results_lie_beside_the_benchmark_unless_another_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """HARLI_RESULTS is for all of them."""
    monkeypatch.delenv("HARLI_RESULTS", raising=False)
    assert results_folder("/benchmarks/of_it/script.py") == Path("/benchmarks/of_it/results")
    monkeypatch.setenv("HARLI_RESULTS", "elsewhere")
    assert results_folder("/benchmarks/of_it/script.py") == Path("elsewhere")


def test_results_are_replaced_whole_and_keep_their_order_where_it_tells_something(tmp_path: Path) -> None:
    """The folder is made; keys are sorted unless asked otherwise; nothing else is left in it."""
    path = tmp_path / "new" / "result.json"
    write_json(path, {"b": 1, "a": [2]})
    assert path.read_text() == '{\n "a": [\n  2\n ],\n "b": 1\n}\n'
    write_json(path, {"b": 1, "a": [2]}, indent=None, sort_keys=False)
    assert path.read_text() == '{"b": 1, "a": [2]}\n'
    assert list(path.parent.iterdir()) == [path]
