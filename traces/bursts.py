"""A trace shaped like the Azure 2023 code trace: bursts, silence, and batches within bursts."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import ConfigError
from traces.parameters import CodeParameters, LogNormals, OnOffArrivals, azure_code_parameters
from traces.schema import RequestTrace
from traces.stamps import TICKS_PER_S


def azure_code(
    rng: np.random.Generator, *, duration_s: float, parameters: CodeParameters | None = None
) -> RequestTrace:
    """Draw a trace of a given duration; raises `ConfigError` where no request falls into it."""
    fit = azure_code_parameters() if parameters is None else parameters
    arrivals = on_off_arrivals(rng, fit.arrivals, duration_s)
    if not arrivals.size:
        raise ConfigError(f"duration_s is {duration_s}, and no request arrived; expected a longer time")
    ticks = np.rint(arrivals * TICKS_PER_S).astype(np.int64)
    prompt_tokens, output_tokens = (_lengths(rng, one, ticks.size) for one in (fit.prompt_tokens, fit.output_tokens))
    arrival_s = (ticks - ticks[0]) / TICKS_PER_S
    return RequestTrace.of(arrival_s, prompt_tokens, output_tokens, source="synthetic azure-code")


def on_off_arrivals(rng: np.random.Generator, process: OnOffArrivals, duration_s: float) -> NDArray[np.float64]:
    """Arrivals in seconds, in order; the first burst starts after a silence that is already under way."""
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ConfigError(f"duration_s is {duration_s}; expected a finite number above 0")
    found: list[NDArray[np.float64]] = [np.zeros(0)]
    at_s = _silence_s(rng, process) * rng.random()
    while at_s < duration_s:
        on_s = rng.standard_exponential() * process.on_mean_s
        found.append(at_s + _burst(rng, process, on_s))
        at_s += on_s + _silence_s(rng, process)
    arrivals = np.sort(np.concatenate(found))
    return arrivals[arrivals < duration_s]


def _silence_s(rng: np.random.Generator, process: OnOffArrivals) -> float:
    mean_s = process.off_short_mean_s if rng.random() < process.off_short_probability else process.off_long_mean_s
    return process.off_least_s + float(rng.standard_exponential()) * mean_s


def _burst(rng: np.random.Generator, process: OnOffArrivals, on_s: float) -> NDArray[np.float64]:
    """Arrivals of one burst, from its start: gamma gaps in the time that the burst's rate makes run faster or slower."""
    steps = max(1, math.ceil(on_s / process.step_s))
    decay = math.exp(-process.step_s / process.log_rate.tau_s)
    kicks = rng.standard_normal(steps) * process.log_rate.sd
    drift = np.empty(steps)
    drift[0] = kicks[0]
    for step in range(1, steps):
        drift[step] = decay * drift[step - 1] + math.sqrt(1 - decay**2) * kicks[step]
    rate_rps = process.on_rate_median_rps * math.exp(process.on_rate_sigma * rng.standard_normal())
    epoch_rps = rate_rps * (1 - process.batch_continue_probability) * np.exp(drift)
    edges_s = np.minimum(np.arange(steps + 1) * process.step_s, on_s)
    expected = np.concatenate((np.zeros(1), np.cumsum(epoch_rps * np.diff(edges_s))))
    shape, epochs = process.epoch_gamma_shape, np.zeros(0)
    while not epochs.size or epochs[-1] < expected[-1]:
        gaps = rng.standard_gamma(shape, size=int(expected[-1]) + 8) / shape
        epochs = np.concatenate((epochs, (epochs[-1] if epochs.size else 0.0) + np.cumsum(gaps)))
    starts_s = np.interp(epochs[epochs < expected[-1]], expected, edges_s)
    sizes = rng.geometric(1 - process.batch_continue_probability, size=starts_s.size)
    delays_s = rng.standard_exponential(int(sizes.sum())) * process.batch_delay_s
    firsts = np.cumsum(sizes) - sizes
    delays_s[firsts] = 0.0
    behind_s = np.cumsum(delays_s)
    arrivals: NDArray[np.float64] = np.repeat(starts_s, sizes) + behind_s - np.repeat(behind_s[firsts], sizes)
    return arrivals


def _lengths(rng: np.random.Generator, mixture: LogNormals, requests: int) -> NDArray[np.int64]:
    weights = np.cumsum(mixture.weights)
    drawn = np.searchsorted(weights[:-1], rng.random(requests) * weights[-1], side="right")
    logs = np.array(mixture.mu)[drawn] + np.array(mixture.sigma)[drawn] * rng.standard_normal(requests)
    lengths: NDArray[np.int64] = np.clip(np.rint(np.exp(logs)), *mixture.clip).astype(np.int64)
    return lengths
