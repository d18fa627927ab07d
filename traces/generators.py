"""Traces by the name of a process: arrivals of one kind, lengths of another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import ConfigError
from traces.bursts import azure_code, on_off_arrivals
from traces.parameters import azure_code_parameters, azure_conv_parameters, hourly_rates
from traces.schema import RequestTrace
from traces.shaping import MAX_REQUESTS
from traces.stamps import TICKS_PER_S
from traces.synthetic import azure_conv, mixed_lengths

PHASE_BATCHES = (8.0, 42.0, 24.0)
"""Light, heavy and medium load of the paper's memory experiment, as requests that decode at once."""

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to draw.

    ``rate_rps``: mean rate, where the process has none of its own. ``gamma_shape``: 1 is Poisson, less is burstier.
    ``batches``, ``step_ms``: the load of each phase, by Little's law: batch = rate x output tokens x time of a step.
    ``lengths``: a trace whose lengths are replayed in its order, again from its start where it ends; `None`: drawn from
    the fit to the Azure 2023 conversation trace, or to the code trace under ``azure-code``.
    """

    duration_s: float
    rate_rps: float | None = None
    gamma_shape: float = 0.5
    batches: tuple[float, ...] = PHASE_BATCHES
    step_ms: float = 40.0
    lengths: RequestTrace | None = None


Process = Callable[[np.random.Generator, Recipe], NDArray[np.float64]]
"""Arrivals in seconds within the duration, in order."""


def generate(name: str, rng: np.random.Generator, recipe: Recipe) -> RequestTrace:
    """Draw the trace; raises `ConfigError` for an unknown name or a recipe that gives none."""
    if name not in GENERATORS:
        raise ConfigError(f"unknown generator {name!r}: known generators are {', '.join(GENERATORS)}")
    for field in ("duration_s", "rate_rps", "gamma_shape", "step_ms"):
        value = getattr(recipe, field)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{field} is {value}; expected a finite number above 0")
    fitted = name in FITTED
    if fitted and recipe.rate_rps is not None:
        raise ConfigError(f"rate = {recipe.rate_rps:g}: {name} has a rate of its own; harli trace convert changes it")
    if fitted and recipe.duration_s * 6 > MAX_REQUESTS:
        raise ConfigError(f"duration_s is {recipe.duration_s:g}: more than {MAX_REQUESTS:,} requests; expected less")
    if fitted and recipe.lengths is None:
        own = azure_conv if name == "azure-conv" else azure_code
        return own(rng, duration_s=recipe.duration_s)
    ticks = np.rint(GENERATORS[name](rng, recipe) * TICKS_PER_S).astype(np.int64)
    if not ticks.size:
        raise ConfigError(f"duration_s is {recipe.duration_s}, and no request arrived; expected a longer time")
    arrival_s = (ticks - ticks[0]) / TICKS_PER_S
    source = f"synthetic {name}"
    if recipe.lengths is not None:
        index = np.arange(ticks.size, dtype=np.int64) % len(recipe.lengths)
        return recipe.lengths.chosen(index, arrival_s, f"{source}, lengths of {recipe.lengths.source}")
    prompts, outputs = mixed_lengths(rng, azure_conv_parameters().lengths, ticks.size)
    return RequestTrace.of(arrival_s, prompts, outputs, source=source)


def _conversation(rng: np.random.Generator, recipe: Recipe) -> NDArray[np.float64]:
    return azure_conv(rng, duration_s=recipe.duration_s).arrival_s


def _code(rng: np.random.Generator, recipe: Recipe) -> NDArray[np.float64]:
    return on_off_arrivals(rng, azure_code_parameters().arrivals, recipe.duration_s)


def _poisson(rng: np.random.Generator, recipe: Recipe) -> NDArray[np.float64]:
    return _steady(rng, _rate(recipe), 0.0, recipe.duration_s)


def _gamma(rng: np.random.Generator, recipe: Recipe) -> NDArray[np.float64]:
    """Renewal process with gamma gaps: their coefficient of variation is ``gamma_shape ** -0.5``."""
    rate_rps, shape = _rate(recipe), recipe.gamma_shape
    _check_count(rate_rps * recipe.duration_s)
    found = [np.zeros(1)]
    while found[-1][-1] < recipe.duration_s:
        gaps_s = rng.standard_gamma(shape, size=max(16, int(rate_rps * recipe.duration_s))) / (shape * rate_rps)
        found.append(found[-1][-1] + np.cumsum(gaps_s))
    arrivals = np.concatenate(found)
    return arrivals[arrivals < recipe.duration_s]


def _phases(rng: np.random.Generator, recipe: Recipe) -> NDArray[np.float64]:
    """Phases of equal length, each with Poisson arrivals at the rate that its batch needs."""
    if recipe.rate_rps is not None:
        raise ConfigError(f"rate = {recipe.rate_rps:g}: phases follow from their batches; give --batches instead")
    if not recipe.batches or not all(math.isfinite(batch) and batch >= 0 for batch in recipe.batches):
        raise ConfigError(f"batches are {recipe.batches}; expected finite numbers of 0 or more")
    phase_s = recipe.duration_s / len(recipe.batches)
    per_request_s = _mean_output_tokens(recipe) * recipe.step_ms / 1000.0
    parts = [
        _steady(rng, batch / per_request_s, number * phase_s, phase_s) for number, batch in enumerate(recipe.batches)
    ]
    return np.concatenate(parts)


def _diurnal(rng: np.random.Generator, recipe: Recipe) -> NDArray[np.float64]:
    """Poisson arrivals whose rate changes from hour to hour of a day that begins at midnight."""
    rate_rps, hourly = _rate(recipe), hourly_rates()
    _check_count(rate_rps * recipe.duration_s)
    mean = sum(hourly) / len(hourly)
    hours = math.ceil(recipe.duration_s / HOUR_S)
    if hours > MAX_REQUESTS:
        raise ConfigError(f"duration_s is {recipe.duration_s:g}; expected less")
    parts = [
        _steady(
            rng,
            rate_rps * hourly[hour % len(hourly)] / mean,
            hour * HOUR_S,
            min(HOUR_S, recipe.duration_s - hour * HOUR_S),
        )
        for hour in range(hours)
    ]
    return np.concatenate(parts)


def _steady(rng: np.random.Generator, rate_rps: float, start_s: float, length_s: float) -> NDArray[np.float64]:
    """Poisson arrivals within a stretch of time."""
    _check_count(rate_rps * length_s)
    return start_s + np.sort(rng.random(rng.poisson(rate_rps * length_s))) * length_s


def _rate(recipe: Recipe) -> float:
    if recipe.rate_rps is None:
        raise ConfigError("this process needs a rate; expected --rate (requests/s) with it")
    return recipe.rate_rps


def _check_count(expected: float) -> None:
    if expected > MAX_REQUESTS:
        raise ConfigError(f"rate and duration ask for {expected:.3g} requests; expected up to {MAX_REQUESTS:,}")


def _mean_output_tokens(recipe: Recipe) -> float:
    if recipe.lengths is not None:
        return float(recipe.lengths.output_tokens.mean())
    components = azure_conv_parameters().lengths.components
    total = sum(one.weight * one.output_median * math.exp(one.output_sd**2 / 2) for one in components)
    return total / sum(one.weight for one in components)


FITTED = ("azure-conv", "azure-code")
"""Processes with a rate of their own."""

GENERATORS: Mapping[str, Process] = {
    "azure-conv": _conversation,
    "azure-code": _code,
    "poisson": _poisson,
    "gamma": _gamma,
    "phases": _phases,
    "diurnal": _diurnal,
}
"""Every process, by name."""
