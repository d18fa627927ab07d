"""The allocator benchmarks as programs: help is help, and what is replayed is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "allocator"


def run(script: Path, *arguments: str, results: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with its results in a folder of the test's."""
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HARLI_RESULTS": str(results)},
    )


@pytest.mark.parametrize("script", ["run_all.py", "fragmentation.py", "lending_latency.py"])
def test_help_runs_nothing(tmp_path: Path, script: str) -> None:
    """``--help`` prints the options and measures nothing; an unknown option is refused."""
    done = run(SCRIPTS / script, "--help", results=tmp_path)
    assert (done.returncode, done.stdout[:6]) == (0, "usage:")
    assert run(SCRIPTS / script, "--frobnicate", results=tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_recorded_iteration_is_found_from_another_results_folder(tmp_path: Path) -> None:
    """With HARLI_RESULTS the committed recording is replayed unless that folder has one; the results say which."""
    done = run(SCRIPTS / "fragmentation.py", "--iterations", "1", results=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "fragmentation.json").read_text())
    assert (figures["trace"], figures["trace_folder"]) == ("finetune_iteration_trace.json", "committed")
    (tmp_path / "finetune_iteration_trace.json").write_text(json.dumps({"steps": [100, 5000, -1, -2]}))
    done = run(SCRIPTS / "fragmentation.py", "--iterations", "1", results=tmp_path)
    assert f"iterations: {tmp_path}" in done.stdout
    figures = json.loads((tmp_path / "fragmentation.json").read_text())
    assert (figures["trace_folder"], figures["allocations_per_iteration"]) == ("HARLI_RESULTS", 2)


def test_made_up_iterations_are_asked_for(tmp_path: Path) -> None:
    """Synthetic iterations are replayed with ``--synthetic`` alone, and the results say so."""
    done = run(SCRIPTS / "fragmentation.py", "--iterations", "1", "--synthetic", results=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "fragmentation.json").read_text())
    assert (figures["trace"], figures["trace_folder"]) == ("synthetic", None)
    assert figures["cross_stream_free_ns"].keys() == {"0_pending", "100_pending", "1000_pending", "10000_pending"}
