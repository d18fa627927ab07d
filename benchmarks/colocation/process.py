"""What the co-location benchmarks share: one process with a served and a finetuned model on a GPU, or on a CPU to try it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harli_cli.scenario import Scenario
from harli_core.predict.predictor import StepPredictor

if TYPE_CHECKING:
    from backends.cuda.serving.instance import Instance
    from backends.cuda.serving.job_source import JobSettings
    from backends.cuda.serving.scheduler_factory import ServingSettings

NARROW = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
"""Sizes for a CPU: as much KV a token as the real model, hardly any weights."""


def process_options(parser: argparse.ArgumentParser) -> None:
    """Options of the process, the same for every benchmark."""
    add = parser.add_argument
    add("--pair", nargs=2, default=["llama3-8b", "llama3-8b"], metavar=("SERVED", "FINETUNED"))
    add("--qos-ms", type=float, default=40.0)
    add("--memory-gb", type=float, default=None)
    add("--runtime-gb", type=float, default=14.0)
    add("--max-rows", type=int, default=None, help="a smaller pool than the memory has room for")
    add("--no-sharing", action="store_true", help="a second copy of the weights although they are the same")
    add("--lending", choices=("alias", "remap"), default="alias")
    add("--max-batch", type=int, default=256)
    add("--graph-batches", type=int, nargs="+", default=None)
    add("--context-tokens", type=int, default=16384)
    add("--micro-batch-tokens", type=int, default=1024)
    add("--micro-batches", type=int, default=4)
    add("--prefill", choices=("elsewhere", "local"), default="elsewhere")
    add("--layers", type=int, default=None, help="fewer layers, for a smoke test (figures mean nothing then)")
    add("--finetuned-layers", type=int, default=None, help="another number of them in the finetuned model")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--samples", default=None, help="of 'harli profile', to fit the profile to [default: the profile that ships]")


def run_settings(options: argparse.Namespace, *, shared: bool) -> dict[str, Any]:
    """The options as fields of a `RunConfig`."""
    served, finetuned = options.pair
    return {
        "model": served,
        "finetune_model": finetuned,
        "gpus": 1,
        "prefill_gpus": 0,
        "qos_ms": options.qos_ms,
        "memory_gb": options.memory_gb,
        "runtime_gb": options.runtime_gb,
        "samples": options.samples,
        "max_batch": options.max_batch,
        "lending": options.lending,
        "share_weights": shared,
        "micro_batch_tokens": options.micro_batch_tokens,
        "gradient_accumulation_steps": options.micro_batches,
    }


def on_graphs(scenario: Scenario, options: argparse.Namespace) -> None:
    """Let predictions be of the graphs that the decoder will have; a CPU has none."""
    if options.device != "cuda":
        return
    from backends.cuda.serving.scheduler_factory import GRAPH_BATCHES, graph_sizes

    scenario.on_graphs(graph_sizes(options.max_batch, options.graph_batches or GRAPH_BATCHES))


def instance_of(scenario: Scenario, options: argparse.Namespace, *, shared: bool) -> Instance:
    """Load, capture, warm up; a random job is beside the decoder."""
    from backends.cuda.serving.instance import Instance

    on_graphs(scenario, options)
    instance = Instance(serving_settings(scenario, options), StepPredictor(scenario.profile), options.prefill)
    instance.add_job(job_settings(scenario, options, shared=shared))
    instance.warm_up()
    return instance


def serving_settings(scenario: Scenario, options: argparse.Namespace, **changes: Any) -> ServingSettings:
    """What the decoder is started with: random weights in the served model's shape, all of the memory that it may have."""
    from backends.cuda.serving.kv_pool import KvSettings
    from backends.cuda.serving.model_folder import dummy_folder, shipped_config
    from backends.cuda.serving.scheduler_factory import GRAPH_BATCHES, ServingSettings

    geometry = scenario.geometry
    served = cut(shipped_config(scenario.config.model), options.layers, narrow=options.device == "cpu")
    values: dict[str, Any] = {
        "device": options.device,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "graph_batches": options.graph_batches or GRAPH_BATCHES,
        "kv": KvSettings(lending=options.lending),
        **changes,
    }
    return ServingSettings(
        dummy_folder(served, options.context_tokens, Path(tempfile.mkdtemp())),
        min(geometry.rows, options.max_rows or geometry.rows) * geometry.row_tokens,
        options.max_batch,
        options.context_tokens,
        **values,
    )


def job_settings(scenario: Scenario, options: argparse.Namespace, *, shared: bool) -> JobSettings:
    """A random job in the finetuned model's shape."""
    from backends.cuda.serving.job_source import JobSettings
    from backends.cuda.serving.model_folder import shipped_config

    config = scenario.config
    layers = options.finetuned_layers or options.layers
    finetuned = cut(shipped_config(config.finetuned), layers, narrow=options.device == "cpu")
    return JobSettings(finetuned, config.micro_batch_tokens, config.gradient_accumulation_steps, shared=shared)


def cut(config: dict[str, Any], layers: int | None, *, narrow: bool) -> dict[str, Any]:
    """The model with fewer layers, for smoke tests; ``narrow`` for a CPU."""
    config = config if layers is None else {**config, "num_hidden_layers": layers}
    if not narrow:
        return config
    heads = {"num_attention_heads": config["num_key_value_heads"], "head_dim": 128}
    return {**config, **NARROW, **heads, "bos_token_id": 1, "eos_token_id": 2}
