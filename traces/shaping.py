"""Parts, copies and other speeds of a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harli_core.errors import ConfigError
from traces.schema import RequestTrace

MAX_REQUESTS = 50_000_000
"""Copies of a trace end here: more do not fit in memory."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What to make of a trace, in this order.

    ``start_s``, ``duration_s``: keep arrivals from ``start_s`` on, for ``duration_s`` seconds (its end left out), on
    the trace's own clock. ``limit``: keep the first requests. ``repeat``: so many copies one behind the other, the mean
    gap between two. ``rate_scale``: that many times the rate. Arrivals count from the first request that is left.
    """

    start_s: float = 0.0
    duration_s: float | None = None
    limit: int | None = None
    repeat: int = 1
    rate_scale: float = 1.0


def shaped(trace: RequestTrace, shape: Shape) -> RequestTrace:
    """Make it; raises `ConfigError` where no request is left, or a copy would have no length."""
    first, last = 0, len(trace)
    if shape.start_s > 0 or shape.duration_s is not None:
        end_s = math.inf if shape.duration_s is None else shape.start_s + shape.duration_s
        first, last = (int(np.searchsorted(trace.arrival_s, at_s)) for at_s in (shape.start_s, end_s))
    if first >= last:
        raise ConfigError(
            f"no request of {trace.source} arrives in the part asked for; it has {len(trace):,} in {trace.span_s:,.1f} s"
        )
    if shape.limit is not None:
        last = min(last, first + shape.limit)
    index = np.arange(first, last, dtype=np.int64)
    arrival_s = trace.arrival_s[first:last] - trace.arrival_s[first]
    if shape.repeat > 1:
        count, span_s = index.size, float(arrival_s[-1])
        if span_s <= 0:
            raise ConfigError(f"repeat = {shape.repeat}: all requests arrive at once; expected a trace with a duration")
        if count * shape.repeat > MAX_REQUESTS:
            raise ConfigError(f"repeat = {shape.repeat}: makes more than {MAX_REQUESTS:,} requests; expected fewer")
        period_s = span_s * count / (count - 1)
        arrival_s = (np.arange(shape.repeat)[:, None] * period_s + arrival_s).ravel()
        index = np.tile(index, shape.repeat)
    if shape.rate_scale != 1.0:
        with np.errstate(over="ignore"):
            arrival_s = arrival_s / shape.rate_scale
        if not np.isfinite(arrival_s).all():
            raise ConfigError(f"rate_scale = {shape.rate_scale:g}: times grow out of range; expected a larger number")
    if index.size == len(trace) and shape.repeat == 1 and shape.rate_scale == 1.0:
        return trace
    return trace.chosen(index, arrival_s)
