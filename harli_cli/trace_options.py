"""The options that say how a trace is read and what part of it is taken, and the trace that comes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from harli_core.config import RunConfig
from traces import LoadedTrace, RepairOptions, Shape, load_trace, shaped


@dataclass(frozen=True, slots=True)
class TraceReading:
    """How a trace file is read and repaired (a group of `harli_cli.option_groups`); `None`: not given."""

    format: Annotated[
        str | None, typer.Option("--format", help="Format of the trace file [default: told by its header or keys].")
    ] = None
    sort: Annotated[bool | None, typer.Option("--sort", help="Accept arrivals out of order and sort them.")] = None
    drop_failed: Annotated[
        bool | None, typer.Option("--drop-failed", help="Leave out requests that the file marks as failed.")
    ] = None
    drop_invalid: Annotated[bool | None, typer.Option("--drop-invalid", help="Leave out rows that cannot be read.")] = (
        None
    )
    clip_prompt: Annotated[
        int | None, typer.Option("--clip-prompt", metavar="N", help="Cut longer prompts to N tokens.")
    ] = None
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second (Poisson) for a file without arrivals.")
    ] = None


@dataclass(frozen=True, slots=True)
class TracePart:
    """What part of a trace is taken, how often and how fast; `None`: not given."""

    start: Annotated[
        float | None, typer.Option("--start", metavar="S", help="Begin at this second of the trace [default: 0].")
    ] = None
    duration: Annotated[
        float | None, typer.Option("--duration", metavar="S", help="Keep so many seconds of the trace [default: all].")
    ] = None
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Keep the first N requests.")] = None
    repeat: Annotated[
        int | None, typer.Option("--repeat", metavar="N", help="Replay the trace N times in a row [default: 1].")
    ] = None
    rate_scale: Annotated[
        float | None, typer.Option("--rate-scale", metavar="X", help="Replay at X times the trace's rate [default: 1].")
    ] = None


def load_configured(config: RunConfig) -> LoadedTrace:
    """The trace of a configuration: read, repaired, then cut, repeated and sped up as it says."""
    asked = RepairOptions(config.sort, config.drop_failed, config.drop_invalid, config.clip_prompt)
    loaded = load_trace(config.trace, seed=config.seed, repairs=asked, format_name=config.format, rate_rps=config.rate)
    shape = Shape(config.start, config.duration, config.limit, config.repeat, config.rate_scale)
    return replace(loaded, trace=shaped(loaded.trace, shape))
