"""The settings of one run, as a configuration file or a command line gives them."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harli_core.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Gpus = Annotated[int, Field(ge=1, le=1024)]


class RunConfig(BaseModel):
    """Everything that decides the result of a run. Field names are the option names with ``_`` for ``-``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    trace: str = "synthetic"
    """A trace file, relative to the working directory, or ``synthetic``.

    The synthetic trace comes with Harli and is shaped like the Azure 2023 conversation trace.
    """
    sort: bool = False
    """Accept arrivals out of order, and sort them."""
    format: str | None = None
    """Format of the trace file; `None`: told by its header or keys."""
    drop_failed: bool = False
    """Leave out requests that the file marks as failed."""
    drop_invalid: bool = False
    """Leave out rows that cannot be read."""
    clip_prompt: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Cut longer prompts to this many tokens."""
    rate: PositiveFloat | None = None
    """Requests a second, Poisson, for a file without arrivals."""
    start: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Leave out requests that arrive before this time of the trace, in seconds."""
    duration: PositiveFloat | None = None
    """Keep so many seconds of the trace."""
    limit: PositiveInt | None = None
    """Keep the first so many requests."""
    repeat: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Replay the trace so many times, one copy behind the other."""
    rate_scale: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1.0
    """Replay it at so many times its rate."""
    policy: str = "hybrid"
    policy_options: dict[str, int | Finite | str | bool] = Field(default_factory=dict)
    gpus: Gpus = 2
    """Decode GPUs."""
    prefill_gpus: Annotated[int, Field(ge=0, le=1024)] = 1
    """Prefill GPUs; 0: requests go straight to decode, their prompts' KV taken as arrived."""
    serving_gpus: Gpus | None = None
    """GPUs that serve under ``separate``; `None`: the fewest that keep the target."""
    profile: str | None = None
    """A profile file for the policies, relative to the working directory; `None`: the shipped one of ``gpu``."""
    samples: str | None = None
    """A file of samples that the simulated GPU is made of, and the profile if there is none; `None`: those of ``gpu``."""
    gpu: str = "h200"
    model: str = "llama3-8b"
    finetune_model: str | None = None
    """`None`: the served model."""
    qos_ms: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 40.0
    """Target of step latency, and the TPOT limit of a request."""
    ttft_slo_ms: PositiveFloat = 1000.0
    """TTFT limit of a request."""
    memory_gb: Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] | None = None
    """GPU memory in GB (10**9 bytes); `None`: what the card has."""
    runtime_gb: Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)] = 6.0
    """Memory kept for the CUDA context, graphs and activations of decode."""
    max_batch: PositiveInt = 256
    """Most requests that decode at once on an instance."""
    router: Literal["least_kv", "round_robin"] = "least_kv"
    lending: Literal["alias", "remap"] = "alias"
    reservation: Literal["measured", "paper"] = "measured"
    micro_batch_tokens: Literal[1024, 2048] = 1024
    """Tokens of one finetune unit."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=4096)] = 4
    """Micro-batches of one optimizer step."""
    lora_rank: PositiveInt = 16
    share_weights: bool = False
    """The finetuned model is the served one and uses its weights: no window, no swaps."""
    exact_steps: bool = False
    """An event for every simulated step, instead of advancing many together; the results are the same."""
    horizon_s: PositiveFloat | None = None
    """End the run at this time; `None`: when every request is done."""
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def finetuned(self) -> str:
        """Name of the finetuned model."""
        return self.finetune_model if self.finetune_model is not None else self.model


def check_fields(values: dict[str, Any], source: str) -> RunConfig:
    """Check each of ``values`` for itself; raises `ConfigError` naming ``source``, the first faulty key, what is right."""
    try:
        return RunConfig(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        where = [str(part) for part in fault["loc"]]
        message = fault["msg"][0].lower() + fault["msg"][1:]
        if where[0] == "policy_options" and len(where) > 1:
            where, message = where[:2], "expected a finite number, text, true or false"
        key = ".".join(where)
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, RunConfig.model_fields, n=1)
            hint = f", did you mean {near[0]}?" if near else ";"
            known = ", ".join(RunConfig.model_fields)
            raise ConfigError(f"{source}: unknown key {key!r}{hint} known keys are {known}") from None
        raise ConfigError(f"{source}: {key} = {fault['input']!r}: {message}") from None


def run_config(values: dict[str, Any], source: str) -> RunConfig:
    """`check_fields`, and that they fit together."""
    config = check_fields(values, source)
    if config.share_weights and config.finetuned != config.model:
        raise ConfigError(
            f"{source}: share_weights needs the finetuned model to be the served one, "
            f"not {config.finetuned!r} beside {config.model!r}"
        )
    if config.serving_gpus is not None and config.serving_gpus > config.gpus:
        raise ConfigError(f"{source}: serving_gpus = {config.serving_gpus} is more than gpus = {config.gpus}")
    return config
