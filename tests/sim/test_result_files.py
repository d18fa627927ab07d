"""Runs from configuration to files: the same bytes every time, and nothing that looks fine after a failed audit."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from backends.sim.counting_allocator import CountingAllocator
from harli_cli.run import execute
from harli_core.config import RunConfig
from harli_core.errors import AuditError, HarliError, MemoryAccountingError
from harli_core.records import RequestBook

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """An Azure trace of 40 requests in 8 seconds."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [
        f"2023-11-16 18:00:{k // 5:02d}.{(k % 5) * 2000000:07d},{100 + 37 * k},{5 + 11 * k % 180}" for k in range(40)
    ]
    path = tmp_path / "trace.csv"
    path.write_text("\r\n".join(lines))
    return path


@pytest.fixture
def run(trace_file: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Execute the trace into ``tmp_path/out``."""

    def executed(**config: Any) -> dict[str, Any]:
        settings = RunConfig(trace=str(trace_file), gpus=1, **config)
        return execute(settings, tmp_path / "out", None, baselines=False, stage=lambda name, total: lambda count: None)

    return executed


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("policy", ["hybrid", "harli"])
def test_two_processes_write_the_same_bytes(policy: str, trace_file: Path, tmp_path: Path) -> None:
    """Two interpreters with different hash seeds: summary, tables and decision log are equal, byte for byte."""
    found = []
    for hash_seed in ("1", "271828"):
        work = tmp_path / hash_seed
        work.mkdir()
        options = ["--trace", str(trace_file), "--policy", policy, "--qos-ms", "12", "--log", "a.log", "--out", "."]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "harli_cli", "run", *options]
        subprocess.run(command, cwd=work, env=environment, check=True, capture_output=True)
        found.append(digests(work))
    assert found[0].keys() == {"a.log", "requests.parquet", "steps.parquet", "summary.json"}
    assert found[0] == found[1]


def test_another_seed_is_another_run(run: Any, tmp_path: Path) -> None:
    """The seed reaches the noise of the device: a comparison of equal files would not be empty."""
    run(seed=0)
    first = digests(tmp_path / "out")
    run(seed=1)
    assert digests(tmp_path / "out")["steps.parquet"] != first["steps.parquet"]


def test_files_agree_with_the_summary(run: Any, tmp_path: Path) -> None:
    """Rows of the tables are the requests and steps that the summary counts; token emissions add up."""
    summary = run(prefill_gpus=1)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == json.loads(json.dumps(summary))
    requests = pq.read_table(tmp_path / "out" / "requests.parquet").to_pydict()
    steps = pq.read_table(tmp_path / "out" / "steps.parquet").to_pydict()
    assert len(requests["request"]) == summary["requests"]["arrivals"] == 40
    assert sum(requests["produced_tokens"]) == summary["requests"]["output_tokens_produced"]
    assert len(steps["step"]) == summary["steps"]["count"]
    assert sum(steps["batch"]) + 40 == summary["requests"]["output_tokens_produced"]
    assert max(steps["latency_ms"]) == summary["steps"]["latency_ms"]["max"]


def test_steps_end_when_the_next_begin(run: Any, tmp_path: Path) -> None:
    """In the table of one instance each step ends its latency after the one before, or later where it was idle."""
    run()
    steps = pq.read_table(tmp_path / "out" / "steps.parquet").to_pydict()
    assert steps["step"] == list(range(len(steps["step"])))
    begins = [
        end_s - latency_ms / 1000.0 for end_s, latency_ms in zip(steps["end_s"], steps["latency_ms"], strict=True)
    ]
    gaps = [begin - end for begin, end in zip(begins[1:], steps["end_s"], strict=False)]
    assert min(gaps) > -1e-9
    assert sum(gap < 1e-9 for gap in gaps) > 0.9 * len(gaps)


def broken_books(monkeypatch: pytest.MonkeyPatch) -> type[HarliError]:
    """Requests are noted to have produced one token more than they did."""
    note = RequestBook.note_produced

    def note_wrongly(self: RequestBook, index: int, remaining: int) -> None:
        note(self, index, remaining - 1)

    monkeypatch.setattr(RequestBook, "note_produced", note_wrongly)
    return AuditError


def broken_memory(monkeypatch: pytest.MonkeyPatch) -> type[HarliError]:
    """The allocator finds a fault in itself."""

    def fail(self: CountingAllocator) -> None:
        raise MemoryAccountingError("a block has two owners")

    monkeypatch.setattr(CountingAllocator, "check_integrity", fail)
    return MemoryAccountingError


@pytest.mark.parametrize("corrupt", [broken_books, broken_memory])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_failed_audit_leaves_no_summary(
    corrupt: Any, earlier: bool, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 3, and no summary.json in the folder, not even that of an earlier run."""
    if earlier:
        run()
        assert (tmp_path / "out" / "summary.json").exists()
    expected = corrupt(monkeypatch)
    with pytest.raises(expected) as caught:
        run()
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out" / "summary.json").exists()
