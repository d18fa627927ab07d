"""Options that cannot be used: one line, exit code 2, nothing written, an earlier result untouched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Harli

EARLIER = {"summary.json": b'{"an": "earlier result"}', "requests.parquet": b"earlier", "steps.parquet": b"earlier"}

BAD_OPTIONS = {
    "--policy nope": ("unknown policy 'nope'", "hybrid", "package.module:Class"),
    "--policy no_such_module:Class": ("cannot import 'no_such_module'",),
    "--policy :Class": ("':Class'", "cannot import"),
    "--policy json:Missing": ("'json' has no class 'Missing'",),
    "--policy builtins:repr": ("is no policy", "plan", "observe"),
    "--gpu a100": ("unknown GPU 'a100'", "h200"),
    "--model gpt-2": ("unknown model 'gpt-2'", "llama3-8b", "qwen2.5-7b"),
    "--finetune-model gpt-2": ("unknown model 'gpt-2'", "llama3-8b"),
    "--gpus 0": ("gpus = 0", "greater than or equal to 1"),
    "--gpus -2": ("gpus = -2",),
    "--gpus 99999999999": ("gpus = 99999999999", "1024"),
    "--gpus 1.5": ("'--gpus'", "integer"),
    "--gpus two": ("'--gpus'", "integer"),
    "--seed -1": ("seed = -1",),
    "--seed x": ("'--seed'", "integer"),
    "--qos-ms -40": ("qos_ms = -40.0", "greater than 0"),
    "--qos-ms 0": ("qos_ms = 0.0", "greater than 0"),
    "--qos-ms nan": ("qos_ms = nan", "finite"),
    "--qos-ms inf": ("qos_ms = inf", "finite"),
    "--qos-ms fast": ("'--qos-ms'", "number"),
    "--ttft-slo-ms nan": ("ttft_slo_ms = nan", "finite"),
    "--memory-gb 1": ("memory_gb = 1", "16.1 GB"),
    "--memory-gb 22.5": ("needs 37 rows", "--memory-gb"),
    "--memory-gb 1e300": ("memory_gb = 1e+300", "10000"),
    "--horizon-s 0": ("horizon_s = 0.0",),
    "--max-batch 0": ("max_batch = 0",),
    "--lora-rank 0": ("lora_rank = 0",),
    "--router random": ("router = 'random'", "'least_kv' or 'round_robin'"),
    "--lending maybe": ("lending = 'maybe'", "'alias' or 'remap'"),
    "--reservation none": ("reservation = 'none'", "'measured' or 'paper'"),
    "--micro-batch-tokens 512": ("micro_batch_tokens = 512", "1024 or 2048"),
    "--share-weights --finetune-model qwen2.5-7b": ("share_weights", "qwen2.5-7b"),
    "--prefill-gpus -1": ("prefill_gpus = -1",),
    "--no-prefill --prefill-gpus 2": ("--no-prefill", "--prefill-gpus 2", "contradict"),
    "--serving-gpus 5 --gpus 4": ("serving_gpus = 5", "gpus = 4"),
    "--policy separate --serving-gpus 1 --policy-option serving_gpus=2": ("serving_gpus = 1", "= 2; give one of them"),
    "--runtime-gb 1e300": ("runtime_gb = 1e+300", "less than or equal to 10000"),
    "--rate-scale 1e308": ("rate_scale = 1e+308", "less than or equal to"),
    "--serving-gpus 1": ("serving_gpus = 1", "only by the policy 'separate'", "'hybrid'", "--baselines"),
    "--policy separate --policy-option serving_gpus=5": ("serving_gpus must be 1 .. 2, not 5",),
    "--policy-option threshold": ("'threshold'", "NAME=VALUE"),
    "--policy-option =16": ("'=16'", "NAME=VALUE"),
    "--policy-option zeal=3": (
        "policy 'hybrid' has no option 'zeal'; it has hold_steps, hysteresis, margin, quantile",
    ),
    "--policy inference_only --policy-option zeal=3": ("policy 'inference_only' has no option 'zeal'; it has none",),
    "--policy-option margin=little": ("margin = 'little'", "number from 0 to 0.9"),
    "--policy-option hold_steps=0": ("hold_steps = 0", "1 or more"),
    "--policy-option quantile=7": ("quantile = 7", "0 to 1"),
    "--policy-option margin=nan": ("policy_options.margin = nan", "finite"),
    "--policy-option margin=[1]": ("policy_options.margin = [1]",),
    "--backend tpu": ("unknown backend 'tpu'", "cuda, sim"),
    "--finetune-job job.toml": ("--finetune-job", "--backend cuda"),
    "--backend cuda --load-format dummy --finetune-job job.toml": ("job.toml: cannot read the job", "No such file"),
    "--backend cuda --load-format dummy --device tpu": ("--device 'tpu'", "cuda or cpu"),
    "--speed 3": ("--speed",),
    "surplus": ("surplus",),
    "--config missing.toml": ("missing.toml", "No such file"),
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_one_line_and_nothing_written(harli: Harli, trace: Path, tmp_path: Path, options: str) -> None:
    """The line names the option and what would be right; the folder of results is not even made."""
    message = harli("run", "--trace", trace, "--out", "deep/out", *options.split()).error()
    for part in BAD_OPTIONS[options]:
        assert part in message
    assert sorted(path.name for path in tmp_path.iterdir()) == [trace.name]


@pytest.mark.parametrize("options", ["--policy nope", "--gpus 0", "--trace missing.csv", "--log out/summary.json"])
def test_an_earlier_result_stays(harli: Harli, trace: Path, tmp_path: Path, options: str) -> None:
    """A refused run leaves the results of the run before as they are."""
    out = tmp_path / "out"
    out.mkdir()
    for name, content in EARLIER.items():
        (out / name).write_bytes(content)
    harli("run", "--trace", trace, "--out", out, *options.split()).error()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == EARLIER


IMPOSSIBLE_POLICY = """
import dataclasses

