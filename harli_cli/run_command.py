"""``harli run``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from harli_cli.file_clashes import check_clashes
from harli_cli.option_groups import with_groups
from harli_cli.progress import progress
from harli_cli.results import NAMES, REPORT
from harli_cli.settings import check_serving_gpus, merged
from harli_cli.trace_options import TracePart, TraceReading
from harli_core.config import RunConfig
from harli_core.errors import ConfigError

if TYPE_CHECKING:
    from harli_cli.gpu_run import GpuOptions


@with_groups
def run(
    *,
    backend: Annotated[str, typer.Option(help="sim, or cuda on a GPU.")] = "sim",
    trace: Annotated[
        str | None,
        typer.Option(help="Trace file, relative to the working directory, or 'synthetic' [default: synthetic]."),
    ] = None,
    reading: TraceReading,
    part: TracePart,
    policy: Annotated[
        str | None,
        typer.Option(
            help="harli, hybrid, separate, static_split, inference_only, pause_on_load, or package.module:Class "
            "[default: hybrid]."
        ),
    ] = None,
    policy_option: Annotated[
        list[str] | None,
        typer.Option("--policy-option", metavar="NAME=VALUE", help="Option of the policy; repeatable."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Decode GPUs [default: 2].")] = None,
    prefill_gpus: Annotated[int | None, typer.Option(help="Prefill GPUs [default: 1].")] = None,
    no_prefill: Annotated[bool, typer.Option("--no-prefill", help="Send requests straight to decode.")] = False,
    serving_gpus: Annotated[
        int | None, typer.Option(help="GPUs that serve under 'separate' [default: the fewest that keep the target].")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Profile file that 'harli fit' wrote [default: of --samples, else the one that ships]."),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(help="sim: samples that 'harli profile' wrote, to simulate that GPU [default: those that ship]."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Kind of GPU [default: h200].")] = None,
    model: Annotated[
        str | None, typer.Option(help="Served model: llama3-8b or qwen2.5-7b [default: llama3-8b].")
    ] = None,
    finetune_model: Annotated[str | None, typer.Option(help="Finetuned model [default: the served one].")] = None,
    qos_ms: Annotated[float | None, typer.Option(help="Step latency target in ms [default: 40].")] = None,
    ttft_slo_ms: Annotated[float | None, typer.Option(help="TTFT limit in ms [default: 1000].")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="GPU memory in GB [default: the card's].")] = None,
    runtime_gb: Annotated[
        float | None, typer.Option(help="GPU memory in GB kept for the CUDA context and graphs [default: 6].")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most requests decoding on an instance [default: 256].")] = None,
    router: Annotated[str | None, typer.Option(help="least_kv or round_robin [default: least_kv].")] = None,
    lending: Annotated[str | None, typer.Option(help="alias or remap [default: alias].")] = None,
    reservation: Annotated[str | None, typer.Option(help="measured or paper [default: measured].")] = None,
    micro_batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a finetune unit, 1024 or 2048.")] = None,
    gradient_accumulation_steps: Annotated[int | None, typer.Option(help="Micro-batches a step [default: 4].")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="LoRA rank [default: 16].")] = None,
    share_weights: Annotated[
        bool | None, typer.Option("--share-weights", help="Finetune on the served model's own weights: no window.")
    ] = None,
    horizon_s: Annotated[
        float | None, typer.Option(help="Stop at this time, simulated or real [default: all done].")
    ] = None,
    exact_steps: Annotated[
        bool | None,
        typer.Option("--exact-steps", help="An event for every decode step: slower, with the same results."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random [default: 0].")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with any of the options above but backend ('_' for '-'); the command line overrides it."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for summary.json, requests.parquet and steps.parquet.")] = Path(
        "out"
    ),
    log: Annotated[Path | None, typer.Option(help="Write the decision log to this file.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the run as a Chrome trace for ui.perfetto.dev to this file.")
    ] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write report.html beside the results.")] = False,
    model_path: Annotated[
        Path | None, typer.Option(help="cuda: local folder of the served model as Hugging Face has it.")
    ] = None,
    load_format: Annotated[
        str, typer.Option(help="cuda: auto, or dummy for random weights without a folder.")
    ] = "auto",
    prefill: Annotated[
        str, typer.Option(help="cuda: elsewhere (prompts' KV taken as arrived) or local (computed on this GPU).")
    ] = "elsewhere",
    finetune_job: Annotated[
        Path | None,
        typer.Option(metavar="JOB.toml", help="cuda: the job to finetune, as for 'harli finetune' [default: random]."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda: cuda, or cpu to try a tiny model (slow).")] = "cuda",
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also run inference_only and separate; report gain and excess.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Replay a request trace under a policy and report what requests and finetuning got."""
    options: dict[str, Any] = {
        "trace": trace,
        **asdict(reading),
        **asdict(part),
        "policy": policy,
        "gpus": gpus,
        "prefill_gpus": 0 if no_prefill else prefill_gpus,
        "serving_gpus": serving_gpus,
        "profile": profile,
        "samples": samples,
        "gpu": gpu,
        "model": model,
        "finetune_model": finetune_model,
        "qos_ms": qos_ms,
        "ttft_slo_ms": ttft_slo_ms,
        "memory_gb": memory_gb,
        "runtime_gb": runtime_gb,
        "max_batch": max_batch,
        "router": router,
        "lending": lending,
        "reservation": reservation,
        "micro_batch_tokens": micro_batch_tokens,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "lora_rank": lora_rank,
        "share_weights": share_weights,
        "horizon_s": horizon_s,
        "exact_steps": exact_steps,
        "seed": seed,
    }
    if no_prefill and prefill_gpus:
        raise ConfigError(f"--no-prefill and --prefill-gpus {prefill_gpus} contradict each other; give one of them")
    if backend == "cuda" and gpus is None:
        options["gpus"] = 1
    settings = merged(config, options, policy_option or [])
    check_serving_gpus(settings, baselines)
    given = (settings.profile, settings.samples)
    read = (Path(settings.trace), config, finetune_job, *(Path(name) for name in given if name))
    written = (*(("--out", out / name) for name in NAMES), ("--html", html and out / REPORT))
    check_clashes(
        [path for path in read if path],
        [(option, path) for option, path in (*written, ("--log", log), ("--perfetto", perfetto)) if path],
    )
    if backend == "cuda":
        from harli_cli.gpu_run import GpuOptions  # noqa: PLC0415  (keeps --help fast)

        chosen = GpuOptions.checked(
            settings, model_path, load_format, prefill, baselines=baselines, finetune_job=finetune_job, device=device
        )
        _serve(settings, chosen, out, log, as_json)
        return
    if backend != "sim":
        raise ConfigError(f"unknown backend {backend!r}: known backends are cuda, sim")
    if finetune_job is not None:
        raise ConfigError(f"--finetune-job {finetune_job}: a simulation has no real job; it needs --backend cuda")
    _simulate(settings, out, log, baselines, as_json, perfetto, html)


