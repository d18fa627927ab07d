"""Seeded traces that look like real ones, or that queueing theory can say something about.

Same generator state, same bytes: arrivals are uniform within their step and rounded to 100 ns ticks, so that
no last digit of a machine's ``exp`` shows in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import ConfigError
from traces.parameters import (
    ConversationParameters,
    DriftingArrivals,
    LengthMixture,
    azure_conv_parameters,
)
from traces.schema import RequestTrace
from traces.stamps import TICKS_PER_S


def azure_conv(
    rng: np.random.Generator,
    *,
    duration_s: float | None = None,
    requests: int | None = None,
    parameters: ConversationParameters | None = None,
) -> RequestTrace:
    """Draw a trace shaped like the Azure 2023 conversation trace, of a given duration or number of requests.

    Give either ``duration_s`` or ``requests`` (else `ConfigError`). The count that comes within a duration varies from
    seed to seed by far more than Poisson noise (a standard deviation of 10 % over an hour), since the rate drifts.
    """
    if (duration_s is None) == (requests is None):
        raise ConfigError("azure_conv needs either duration_s or requests")
    fit = azure_conv_parameters() if parameters is None else parameters
    if duration_s is not None:
        _positive("duration_s", duration_s)
        ticks = _ticks_within(_ticks_by_step(rng, fit.arrivals), fit.arrivals.step_s, duration_s)
        if not ticks.size:
            raise ConfigError(f"duration_s is {duration_s}, and no request arrived; expected a longer time")
    else:
        assert requests is not None
        _positive("requests", requests)
        ticks = _first_ticks(_ticks_by_step(rng, fit.arrivals), requests)
    prompt_tokens, output_tokens = mixed_lengths(rng, fit.lengths, ticks.size)
    arrival_s = (ticks - ticks[0]) / TICKS_PER_S
    return RequestTrace.of(arrival_s, prompt_tokens, output_tokens, source="synthetic azure-conv")


def poisson(
    rng: np.random.Generator, rate_rps: float, requests: int, prompt_tokens: int, output_tokens: int
) -> RequestTrace:
    """Draw Poisson arrivals of equal requests: the M of an M/D/1 queue. The first request arrives at 0."""
    for name, value in (
        ("rate_rps", rate_rps),
        ("requests", requests),
        ("prompt_tokens", prompt_tokens),
        ("output_tokens", output_tokens),
    ):
        _positive(name, value)
    arrival_s = np.zeros(requests)
    arrival_s[1:] = np.cumsum(rng.standard_exponential(requests - 1) / rate_rps)
    lengths = (np.full(requests, tokens, dtype=np.int64) for tokens in (prompt_tokens, output_tokens))
    return RequestTrace.of(arrival_s, *lengths, source=f"poisson {rate_rps:g} requests/s")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value}; expected a finite number above 0")


def _ticks_by_step(rng: np.random.Generator, process: DriftingArrivals) -> Iterator[NDArray[np.int64]]:
    """Yield what arrives in each step, for ever; a near-duplicate may fall a little behind the end of its step."""
    drifts = (process.slow_log_rate, process.fast_log_rate)
    sds = np.array([drift.sd for drift in drifts])
    decays = np.exp([-process.step_s / drift.tau_s for drift in drifts])
    kicks = sds * np.sqrt(1 - decays**2)
    # E[exp(x + y)] = exp((sd_x^2 + sd_y^2) / 2), and each request brings 1 + p with its near-duplicate
    mean_log_rate = math.log(process.mean_rps / (1 + process.near_duplicate_probability)) - (sds**2).sum() / 2
    log_rates = sds * rng.standard_normal(2)
    step = 0
    while True:
        rate_rps = math.exp(mean_log_rate + log_rates.sum())
        at_s = (step + rng.random(rng.poisson(rate_rps * process.step_s))) * process.step_s
        doubled_s = at_s[rng.random(at_s.size) < process.near_duplicate_probability]
        doubled_s = doubled_s + rng.standard_exponential(doubled_s.size) * process.near_duplicate_delay_s
        yield np.rint(np.concatenate((at_s, doubled_s)) * TICKS_PER_S).astype(np.int64)
        log_rates = decays * log_rates + kicks * rng.standard_normal(2)
        step += 1


def _ticks_within(steps: Iterator[NDArray[np.int64]], step_s: float, duration_s: float) -> NDArray[np.int64]:
    taken = [next(steps) for _ in range(math.ceil(duration_s / step_s))]
    ticks = np.sort(np.concatenate(taken))
    return ticks[ticks < duration_s * TICKS_PER_S]


def _first_ticks(steps: Iterator[NDArray[np.int64]], requests: int) -> NDArray[np.int64]:
    taken = [next(steps)]
    count = taken[0].size
    while count < requests:
        taken.append(next(steps))
        count += taken[-1].size
    return np.sort(np.concatenate(taken))[:requests]


def mixed_lengths(
    rng: np.random.Generator, mixture: LengthMixture, requests: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw prompt and output tokens for so many requests."""
    components = mixture.components
    weights = np.cumsum([component.weight for component in components])
    drawn = np.searchsorted(weights[:-1], rng.random(requests) * weights[-1], side="right")
    log_prompt, log_output = rng.standard_normal((2, requests))

    def of_drawn(values: list[float]) -> NDArray[np.float64]:
        column: NDArray[np.float64] = np.array(values)[drawn]
        return column

    rho = of_drawn([component.rho for component in components])
    log_output = rho * log_prompt + np.sqrt(1 - rho**2) * log_output
    prompts = of_drawn([component.prompt_median for component in components]) * np.exp(
        of_drawn([component.prompt_sd for component in components]) * log_prompt
    )
    outputs = of_drawn([component.output_median for component in components]) * np.exp(
        of_drawn([component.output_sd for component in components]) * log_output
    )
    return _clipped(prompts, mixture.prompt_tokens), _clipped(outputs, mixture.output_tokens)


def _clipped(lengths: NDArray[np.float64], bounds: tuple[int, int]) -> NDArray[np.int64]:
    return np.clip(np.rint(lengths), *bounds).astype(np.int64)
