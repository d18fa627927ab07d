"""The benchmarks of a replay, each as the program that it is, on a trace of a few requests."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "replay"


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Sixteen requests where the benchmarks look for the Azure 2023 conversation trace."""
    path = tmp_path / "traces" / "azure" / "AzureLLMInferenceTrace_conv.csv"
    path.parent.mkdir(parents=True)
    rows = [f"2023-11-16 18:15:{second:02}.0000000,{100 + second},{20 + second}" for second in range(16)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


def _run(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *arguments, "--results", str(folder / "results")]
    shared = {**os.environ, "HARLI_SHARED": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=shared)


def _result(folder: Path, name: str) -> Any:
    return json.loads((folder / "results" / name).read_text())


def test_exact_compares_the_tables_of_both_runs(few: Path, tmp_path: Path) -> None:
    """Its digests are those of what `harli run` writes, with and without --exact-steps."""
    done = _run("exact.py", tmp_path, "azure-conv", "--policies", "harli", "--gpus", "2")
    assert done.returncode == 0, done.stderr
    (row,) = _result(tmp_path, "exact_azure-conv.json")["rows"]
    assert (row["policy"], row["requests"], row["requests_parquet_identical"]) == ("harli", 16, True)
    run = [sys.executable, "-m", "harli_cli", "run", "--trace", str(few), "--policy", "harli", "--gpus", "2"]
    for way, option in (("together", []), ("exact", ["--exact-steps"])):
        subprocess.run([*run, *option, "--out", str(tmp_path / way)], check=True, capture_output=True, cwd=tmp_path)
        table = (tmp_path / way / "requests.parquet").read_bytes()
        assert row["requests_parquet_sha256"][way] == hashlib.sha256(table).hexdigest()


def test_exact_knows_its_traces(tmp_path: Path) -> None:
    """An unknown one is refused with the names of those that it knows; one that is not there, with where it looked."""
    assert "known traces are azure-conv" in _run("exact.py", tmp_path, "azure").stderr
    assert "traces/mooncake/conversation_trace.jsonl" in _run("exact.py", tmp_path, "mooncake").stderr


def test_comparison_measures_all_policies(few: Path, tmp_path: Path) -> None:
    """All six policies are compared; the result says what was measured, and where the trace lies on no machine."""
    done = _run("comparison.py", tmp_path, "--gpus", "2", "--seeds", "2", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    result = _result(tmp_path, "comparison.json")
    assert result["median"]["policies"] == 6
    assert result["median"]["cpu_s"] > 0
    assert "harli compare --trace AzureLLMInferenceTrace_conv.csv --gpus 2 --seeds 2," in result["measured"]
    assert str(few) not in json.dumps(result)


def test_growth_keeps_the_load_of_a_gpu(few: Path, tmp_path: Path) -> None:
    """Requests grow with GPUs at equal duration, and with copies at equal GPUs."""
    done = _run("growth.py", tmp_path, "--gpus", "1", "8", "--copies", "3", "--limit", "12")
    assert done.returncode == 0, done.stderr
    result = _result(tmp_path, "growth_hybrid.json")
    assert [(row["gpus"], row["requests"]) for row in result["gpus"]] == [(1, 3), (8, 24)]
    assert "--rate-scale 0.25 --limit 3" in result["gpus"][0]["measured"]
    assert "--prefill-gpus 2 --rate-scale 2 --limit 12 --repeat 2" in result["gpus"][1]["measured"]
    (row,) = result["requests"]
    assert (row["copies"], row["requests"]) == (3, 36)
    assert min(row["cpu_s"], row["peak_mib"]) > 0
    assert str(tmp_path) not in json.dumps(result)


def test_growth_refuses_a_load_that_no_copies_make(tmp_path: Path) -> None:
    """Six GPUs are no whole number of traces."""
    assert "--gpus 6: expected less than 4, or a multiple of it" in _run("growth.py", tmp_path, "--gpus", "6").stderr
