"""Everything that can be wrong with a job: one clear line each, exit code 2, nothing written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.cuda.finetune.adapter import attach
from backends.cuda.finetune.job_file import read_job
from backends.cuda.finetune.submodel import CutModel
from harli_cli.finetune import curve
from harli_cli.main import main
from harli_core.errors import ConfigError, JobError
from tests.finetune.small_job import small_job
from tests.finetune.tiny import tiny_base, tiny_feed, tiny_peft

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``harli finetune``: exit code, standard output, standard error."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["harli", "finetune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return call


def test_a_job_from_file_to_adapter(tmp_path: Path, finetune: Run) -> None:
    """It trains, says what came of it, and leaves an adapter, checkpoints and the log."""
    code, out, err = finetune(small_job(tmp_path, max_steps=3, save_steps=2), "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["steps"], result["resumed_step"], result["adapter"]) == (3, 0, str(tmp_path / "out"))
    lines = (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["current_steps"] for line in lines] == [1, 2, 3]
    assert json.loads(lines[0])["loss"] == result["loss_first"] > result["loss_last"] == json.loads(lines[2])["loss"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "checkpoint-2",
        "checkpoint-3",
        "trainer_log.jsonl",
    ]
    again = finetune(small_job(tmp_path, max_steps=3, save_steps=2), "--device", "cpu")
    assert again[1].startswith("went on after step 3\n3 steps, ")


def test_loss_curve() -> None:
    """Highest to lowest, means of consecutive steps where there are many."""
    assert curve([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    assert curve([1.0]) == "▁"
    assert len(curve([float(n) for n in range(1000)])) == 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rat": 0.1}, "job.toml: unknown key 'learning_rat'; did you mean learning_rate?"),
        ({"zzz": 1}, "unknown key 'zzz'; known keys are model_name_or_path, tokenizer,"),
        ({"dataset": None}, "job.toml: dataset is missing"),
        ({"cutoff_len": 0}, "cutoff_len = 0: input should be greater than or equal to 1"),
        ({"lora_dropout": 1.0}, "lora_dropout = 1.0: input should be less than 1"),
        ({"lr_scheduler_type": "step"}, "lr_scheduler_type = 'step': input should be 'cosine', 'linear'"),
        ({"neat_packing": True}, "neat_packing needs packing = true"),
        ({"warmup_steps": 9}, "warmup_steps = 9: more than the 6 steps of the job"),
        ({"dataset": "other"}, "dataset 'other' is not in"),
        ({"cutoff_len": 20}, "more than cutoff_len = 20; raise cutoff_len, or set overlong = 'truncate' or 'drop'"),
        ({"cutoff_len": 5, "overlong": "drop"}, "every sample is longer than cutoff_len = 5 and was dropped"),
        ({"cutoff_len": 5, "overlong": "truncate"}, "no token of the dataset is trained on"),
        ({"lora_target": "q_proj,w_proj"}, "lora_target 'w_proj' matches no module of the model; there are down_proj,"),
        ({"tokenizer": "model"}, "no tokenizer can be loaded"),
        ({"model_name_or_path": "nowhere"}, "model_name_or_path: nowhere is no folder of a model"),
        ({"window_layers": 5}, "window_layers = 5: must be 2 to 4"),
        ({"window_layers": 1}, "window_layers = 1: input should be greater than or equal to 2"),
    ],
)
def test_one_line_for_each_fault(tmp_path: Path, finetune: Run, changes: dict[str, Any], message: str) -> None:
    """Exit code 2, one line on standard error, and no output folder."""
    code, out, err = finetune(small_job(tmp_path, **changes), "--device", "cpu")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_there_or_no_toml(tmp_path: Path) -> None:
    """The job file itself."""
    with pytest.raises(ConfigError, match=r"none.toml: cannot read the job \(No such file"):
        read_job(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match=r"bad.toml: not a TOML file"):
        read_job(tmp_path / "bad.toml")


def test_devices(tmp_path: Path, finetune: Run) -> None:
    """An unknown one; a GPU where there is none."""
    job = small_job(tmp_path)
    assert finetune(job, "--device", "tpu")[2] == "harli: unknown device 'tpu': known devices are cpu, cuda\n"
    if not torch.cuda.is_available():
        assert finetune(job)[2] == "harli: --device cuda: torch sees no GPU here; use --device cpu\n"


def test_a_loss_that_is_no_number(tmp_path: Path, finetune: Run) -> None:
    """The job ends with the step, the value and what is kept."""
    job = small_job(tmp_path)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    code, _, err = finetune(job, "--device", "cpu")
    assert code == 2
    assert "the job failed: step 1: the loss is nan; no parameter was changed" in err
    assert "the last good checkpoint is kept" in err
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"bias": "all"}, "belongs to no LoRA matrix"),
        ({"modules_to_save": ["norm"]}, "is trained but"),
        (
            {"target_modules": r".*nothing"},
            "PEFT refuses this adapter: .*modules of the model: down_proj, embed_tokens",
        ),
    ],
)
def test_adapters_that_cannot_be_trained_in_units(lora: dict[str, Any], message: str) -> None:
    """Trained parameters outside of LoRA matrices, and a pattern that matches nothing."""
    settings = {"target_modules": ["q_proj"], **lora}
    with pytest.raises(JobError, match=message):
        CutModel(attach(tiny_base("qwen2"), peft.LoraConfig(task_type="CAUSAL_LM", **settings)))


def test_models_that_cannot_be_cut() -> None:
    """Another architecture, another attention, a rope that depends on what was seen, gradient checkpointing."""
    model = tiny_peft()
    model.get_base_model().config.model_type = "gpt2"
    with pytest.raises(JobError, match="model type 'gpt2' cannot be finetuned in units: llama, qwen2, qwen3 can"):
        CutModel(model)
    model = tiny_peft()
    model.get_base_model().config._attn_implementation = "flash_attention_2"
    with pytest.raises(JobError, match="attention implementation 'flash_attention_2' cannot be run layer by layer"):
        CutModel(model)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(JobError, match="rope type 'dynamic' depends on lengths seen before"):
        CutModel(tiny_peft(base={"rope_parameters": rope}))
    model = tiny_peft()
    model.gradient_checkpointing_enable()
    with pytest.raises(JobError, match="gradient checkpointing is on"):
        CutModel(model)


def test_a_feed_of_nothing() -> None:
    """No sample, or none with a label."""
    with pytest.raises(JobError, match="the dataset is empty"):
        type(tiny_feed())([], 1, 1, seed=0)
