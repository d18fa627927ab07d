"""Entry point: arguments in, report out, exit codes (0 fine, 2 bad input, 3 the books disagree, 4 a policy failed)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from harli_cli import __version__
from harli_cli.policy_options import read_pairs
from harli_cli.progress import progress
from harli_cli.settings import check_serving_gpus, merged
from harli_cli.trace_commands import trace_app
from harli_cli.trace_options import (
    ClipPromptOption,
    DropFailedOption,
    DropInvalidOption,
    DurationOption,
    LimitOption,
    RateOption,
    RateScaleOption,
    RepeatOption,
    SortOption,
    StartOption,
    TraceFormatOption,
)
from harli_core.config import RunConfig
from harli_core.errors import ConfigError, HarliError

if TYPE_CHECKING:
    from harli_cli.gpu_run import GpuOptions

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="LLM decoding and LoRA finetuning on one GPU: simulate, compare and run scheduling policies.",
)
app.add_typer(trace_app, name="trace")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"harli {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  (its callback does the work)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command; without one, say what there is."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    backend: Annotated[str, typer.Option(help="sim, or cuda on a GPU.")] = "sim",
    trace: Annotated[
        str | None,
        typer.Option(help="Trace file, relative to the working directory, or 'synthetic' [default: synthetic]."),
    ] = None,
    trace_format: TraceFormatOption = None,
    sort: SortOption = None,
    drop_failed: DropFailedOption = None,
    drop_invalid: DropInvalidOption = None,
    clip_prompt: ClipPromptOption = None,
    rate: RateOption = None,
    start: StartOption = None,
    duration: DurationOption = None,
    limit: LimitOption = None,
    repeat: RepeatOption = None,
    rate_scale: RateScaleOption = None,
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
        str | None, typer.Option(help="Profile file that 'harli fit' wrote [default: the one that ships].")
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
        "format": trace_format,
        "sort": sort,
        "drop_failed": drop_failed,
        "drop_invalid": drop_invalid,
        "clip_prompt": clip_prompt,
        "rate": rate,
        "start": start,
        "duration": duration,
        "limit": limit,
        "repeat": repeat,
        "rate_scale": rate_scale,
        "policy": policy,
        "gpus": gpus,
        "prefill_gpus": 0 if no_prefill else prefill_gpus,
        "serving_gpus": serving_gpus,
        "profile": profile,
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


@app.command()
def report(out: Annotated[Path, typer.Argument(help="The folder of a finished 'harli run'.")] = Path("out")) -> None:
    """Draw a finished result folder: writes report.html into it, one file that opens offline."""
    from harli_cli.report.pages import run_report  # noqa: PLC0415

    typer.echo(f"written: {run_report(out)}")


@app.command()
def compare(
    trace: Annotated[str | None, typer.Option(help="Trace file, or 'synthetic' [default: synthetic].")] = None,
    policies: Annotated[
        str | None, typer.Option(help="Names, separated by commas [default: the built-in ones].")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each policy, with seeds from --seed on.")] = 5,
    seed: Annotated[int | None, typer.Option(help="The first seed [default: 0].")] = None,
    gpus: Annotated[int | None, typer.Option(help="Decode GPUs [default: 2].")] = None,
    prefill_gpus: Annotated[int | None, typer.Option(help="Prefill GPUs; 0: none [default: 1].")] = None,
    serving_gpus: Annotated[int | None, typer.Option(help="GPUs that serve under 'separate'.")] = None,
    model: Annotated[str | None, typer.Option(help="Served model [default: llama3-8b].")] = None,
    finetune_model: Annotated[str | None, typer.Option(help="Finetuned model [default: the served one].")] = None,
    qos_ms: Annotated[float | None, typer.Option(help="Step latency target in ms [default: 40].")] = None,
    horizon_s: Annotated[float | None, typer.Option(help="Stop at this simulated time [default: all done].")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file as for 'harli run'; for all other options.")] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(help="'POLICY.FIGURE > POLICY.FIGURE or number' on means over seeds; exit code 1 if it fails."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes [default: one a core].")] = None,
    out: Annotated[Path, typer.Option(help="Folder for compare.json and report.html.")] = Path("out"),
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write report.html.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")] = False,
) -> None:
    """Run policies side by side over several seeds: means, 95 % intervals, gains, and the best within the target."""
    from harli_cli.comparison.command import compare as run_comparison  # noqa: PLC0415
    from harli_cli.comparison.command import failed  # noqa: PLC0415
    from harli_cli.comparison.table import comparison_table  # noqa: PLC0415
    from policies import POLICIES  # noqa: PLC0415

    options = {
        "trace": trace, "seed": seed, "gpus": gpus, "prefill_gpus": prefill_gpus, "serving_gpus": serving_gpus,
        "model": model, "finetune_model": finetune_model, "qos_ms": qos_ms, "horizon_s": horizon_s,
    }  # fmt: skip
    names = list(POLICIES) if policies is None else [name.strip() for name in policies.split(",")]
    settings = merged(config, options, [])
    with progress() as stage:
        document = run_comparison(settings, names, seeds, jobs, check or [], out, html, stage)
    if as_json:
        typer.echo(json.dumps(document, indent=2, sort_keys=True))
    else:
        console = Console(width=None if sys.stdout.isatty() else 220)
        console.print(comparison_table(document))
        best = document["best_within_target"]
        console.print(f"best within the target: {best or 'none kept it'}", highlight=False)
        for verdict in document["checks"]:
            sides = " and ".join(
                "nothing" if verdict[side] is None else f"{verdict[side]:,.6g}" for side in ("left", "right")
            )
            said = "holds" if verdict["holds"] else "FAILS"
            console.print(f"{said}: {verdict['check']} ({sides})", highlight=False, soft_wrap=True, markup=False)
        console.print(f"written: {out}/compare.json{', report.html' if html else ''}", highlight=False, soft_wrap=True)
    if failed(document):
        raise typer.Exit(1)


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="A decision log written by 'harli run --log'.")],
    policy: Annotated[str | None, typer.Option(help="Another policy than the one that made the log.")] = None,
    policy_option: Annotated[
        list[str] | None,
        typer.Option("--policy-option", metavar="NAME=VALUE", help="Option of the policy; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Feed a decision log to a policy and report the first plan that differs (exit code 1 if there is one)."""
    from harli_cli.replay import difference_lines, divergence_fields, replay_log  # noqa: PLC0415  (keeps --help fast)

    name, compared, divergence = replay_log(log, policy, read_pairs(policy_option or []))
    if as_json:
        found = None if divergence is None else divergence_fields(divergence)
        typer.echo(json.dumps({"policy": name, "compared": compared, "first_difference": found}, indent=2))
    elif divergence is None:
        typer.echo(f"{compared:,} records: {name} plans the same at every one")
    else:
        for line in difference_lines(divergence):
            typer.echo(line)
    if divergence is not None:
        raise typer.Exit(1)


