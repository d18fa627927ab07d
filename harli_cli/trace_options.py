"""The options that say which trace, how it is repaired and what part of it; the same in every command that reads one."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from harli_core.config import RunConfig
from traces import LoadedTrace, RepairOptions, Shape, load_trace, shaped

TraceFormatOption = Annotated[
    str | None, typer.Option("--format", help="Format of the trace file [default: told by its header or keys].")
]
SortOption = Annotated[bool | None, typer.Option("--sort", help="Accept arrivals out of order and sort them.")]
DropFailedOption = Annotated[
    bool | None, typer.Option("--drop-failed", help="Leave out requests that the file marks as failed.")
]
DropInvalidOption = Annotated[bool | None, typer.Option("--drop-invalid", help="Leave out rows that cannot be read.")]
ClipPromptOption = Annotated[
    int | None, typer.Option("--clip-prompt", metavar="N", help="Cut longer prompts to N tokens.")
]
RateOption = Annotated[
    float | None, typer.Option("--rate", help="Requests a second (Poisson) for a file without arrivals.")
]
StartOption = Annotated[
    float | None, typer.Option("--start", metavar="S", help="Begin at this second of the trace [default: 0].")
]
DurationOption = Annotated[
    float | None, typer.Option("--duration", metavar="S", help="Keep so many seconds of the trace [default: all].")
]
LimitOption = Annotated[int | None, typer.Option("--limit", metavar="N", help="Keep the first N requests.")]
RepeatOption = Annotated[
    int | None, typer.Option("--repeat", metavar="N", help="Replay the trace N times in a row [default: 1].")
]
RateScaleOption = Annotated[
    float | None, typer.Option("--rate-scale", metavar="X", help="Replay at X times the trace's rate [default: 1].")
]


def load_configured(config: RunConfig) -> LoadedTrace:
    """The trace of a configuration: read, repaired, then cut, repeated and sped up as it says."""
    asked = RepairOptions(config.sort, config.drop_failed, config.drop_invalid, config.clip_prompt)
    loaded = load_trace(config.trace, seed=config.seed, repairs=asked, format_name=config.format, rate_rps=config.rate)
    shape = Shape(config.start, config.duration, config.limit, config.repeat, config.rate_scale)
    return replace(loaded, trace=shaped(loaded.trace, shape))
