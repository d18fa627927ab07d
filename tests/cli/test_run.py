"""What a good run prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harli_cli import __version__
from policies import POLICIES
from tests.cli.conftest import OUTPUT_TOKENS, REQUESTS, Harli

REQUEST_COLUMNS = [
    "request", "arrival_s", "prompt_tokens", "output_tokens", "instance", "state", "reason", "first_token_s",
    "last_token_s", "ttft_s", "tpot_s", "produced_tokens", "preemptions",
]  # fmt: skip
STEP_COLUMNS = [
    "step", "end_s", "latency_ms", "decode_ms", "turn_ms", "instance", "batch", "kv_tokens", "waiting", "decode_sms",
    "finetune_sms", "rows_kv", "rows_lent", "window_layers", "free_but_unlendable_bytes", "turn_budget_ms",
    "predicted_ms", "finetune_tokens",
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_accounts_for_every_request(harli: Harli, trace: Path, tmp_path: Path, policy: str) -> None:
    """All requests completed, exactly the tokens that the file asks for, three files and nothing else."""
    answer = harli("run", "--trace", trace, "--policy", policy)
    assert (answer.code, answer.err) == (0, "")
    assert f"{REQUESTS} = {REQUESTS} + 0 + 0" in answer.out
    assert f"{OUTPUT_TOKENS} / {OUTPUT_TOKENS}" in answer.out
    found = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert found == ["requests.parquet", "steps.parquet", "summary.json"]


def test_files_agree(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """Printed JSON is the summary, byte for byte; the tables have its counts and sums."""
    answer = harli("run", "--trace", trace, "--out", "here", "--json")
    assert answer.out == (tmp_path / "here/summary.json").read_text()
    summary = json.loads(answer.out)
    requests = pq.read_table(tmp_path / "here/requests.parquet")
    steps = pq.read_table(tmp_path / "here/steps.parquet")
    assert summary["harli_version"] == __version__
    assert requests.column_names == REQUEST_COLUMNS
    assert steps.column_names == STEP_COLUMNS
    assert requests.num_rows == summary["requests"]["arrivals"] == REQUESTS
    assert steps.num_rows == summary["steps"]["count"]
    assert sum(requests["produced_tokens"].to_pylist()) == summary["requests"]["output_tokens_produced"]
    assert sum(steps["batch"].to_pylist()) == OUTPUT_TOKENS - REQUESTS
    assert max(steps["latency_ms"].to_pylist()) == summary["steps"]["latency_ms"]["max"]
    assert set(requests["state"].to_pylist()) == {"completed"}


def test_baselines(harli: Harli, trace: Path) -> None:
    """`--baselines` adds the gain over `separate` and the violations above `inference_only`, and rows to the table."""
    summary = json.loads(harli("run", "--trace", trace, "--baselines", "--json").out)
    separate, alone = summary["baselines"]["separate"], summary["baselines"]["inference_only"]
    own = summary["finetune"]["tokens_per_s"]
    assert separate["serving_gpus"] == 1
    assert separate["gain"] == own / separate["finetune_tokens_per_s"] - 1
    violations = summary["steps"]["violations"]
    assert alone["excess_violations"] == sum(violations.values()) - sum(alone["violations"].values())
    assert set(alone["latency_ms"]) == {"count", "mean", "p50", "p90", "p99", "p99.9", "max"}
    assert "gain over separate (1 serving)" in harli("run", "--trace", trace, "--baselines").out


def test_serving_gpus_where_they_are_used(harli: Harli, trace: Path) -> None:
    """`--serving-gpus` sets the baseline, or the policy `separate`."""
    options = ("run", "--trace", trace, "--gpus", 3, "--serving-gpus", 2, "--json")
    assert json.loads(harli(*options, "--baselines").out)["baselines"]["separate"]["serving_gpus"] == 2
    own = json.loads(harli(*options, "--policy", "separate").out)
    assert own["config"]["policy_options"] == {"serving_gpus": 2}


def test_no_gain_where_none_finetunes(harli: Harli, trace: Path) -> None:
    """With every GPU serving there is nothing to compare with: the gain is null."""
    answer = harli("run", "--trace", trace, "--gpus", 1, "--baselines", "--json")
    assert json.loads(answer.out)["baselines"]["separate"]["gain"] is None


def test_no_prefill(harli: Harli, trace: Path) -> None:
    """`--no-prefill` sends requests straight to decode."""
    summary = json.loads(harli("run", "--trace", trace, "--no-prefill", "--json").out)
    assert summary["config"]["prefill_gpus"] == 0
    assert summary["prefill_busy"] is None
    assert summary["requests"]["output_tokens_produced"] == OUTPUT_TOKENS


def test_a_log_beside_the_results(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """A log may lie in the folder of results although the run makes that folder itself."""
    assert harli("run", "--trace", trace, "--out", "here", "--log", "here/log.jsonl").code == 0
    assert len(list((tmp_path / "here").iterdir())) == 4


def test_version(harli: Harli) -> None:
    """The version of the package."""
    assert harli("--version").out == f"harli {__version__}\n"


def test_without_a_command(harli: Harli) -> None:
    """`harli` alone lists the commands."""
    answer = harli()
    assert answer.code == 0
    assert "run" in answer.out
    assert "replay" in answer.out


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "run",
            "backend trace format sort drop-failed drop-invalid clip-prompt rate start duration limit repeat rate-scale "
            "policy policy-option gpus prefill-gpus no-prefill serving-gpus profile samples gpu model finetune-model "
            "qos-ms ttft-slo-ms memory-gb runtime-gb max-batch router lending reservation micro-batch-tokens "
            "gradient-accumulation-steps lora-rank share-weights horizon-s exact-steps seed config out log baselines html "
            "perfetto model-path load-format prefill finetune-job device json",
        ),
        ("replay", "policy policy-option json"),
    ],
)
def test_help_mentions_every_option(harli: Harli, command: str, options: str) -> None:
    """Every option of a command stands in its help, and no other."""
    lines = harli(command, "--help").out.splitlines()
    found = {line.split()[0].rstrip(",") for line in lines if line.lstrip().startswith("--")}
    assert found == {f"--{name}" for name in (*options.split(), "help")}
