"""Entry point: arguments in, report out, exit codes (0 fine, 2 bad input, 3 the books disagree, 4 a policy failed)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from harli_cli import __version__
from harli_cli.compare_command import compare
from harli_cli.policy_commands import policies_app
from harli_cli.policy_options import read_pairs
from harli_cli.progress import progress
from harli_cli.report_command import report
from harli_cli.run_command import run
from harli_cli.trace_commands import trace_app
from harli_core.errors import HarliError

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


app.command()(run)
app.command()(report)
app.command()(compare)


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


app.add_typer(policies_app, name="policy")


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
        _fail("interrupted; nothing unfinished is left behind", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    else:
        if code == 130:  # an interrupt, which typer turned into its exit code
            _fail("interrupted; nothing unfinished is left behind", 130)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"harli: {' '.join(message.split())}\n")
    sys.exit(code)
