"""``harli run --backend cuda --device cpu`` as a process of its own, on a model that is tiny but has the KV of LLaMA3-8B."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.sglang import scenes

SHAPE = scenes.Shape(layers=2, hidden=64, heads=8, kv_heads=8, head_dim=128, intermediate=128, vocab=263)
"""Byte tokens and a few special ones."""


def trace_of(path: Path, requests: int, gap_s: float) -> Path:
    """Small requests, ``gap_s`` apart."""
    lines = [f"{index * gap_s:.6f},{8 + index % 7},{6 + index % 5}" for index in range(requests)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *lines]) + "\n")
    return path


def job_file(folder: Path, shape: scenes.Shape = SHAPE, **changes: Any) -> Path:
    """A job on the served model's folder with byte tokens; ``changes`` go into the file."""
    scenes.random_folder(folder / "model", shape, "float32")
    rows = [{"instruction": f"count {n}", "input": "", "output": " ".join(map(str, range(n)))} for n in range(1, 14)]
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "counts.json").write_text(json.dumps(rows))
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"counts": {"file_name": "counts.json"}}))
    values = {
        "model_name_or_path": str(folder / "model"),
        "tokenizer": "byte",
        "dataset": "counts",
        "dataset_dir": str(folder / "data"),
        "output_dir": str(folder / "adapter"),
        "cutoff_len": 64,
        "lora_rank": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.001,
        "max_steps": 2000,
        "save_steps": 2000,
        **changes,
    }
    path = folder / "job.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


def command(folder: Path, trace: Path, *more: str) -> list[str]:
    """``harli run`` on the CPU, results in ``folder/out``."""
    options = {
        "--backend": "cuda", "--device": "cpu", "--prefill": "local", "--model-path": str(folder / "model"),
        "--trace": str(trace), "--memory-gb": "24", "--max-batch": "8", "--qos-ms": "400", "--out": str(folder / "out"),
    }  # fmt: skip
    return [sys.executable, "-m", "harli_cli", "run", *(part for pair in options.items() for part in pair), *more]


def environment() -> dict[str, str]:
    """What stands in for packages that SGLang imports and does not use on a CPU is found last."""
    stubs = Path(__file__).parent / "stubs"
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(stubs)])}


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """Start it; output is kept."""
    return subprocess.Popen(
        arguments, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder
    )


def wait_for(true: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = 240.0) -> None:
    """Until ``true()``; fails where the process ends before that, or the limit passes."""
    until_s = time.monotonic() + limit_s
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s, "it takes too long"
        time.sleep(0.1)


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, dict[str, Any], str, str]:
    """Exit code, summary, standard output, standard error."""
    out, err = process.communicate(timeout=240.0)
    summary = folder / "out" / "summary.json"
    return process.returncode, json.loads(summary.read_text()) if summary.exists() else {}, out, err