from policies.inference_only import InferenceOnly


class Impossible(InferenceOnly):
    def plan(self, view):
        return dataclasses.replace(super().plan(view), decode_sms=131)
"""


def test_plan_that_the_hardware_cannot_do(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """A policy that plans nonsense in the middle of a run is named with its step, and leaves no files."""
    (tmp_path / "impossible_policy.py").write_text(IMPOSSIBLE_POLICY)
    message = harli("run", "--trace", trace, "--log", "log.jsonl", "--policy", "impossible_policy:Impossible").error()
    assert "instance 0, step 0: no partition of 131 SMs for decode" in message
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {trace.name, "impossible_policy.py"}


def test_cuda_backend_says_what_is_missing(harli: Harli, trace: Path) -> None:
    """`--backend cuda` without a GPU says what is missing in one line."""
    message = harli("run", "--trace", trace, "--backend", "cuda", "--load-format", "dummy").error()
    assert "--backend cuda cannot run here" in message
    assert "--backend sim" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--policy inference_only", "the policy 'inference_only' does not finetune"),
        ("--share-weights", "--share-weights: the job trains served/model, and random weights would be served"),
    ],
)
def test_job_that_contradicts_the_other_options(
    harli: Harli, trace: Path, tmp_path: Path, options: str, message: str
) -> None:
    """A job that nothing would run, or whose model is not the one to share."""
    lines = ["model_name_or_path", "dataset", "output_dir"]
    (tmp_path / "job.toml").write_text("".join(f'{key} = "served/model"\n' for key in lines))
    given = ("--backend", "cuda", "--load-format", "dummy", "--finetune-job", "job.toml", *options.split())
    assert message in harli("run", "--trace", trace, *given).error()


@pytest.mark.parametrize("command", ["frobnicate", "--frobnicate", "replay", "run --gpus"])
def test_no_such_command(harli: Harli, command: str) -> None:
    """Unknown commands and options, and missing values, are refused like anything else."""
    harli(*command.split()).error()
