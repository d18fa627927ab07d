"""What a trace looks like: rate over time, dispersion, lengths, and what is odd about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.schema import RequestTrace

QUANTILES = (0.0, 0.25, 0.5, 0.9, 0.99, 1.0)
"""Where the distributions of lengths are read."""


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts for a reader; ``dispersion`` by window in seconds, `None` where the trace has fewer than two windows."""

    requests: int
    span_s: float
    rate_per_min: float | None
    peak_per_min: int
    zero_second_share: float
    dispersion: dict[float, float | None]
    prompt_quantiles: dict[float, float]
    output_quantiles: dict[float, float]
    oddities: tuple[str, ...]


def facts_of(trace: RequestTrace) -> TraceFacts:
    """Compute them."""
    arrival_s = trace.arrival_s
    return TraceFacts(
        requests=len(trace),
        span_s=trace.span_s,
        rate_per_min=(len(trace) - 1) / trace.span_s * 60.0 if trace.span_s > 0 else None,
        peak_per_min=int(np.unique(arrival_s // 60.0, return_counts=True)[1].max()),
        zero_second_share=1.0 - np.unique(np.floor(arrival_s)).size / (np.floor(trace.span_s) + 1.0),
        dispersion={over_s: dispersion(arrival_s, over_s) for over_s in (1.0, 60.0)},
        prompt_quantiles=_quantiles(trace.prompt_tokens),
        output_quantiles=_quantiles(trace.output_tokens),
        oddities=tuple(_oddities(trace)),
    )


def dispersion(arrival_s: NDArray[np.float64], over_s: float) -> float | None:
    """Variance by mean of the counts in whole windows of ``over_s``: 1 for a Poisson process; `None` below 2 windows.

    Windows without arrivals are counted, not made, so that a long silence costs no memory.
    """
    windows = int(arrival_s[-1] // over_s)
    if windows < 2:
        return None
    _, counts = np.unique(arrival_s[arrival_s < windows * over_s] // over_s, return_counts=True)
    mean = counts.sum() / windows
    squares = float((counts.astype(np.float64) ** 2).sum())
    return float((squares / windows - mean**2) / mean)


def rate_profile(trace: RequestTrace, bins: int) -> NDArray[np.int64]:
    """Arrivals in equal parts of the span; one part where the span is 0."""
    if trace.span_s <= 0:
        return np.array([len(trace)], dtype=np.int64)
    return np.histogram(trace.arrival_s, bins=bins, range=(0.0, trace.span_s))[0].astype(np.int64)


def _quantiles(lengths: NDArray[np.int64]) -> dict[float, float]:
    return dict(zip(QUANTILES, np.quantile(lengths, QUANTILES).tolist(), strict=True))


def _oddities(trace: RequestTrace) -> list[str]:
    found: list[str] = []
    gaps_s = np.diff(trace.arrival_s)
    together = int((gaps_s == 0).sum())
    if together:
        stamps = len(trace) - together
        found.append(f"{together:,} requests arrive at the same time as the one before ({stamps:,} different times)")
    if len(trace) > 1 and np.array_equal(np.floor(trace.arrival_s), trace.arrival_s):
        found.append("all arrivals are whole seconds")
    if gaps_s.size and trace.span_s > 0 and gaps_s.max() > 0.1 * trace.span_s:
        found.append(f"{gaps_s.max():,.1f} s, {gaps_s.max() / trace.span_s:.0%} of the span, without a request")
    ones = int((trace.output_tokens == 1).sum())
    if ones:
        found.append(f"{ones:,} requests ask for one output token, which prefill produces: they never decode")
    long = int((trace.prompt_tokens > 131_072).sum())
    if long:
        found.append(f"{long:,} prompts are longer than 131,072 tokens")
    if len(trace) > 1:
        same = (gaps_s == 0) & (np.diff(trace.prompt_tokens) == 0) & (np.diff(trace.output_tokens) == 0)
        if same.any():
            found.append(f"{int(same.sum()):,} requests equal the one before in time and lengths")
    return found
