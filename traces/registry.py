"""Which trace formats there are, and which one a file is in: told by its header, never by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harli_core.errors import ConfigError
from traces.azure import COLUMNS, is_azure, parse_azure
from traces.content import TraceContent, quoted
from traces.schema import LoadedTrace, Repairs, RequestTrace
from traces.synthetic import azure_conv

SYNTHETIC = "synthetic"
"""The name under which `load_trace` gives the bundled trace; a file of that name is ``./synthetic``."""

SYNTHETIC_DURATION_S = 3600.0
"""How much of the conversation service the bundled trace covers."""


class TraceParser(Protocol):
    """Reads the bytes of one format; raises `TraceError` at the first fault; ``sort`` repairs the order of arrivals."""

    def __call__(self, content: TraceContent, *, sort: bool) -> tuple[RequestTrace, Repairs]:
        """Return the trace and what was repaired."""
        ...


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How to recognise a format by its first bytes, how to read it, and how to describe it to a user."""

    shape: str
    recognises: Callable[[TraceContent], bool]
    parse: TraceParser


FORMATS: Mapping[str, TraceFormat] = {
    "azure-2023": TraceFormat(shape=",".join(COLUMNS), recognises=is_azure, parse=parse_azure),
}
"""Every format that a file can be in, by name."""


def load_trace(
    spec: str, *, seed: int, sort: bool = False, formats: Mapping[str, TraceFormat] = FORMATS
) -> LoadedTrace:
    """Give the trace that ``--trace`` names: ``synthetic``, or the path of a file in one of ``formats``.

    The synthetic one is an hour shaped like the Azure 2023 conversation trace, drawn by PCG64 from ``seed``
    (`ConfigError` if negative); a file does not depend on it. ``sort`` allows arrivals out of order in a file, and
    counts them. Raises `TraceError` for a file that cannot be used.
    """
    if spec == SYNTHETIC:
        if seed < 0:
            raise ConfigError(f"seed is {seed}; expected a whole number of 0 or more")
        rng = np.random.Generator(np.random.PCG64(seed))
        return LoadedTrace(azure_conv(rng, duration_s=SYNTHETIC_DURATION_S), SYNTHETIC, Repairs())
    content = TraceContent.read(spec)
    fitting = [name for name, known in formats.items() if known.recognises(content)]
    if len(fitting) != 1:
        known = "; ".join(f"{name} ({entry.shape})" for name, entry in formats.items())
        fits = f"fit several formats ({', '.join(fitting)})" if fitting else "fit no known format"
        raise content.fault(1, None, f"the columns {quoted(content.header)} {fits}; known: {known}")
    trace, repairs = formats[fitting[0]].parse(content, sort=sort)
    return LoadedTrace(trace, fitting[0], repairs)
