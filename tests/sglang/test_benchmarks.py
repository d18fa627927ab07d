"""The co-location benchmarks run on a CPU as they do on a GPU, on models with as much KV a token and hardly any weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.colocation.cells import gains
from tests.sglang.processes import environment

ROOT = Path(__file__).parents[2]


def benchmark(folder: Path, script: str, *options: str) -> dict[str, Any]:
    """Run it as its README says; the one result file that it writes."""
    lengths = folder / "lengths.csv"
    rows = [f"{index / 10:.1f},1000,{12 + index % 9}" for index in range(200)]
    lengths.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    command = [sys.executable, str(ROOT / "benchmarks" / "colocation" / script), "--device", "cpu", *options]
    done = subprocess.run(
        command, env={**environment(), "HARLI_RESULTS": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_cells_are_measured_once_and_nothing_is_begun_without_time(tmp_path: Path) -> None:
    """Each asked-for policy has its cell with where it comes from; a second run adds only what is missing."""
    options = [
        "--load", "100", "--layers", "2", "--max-rows", "48", "--micro-batches", "1", "--max-batch", "8", "--qos-ms", "150",
        "--warm-up-s", "1", "--window-s", "3", "--finetune-only-s", "2", "--skip-s", "0", "--context-tokens", "2048",
        "--trace", str(tmp_path / "lengths.csv"), "--no-sharing",
    ]  # fmt: skip
    first = benchmark(tmp_path, "cells.py", *options, "--policies", "hybrid", "separate_finetuning")
    assert set(first["cells"]) == {"hybrid", "separate_finetuning"}
    assert first["cells"]["hybrid"]["steps"] > 0
    assert first["cells"]["hybrid"]["requests"]["completed"] > 0
    assert first["gain_over_separate"].keys() <= {"hybrid"}  # a CPU may be too slow for two optimizer steps
    assert all(cell["command"][0] == "cells.py" for cell in first["cells"].values())
    alone = first["cells"]["separate_finetuning"]["finetune"]["tokens_per_s"]
    assert first["cells"]["hybrid"]["finetune_alone_tokens_per_s"] == alone
    stalls = first["cells"]["hybrid"]["host_stalls"]
    assert (stalls["driver_allocations"], stalls["kernels_made"]) == (0, [])
    assert stalls["longest_collection_ms"] >= 0.0
    policies = ["--policies", "hybrid", "separate_finetuning", "inference_only"]
    assert benchmark(tmp_path, "cells.py", *options, *policies, "--budget-s", "1") == first
    second = benchmark(tmp_path, "cells.py", *options, *policies)
    assert second["cells"] == first["cells"] | {"inference_only": second["cells"]["inference_only"]}
    assert second["not_measured"] == ["harli", "separate_serving", "static_split", "pause_on_load"]
    again = benchmark(tmp_path, "cells.py", *options, "--policies", "inference_only", "--again")
    assert again["cells"].keys() == second["cells"].keys()
    assert {name for name, cell in again["cells"].items() if cell != second["cells"][name]} == {"inference_only"}


def test_a_cell_under_other_samples_ends_the_run_before_anything_is_loaded(tmp_path: Path) -> None:
    """The cell, what it was measured under, and what to do, on standard error."""
    path = tmp_path / "llama3-8b__llama3-8b_1600tps_40ms.json"
    path.write_text(json.dumps({"cells": {"hybrid": {"samples": "a.jsonl"}}}))
    command = [sys.executable, str(ROOT / "benchmarks" / "colocation" / "cells.py"), "--samples", "b.jsonl"]
    done = subprocess.run(
        command, env={**environment(), "HARLI_RESULTS": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"{path.stem}, hybrid: measured under --samples a.jsonl, not under --samples b.jsonl; "
        "--again measures it anew, HARLI_RESULTS names another folder\n"
    )


def test_a_gain_is_over_finetuning_alone_in_the_same_process() -> None:
    """A cell that names its own baseline has that; one of before, that of its file; serving alone has no gain."""
    cells = {
        "hybrid": {"finetune": {"tokens_per_s": 80.0}, "finetune_alone_tokens_per_s": 100.0},
        "harli": {"finetune": {"tokens_per_s": 60.0}},
        "separate_finetuning": {"finetune": {"tokens_per_s": 90.0}},
        "inference_only": {},
    }
    assert gains(cells) == {"hybrid": pytest.approx(0.6), "harli": pytest.approx(1 / 3)}


def test_phases_move_memory_between_kv_and_finetuning(tmp_path: Path) -> None:
    """The heavy phase takes rows from the job, the window shrinks, every row's way back is there, and so is the figure."""
    found = benchmark(
        tmp_path, "phases.py", "--backend", "cuda", "--layers", "2", "--finetuned-layers", "32", "--max-rows", "22",
        "--micro-batches", "1", "--max-batch", "16", "--context-tokens", "2048", "--qos-ms", "250", "--duration-s", "36",
        "--batches", "1", "9", "2", "--lengths", str(tmp_path / "lengths.csv"), "--out", str(tmp_path / "run"),
    )  # fmt: skip
    light, heavy, medium = found["phases"]
    assert light["batch"] < heavy["batch"]
    assert light["rows_kv"] < heavy["rows_kv"]
    assert heavy["rows_lent"] < light["rows_lent"]
    assert heavy["window_layers"] < light["window_layers"]
    assert medium["batch"] < heavy["batch"]
    rows = found["reclaiming"]
    assert rows["rows"] == len(rows["each"]) == found["pool"]["rows_reclaimed"] > 0
    assert all(took_ms > 0.0 and steps >= 0 for _, took_ms, steps in rows["each"])
    assert set(found["series"]) >= {"time_s", "batch", "rows_kv", "rows_lent", "window_layers", "latency_ms"}
    assert found["requests"]["rejected"] == 0
    assert found["finetune_stopped"] is None
    assert (tmp_path / "run" / "steps.parquet").stat().st_size > 0