policies_app = typer.Typer(help="Policies of your own.", rich_markup_mode=None)
app.add_typer(policies_app, name="policy")


@policies_app.command("new")
def new_policy(
    name: Annotated[str, typer.Argument(help="Lower-case name, as in my_policy.")],
    folder: Annotated[Path, typer.Option(help="Where to write the two files.")] = Path(),
) -> None:
    """Write a policy that runs and a test that holds it to the contract of all policies."""
    from harli_cli.policy_scaffold import scaffold  # noqa: PLC0415

    source, test = scaffold(name, folder)
    class_name = "".join(part.capitalize() for part in name.split("_"))
    typer.echo(f"written: {source} and {test}")
    typer.echo(f"test it: python -m pytest {test}")
    typer.echo(f"compare it: harli compare --policies {name}:{class_name},hybrid --seeds 2 --horizon-s 300")


@app.command()
def finetune(
    job: Annotated[
        Path, typer.Argument(metavar="JOB.toml", help="The job: model, dataset, LoRA, schedule, output_dir.")
    ],
    device: Annotated[str, typer.Option(help="cpu, or cuda on a GPU.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Run a LoRA finetuning job alone; where output_dir has checkpoints of it, go on from the newest."""
    from harli_cli.finetune import report_lines, run_job  # noqa: PLC0415  (only for this command)

    with progress() as stage:
        result = run_job(job, device, stage)
    typer.echo(json.dumps(result, indent=2) if as_json else "\n".join(report_lines(result)))


@app.command()
def profile(
    out: Annotated[Path, typer.Argument(help="File to write, a sample a line.")],
    model: Annotated[str, typer.Option(help="Served model.")] = "llama3-8b",
    finetune_model: Annotated[str | None, typer.Option(help="Finetuned model [default: the served one].")] = None,
    micro_batch_tokens: Annotated[int, typer.Option(help="Tokens of a finetune unit.")] = 1024,
) -> None:
    """Measure this machine's GPU: decode alone and beside finetuning on every split, and finetune units (random weights)."""
    from harli_cli.profiling import measure  # noqa: PLC0415  (keeps --help fast)

    say = lambda text: typer.echo(text, err=True)  # noqa: E731
    count = measure(model, finetune_model or model, out, micro_batch_tokens, say)
    typer.echo(f"written: {out}, {count} samples; next: harli fit {out} PROFILE")


@app.command()
def fit(
    samples: Annotated[Path, typer.Argument(help="Samples, as 'harli profile' writes them.")],
    out: Annotated[Path, typer.Argument(help="Profile to write; use it with 'harli run --profile'.")],
    finetune_model: Annotated[
        str | None, typer.Option(help="Finetuned model [default: the only one in the samples].")
    ] = None,
) -> None:
    """Fit the predictor to measured samples."""
    from harli_cli.profiling import fit_samples  # noqa: PLC0415  (keeps --help fast)

    fitted = fit_samples(samples, finetune_model, out)
    for error in fitted.errors:
        if error.chosen:
            typer.echo(
                f"{error.stage}: {error.candidate}, mean error {error.in_sample.mean:.1%}, worst {error.in_sample.max:.1%}"
            )
    typer.echo(f"written: {out}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what this machine can do for --backend cuda, and what to do about what is missing (exit code 1 if any is)."""
    from backends.cuda.doctor import diagnose  # noqa: PLC0415  (only for this command)

    diagnosis = diagnose()
    typer.echo(json.dumps(asdict(diagnosis), indent=2) if as_json else diagnosis.render())
    if not diagnosis.ready:
        raise typer.Exit(1)


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


def main() -> None:
    """Run the command line; every expected failure is one line on standard error and an exit code."""
    if "" not in sys.path:
        sys.path.append("")  # a policy of the user's own is looked for in the working directory too
    try:
        code = app(standalone_mode=False)
    except HarliError as error:
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; no result was written", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    else:
        if code == 130:  # an interrupt, which typer turned into its exit code
            _fail("interrupted; no result was written", 130)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"harli: {' '.join(message.split())}\n")
    sys.exit(code)