def _serve(settings: RunConfig, options: GpuOptions, out: Path, log: Path | None, as_json: bool) -> None:
    from harli_cli.gpu_run import execute_on_gpu  # noqa: PLC0415

    with progress() as stage:
        summary = execute_on_gpu(settings, options, out, log, stage)
    _show(summary, out, as_json)


def _simulate(
    settings: RunConfig,
    out: Path,
    log: Path | None,
    baselines: bool,
    as_json: bool,
    perfetto: Path | None,
    html: bool,
) -> None:
    from harli_cli.run import execute  # noqa: PLC0415  (keeps --help fast)

    with progress() as stage:
        summary = execute(settings, out, log, baselines, stage, perfetto)
    if html:
        from harli_cli.report.pages import run_report  # noqa: PLC0415

        run_report(out)
    _show(summary, out, as_json, html)


def _show(summary: dict[str, Any], out: Path, as_json: bool, html: bool = False) -> None:
    from harli_cli.remarks import remarks  # noqa: PLC0415
    from harli_cli.tables import result_table  # noqa: PLC0415

    if as_json:
        typer.echo(json.dumps(summary, indent=2, sort_keys=True))
        return
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(result_table(summary))
    for line in remarks(summary):
        console.print(line, style="yellow", highlight=False, soft_wrap=True)
    console.print(
        f"written: {out}/summary.json, requests.parquet, steps.parquet{', report.html' if html else ''}",
        highlight=False,
        soft_wrap=True,
    )
