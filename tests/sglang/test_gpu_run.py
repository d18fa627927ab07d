"""``harli run --backend cuda`` past its options: the same files as a simulation, from a real run (here on the CPU)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from harli_cli.gpu_run import GpuOptions, run_and_write
from harli_cli.replay import replay_log
from harli_cli.scenario import Scenario
from harli_core.config import RunConfig
from tests.sglang import scenes

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = GpuOptions(None, "dummy", "local")


def trace_of(path: Path, requests: int, gap_s: float) -> Path:
    """A trace of small requests."""
    lines = [f"2023-11-16 18:15:{index * gap_s:010.7f},{8 + 5 * index},{6 + index}" for index in range(requests)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return path


def run(instance: Any, folder: Path, policy: str, requests: int = 8, gap_s: float = 0.05) -> dict[str, Any]:
    """One run with a log."""
    config = RunConfig(
        trace=str(trace_of(folder / "trace.csv", requests, gap_s)), policy=policy, gpus=1, max_batch=8, qos_ms=400.0
    )
    scenario = Scenario(config)
    silent = lambda _name, _total: lambda _count: None  # noqa: E731
    return run_and_write(instance, config, OPTIONS, scenario, folder, folder / "log.jsonl", silent)


@pytest.mark.parametrize("policy", ["hybrid", "harli", "inference_only"])
def test_run_writes_the_results_of_a_simulation_and_its_log_replays(
    instance: Any, model: tuple[Path, dict[str, Any]], tmp_path: Path, policy: str
) -> None:
    """All requests complete, the summary has a simulation's sections, and the policy decides the same from the log."""
    instance.add_job(scenes.job_of(model[1], 32))
    summary = run(instance, tmp_path, policy)
    assert summary["requests"]["completed"] == 8
    assert summary["requests"]["output_tokens_produced"] == summary["requests"]["output_tokens_asked"]
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert {"steps", "finetune", "memory", "utilisation_estimated", "ttft_ms", "tpot_ms"} <= set(summary)
    assert (tmp_path / "steps.parquet").stat().st_size > 0
    name, compared, difference = replay_log(tmp_path / "log.jsonl", None, {})
    assert name == policy
    assert compared > 0
    assert difference is None


def test_sigterm_ends_a_run_once_what_arrived_is_served(instance: Any, tmp_path: Path) -> None:
    """The signal arrives while requests are under way: they complete, later ones never arrive, results are written."""
    instance.remove_job()
    finish = instance.decoder.finish
    steps = []

    def terminate(now_ms: float) -> Any:
        steps.append(now_ms)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return finish(now_ms)

    instance.decoder.finish = terminate
    try:
        summary = run(instance, tmp_path, "inference_only", requests=6, gap_s=9.0)
    finally:
        del instance.decoder.finish
    assert summary["requests"]["arrivals"] == summary["requests"]["completed"] == 1
    assert summary["requests"]["not_arrived"] == 5
