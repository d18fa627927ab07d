"""The job file: TOML whose keys are named as LLaMA-Factory, transformers and PEFT name them, where one exists."""

from __future__ import annotations

import difflib
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.cuda.finetune.recipe import Recipe, Schedule
from harli_core.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class JobFile(BaseModel):
    """One finetuning job. Paths are relative to the working directory."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # model
    model_name_or_path: str
    """Folder of a Llama, Qwen2 or Qwen3 model as transformers saves it."""
    tokenizer: Literal["model", "byte"] = "model"
    """The model's own tokenizer with its chat template, or a token a byte."""
    bf16: bool = False
    """Frozen weights and arithmetic in bf16, LoRA matrices and optimizer in fp32; otherwise all in fp32."""

    # adapter
    lora_rank: Count = 8
    lora_alpha: Positive | None = None
    """`None`: twice the rank."""
    lora_dropout: Share = 0.0
    lora_target: str | list[str] = "all"
    """``all`` (every projection of the layers), names, or comma-separated names."""
    use_rslora: bool = False
    use_dora: bool = False

    # data
    dataset: str | list[str]
    """Names in ``dataset_info.json``, or files in ``dataset_dir``; comma-separated or a list."""
    dataset_dir: str = "data"
    cutoff_len: Count = 2048
    overlong: Literal["error", "truncate", "drop"] = "error"
    """What happens to a sample of more than ``cutoff_len`` tokens."""
    max_samples: Count | None = None
    packing: bool = False
    neat_packing: bool = False
    """Packing in which sequences do not see each other."""
    train_on_prompt: bool = False
    mask_history: bool = False
    disable_shuffling: bool = False

    # training
    per_device_train_batch_size: Count = 1
    gradient_accumulation_steps: Count = 8
    learning_rate: Positive = 1e-4
    num_train_epochs: Positive = 3.0
    max_steps: Count | None = None
    """Optimizer steps, whatever ``num_train_epochs`` says."""
    lr_scheduler_type: Schedule = "cosine"
    warmup_ratio: Share = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """More than 0 overrides ``warmup_ratio``."""
    max_grad_norm: NotNegative = 1.0
    """0 does not clip."""
    weight_decay: NotNegative = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_epsilon: Positive = 1e-8
    seed: Annotated[int, Field(ge=0)] = 42

    # units
    unit_ms: Positive = 10.0
    """On a GPU, the longest that a unit may take alone; decides how much goes into a micro-batch."""
    micro_batch_tokens: Count | None = None
    """Padded tokens of a micro-batch.

    `None`: as many as ``unit_ms`` allows; on the CPU, ``per_device_train_batch_size`` samples.
    """
    window_layers: Annotated[int, Field(ge=2)] | None = None
    """Frozen layers that may be resident; `None`: all."""
    recompute: Literal["layer", "none"] = "layer"
    micro_batches_at_once: Count | None = None
    """Micro-batches whose activations exist at once; `None`: all of an optimizer step."""

    # output
    output_dir: str
    save_steps: Count = 100
    save_total_limit: Count | None = None
    overwrite_output_dir: bool = False
    """Begin anew where there are checkpoints; otherwise the job goes on from the newest."""

    @property
    def datasets(self) -> list[str]:
        """Names one by one."""
        return _names(self.dataset)

    @property
    def targets(self) -> str | list[str]:
        """As PEFT takes them."""
        names = _names(self.lora_target)
        return "all-linear" if names == ["all"] else names

    @property
    def batch_samples(self) -> int:
        """Samples of an optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def recipe(self, steps_per_epoch: int) -> Recipe:
        """Steps and warm-up in numbers, as transformers counts them."""
        steps = self.max_steps or max(1, math.ceil(self.num_train_epochs * steps_per_epoch))
        warm = self.warmup_steps or math.ceil(self.warmup_ratio * steps)
        if warm > steps:
            raise ConfigError(f"warmup_steps = {warm}: more than the {steps} steps of the job")
        return Recipe(
            max_steps=steps,
            learning_rate=self.learning_rate,
            lr_scheduler_type=self.lr_scheduler_type,
            warmup_steps=warm,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            adam_epsilon=self.adam_epsilon,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm or None,
            seed=self.seed,
        )


def read_job(path: Path) -> JobFile:
    """Read and check a job file; raises `ConfigError` naming the file, the key, and what would be right."""
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the job ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error})") from None
    try:
        job = JobFile(**values)
    except ValidationError as error:
        raise ConfigError(_fault(path, error, values)) from None
    if job.neat_packing and not job.packing:
        raise ConfigError(f"{path}: neat_packing needs packing = true")
    return job


def _fault(path: Path, error: ValidationError, values: dict[str, Any]) -> str:
    fault = error.errors()[0]
    key = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, JobFile.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(JobFile.model_fields)}"
        return f"{path}: unknown key {key!r}; {hint}"
    if fault["type"] == "missing":
        return f"{path}: {key} is missing"
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return f"{path}: {key} = {values[key]!r}: {message}"


def _names(value: str | list[str]) -> list[str]:
    given = value.split(",") if isinstance(value, str) else value
    return [name.strip() for name in given if name.strip()]
