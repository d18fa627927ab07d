"""``harli trace inspect | convert | generate``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from harli_cli.option_groups import with_groups
from harli_cli.settings import merged
from harli_cli.trace_options import TracePart, TraceReading, load_configured
from harli_core.errors import ConfigError
from traces import LoadedTrace

trace_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at, convert and generate traces.")

SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of everything random [default: 0].")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def _load(file: str, reading: TraceReading, part: TracePart | None, seed: int | None) -> LoadedTrace:
    options = {**asdict(reading), **({} if part is None else asdict(part)), "trace": file, "seed": seed}
    return load_configured(merged(None, options, []))


@trace_app.command()
@with_groups
def inspect(
    file: Annotated[str, typer.Argument(help="A trace file, or 'synthetic'.")],
    reading: TraceReading,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is in a trace: format and why, rows, rate, lengths, oddities."""
    from harli_cli.trace_report import print_report  # noqa: PLC0415  (keeps --help fast)
    from traces.statistics import facts_of  # noqa: PLC0415

    loaded = _load(file, reading, None, seed)
    facts = facts_of(loaded.trace)
    if as_json:
        found = {"format": loaded.format, "reason": loaded.reason, "repairs": asdict(loaded.repairs), **asdict(facts)}
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        print_report(loaded, facts)


@trace_app.command()
@with_groups
def convert(
    source: Annotated[str, typer.Argument(help="A trace file, or 'synthetic'.")],
    target: Annotated[Path, typer.Argument(help="File to write: .csv, .csv.gz, .csv.zst or .parquet.")],
    reading: TraceReading,
    part: TracePart,
    seed: SeedOption = None,
) -> None:
    """Read a trace in any format and write it, or a part of it, in Harli's own."""
    from harli_cli.remarks import repairs  # noqa: PLC0415
    from traces.writing import check_ending, write_trace  # noqa: PLC0415

    check_ending(target)
    loaded = _load(source, reading, part, seed)
    write_trace(target, loaded.trace)
    for line in repairs({"trace": {"repairs": asdict(loaded.repairs)}}):
        typer.echo(line)
    typer.echo(f"{len(loaded.trace):,} requests in {loaded.trace.span_s:,.1f} s ({loaded.format}) written to {target}")


@trace_app.command()
def generate(
    name: Annotated[str, typer.Argument(help="azure-conv, azure-code, poisson, gamma, phases or diurnal.")],
    duration: Annotated[float, typer.Option("--duration", metavar="S", help="Seconds to cover.")],
    out: Annotated[Path, typer.Option("--out", help="File to write: .csv, .csv.gz, .csv.zst or .parquet.")],
    rate: Annotated[
        float | None, typer.Option("--rate", help="Mean requests a second (poisson, gamma, diurnal).")
    ] = None,
    gamma_shape: Annotated[
        float, typer.Option(help="Shape of the gaps of gamma: 1 is Poisson, less is burstier.")
    ] = 0.5,
    batches: Annotated[str, typer.Option(help="Requests that decode at once in each of the phases.")] = "8,42,24",
    step_ms: Annotated[float, typer.Option(help="Step latency by which phases turn batches into rates.")] = 40.0,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="FILE", help="Replay the lengths of this trace, in its order.")
    ] = None,
    seed: SeedOption = None,
) -> None:
    """Draw a trace from a seeded process."""
    from traces.generators import Recipe, generate  # noqa: PLC0415
    from traces.registry import load_trace, seeded  # noqa: PLC0415
    from traces.writing import check_ending, write_trace  # noqa: PLC0415

    check_ending(out)
    chosen = 0 if seed is None else seed
    rng = seeded(chosen)
    replayed = None if lengths is None else load_trace(lengths, seed=chosen).trace
    recipe = Recipe(duration, rate, gamma_shape, _numbers(batches), step_ms, replayed)
    trace = generate(name, rng, recipe)
    write_trace(out, trace)
    typer.echo(f"{len(trace):,} requests in {trace.span_s:,.1f} s ({name}, seed {chosen}) written to {out}")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--batches {text!r}: expected numbers with commas between them, as in 8,42,24") from None
