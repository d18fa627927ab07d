"""Which trace formats there are, and which one a file is in: told by its header or keys, never by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import ConfigError, TraceError
from traces.content import TraceContent, quoted
from traces.csv_formats import TABLES
from traces.json_formats import JSON_LINES
from traces.json_lines import first_keys, first_line_fault
from traces.parquet import SHAPE, is_parquet, parse_parquet
from traces.rows import RawRows, settle
from traces.schema import LoadedTrace, RepairOptions, Repairs, RequestTrace

SYNTHETIC = "synthetic"
"""The name under which `load_trace` gives the bundled trace; a file of that name is ``./synthetic``."""

SYNTHETIC_DURATION_S = 3600.0
"""How much of the conversation service the bundled trace covers."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How to recognise a format by its first bytes, how to read its rows, and how to describe it to a user.

    ``parse`` raises `TraceError` only for what concerns the file as a whole; faults of rows stand beside the rows.
    """

    shape: str
    recognises: Callable[[TraceContent], bool]
    parse: Callable[[TraceContent], RawRows]


FORMATS: Mapping[str, TraceFormat] = {
    **{name: TraceFormat(one.shape, one.recognises, one.parse) for name, one in TABLES.items()},
    **{name: TraceFormat(one.shape, one.recognises, one.parse) for name, one in JSON_LINES.items()},
    "harli-parquet": TraceFormat(SHAPE, is_parquet, parse_parquet),
}
"""Every format that a file can be in, by name."""

_NO_REPAIRS = RepairOptions()


def load_trace(
    spec: str,
    *,
    seed: int,
    repairs: RepairOptions = _NO_REPAIRS,
    format_name: str | None = None,
    rate_rps: float | None = None,
    formats: Mapping[str, TraceFormat] = FORMATS,
) -> LoadedTrace:
    """Give the trace that ``--trace`` names: ``synthetic``, or the path of a file in one of ``formats``.

    The synthetic one is an hour shaped like the Azure 2023 conversation trace, drawn by PCG64 from ``seed``
    (`ConfigError` if negative); a file does not depend on it, but for one without arrivals: it gets Poisson arrivals at
    ``rate_rps``. ``format_name`` overrides what the header says. Raises `TraceError` for a file that cannot be used.
    """
    rng = seeded(seed)
    if spec == SYNTHETIC:
        from traces.synthetic import azure_conv  # noqa: PLC0415  (a file needs none of it)

        for name, given in (("format", format_name), ("rate", rate_rps)):
            if given is not None:
                raise ConfigError(f"{name} = {given!r}: the synthetic trace takes none; it is for files")
        trace = azure_conv(rng, duration_s=SYNTHETIC_DURATION_S)
        clipped = 0
        if repairs.clip_prompt is not None:
            clipped = int((trace.prompt_tokens > repairs.clip_prompt).sum())
            prompts = np.minimum(trace.prompt_tokens, repairs.clip_prompt)
            trace = RequestTrace.of(trace.arrival_s, prompts, trace.output_tokens, source=trace.source)
        return LoadedTrace(trace, SYNTHETIC, Repairs(clipped_prompts=clipped), "asked for by name")
    if format_name is not None and format_name not in formats:
        raise ConfigError(f"unknown trace format {format_name!r}: known formats are {', '.join(formats)}")
    content = TraceContent.read(spec)
    name, reason = (format_name, "asked for") if format_name is not None else detect(content, formats)
    trace, made = read_trace(content, formats[name], repairs, rate_rps, rng)
    packed = "" if content.compression is None else f", unpacked from {content.compression}"
    return LoadedTrace(trace, name, made, reason + packed)


def read_trace(
    content: TraceContent,
    known: TraceFormat,
    repairs: RepairOptions = _NO_REPAIRS,
    rate_rps: float | None = None,
    rng: np.random.Generator | None = None,
) -> tuple[RequestTrace, Repairs]:
    """Read the content of a file as one format, with the repairs asked for."""
    raw = known.parse(content)
    if raw.arrivals is None and rate_rps is None:
        raise TraceError(f"{content.label}: the file has lengths but no arrivals; expected --rate (requests/s) with it")
    if raw.arrivals is not None and rate_rps is not None:
        raise ConfigError(f"rate = {rate_rps:g}: {content.label} has arrivals of its own; --rate-scale changes them")

    def arrive(requests: int) -> NDArray[np.float64]:
        assert rng is not None
        assert rate_rps is not None
        arrival_s = np.zeros(requests)
        arrival_s[1:] = np.cumsum(rng.standard_exponential(requests - 1) / rate_rps)
        return arrival_s

    return settle(content, raw, repairs, arrive)


def detect(content: TraceContent, formats: Mapping[str, TraceFormat] = FORMATS) -> tuple[str, str]:
    """Name the one format that the content fits, and why; raises `TraceError` where none or several fit."""
    fitting = [name for name, known in formats.items() if known.recognises(content)]
    keys = first_keys(content)
    seen = quoted(content.header) if keys is None else quoted(",".join(sorted(keys)))
    what = "the columns" if keys is None else "the keys"
    if len(fitting) == 1:
        return fitting[0], "begins with PAR1" if is_parquet(content) else f"{what} of row 1 are {seen}"
    fault = first_line_fault(content)
    if fault is not None and not fitting:
        raise content.fault(1, None, fault)
    known = "; ".join(f"{name} ({entry.shape})" for name, entry in formats.items())
    fits = f"fit several formats ({', '.join(fitting)})" if fitting else "fit no known format"
    hint = ""
    if b"\r" in content.header and b"\n" not in content.text[:-1]:
        hint = " (its lines end in a carriage return alone; expected LF or CRLF)"
    raise content.fault(1, None, f"{what} {seen} {fits}{hint}; known: {known}; --format chooses one")


def seeded(seed: int) -> np.random.Generator:
    """The generator that everything random about a trace is drawn from; raises `ConfigError` for a negative seed."""
    if seed < 0:
        raise ConfigError(f"seed is {seed}; expected a whole number of 0 or more")
    return np.random.Generator(np.random.PCG64(seed))
