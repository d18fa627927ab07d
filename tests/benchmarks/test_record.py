"""Where benchmarks write, and how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # for benchmarks.*; last, so that the installed packages are the ones tested

from benchmarks.record import results_folder


def test_results_lie_beside_the_benchmark_unless_another_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """HARLI_RESULTS is for all of them."""
    monkeypatch.delenv("HARLI_RESULTS", raising=False)
    assert results_folder("/benchmarks/of_it/script.py") == Path("/benchmarks/of_it/results")
    monkeypatch.setenv("HARLI_RESULTS", "elsewhere")
    assert results_folder("/benchmarks/of_it/script.py") == Path("elsewhere")
