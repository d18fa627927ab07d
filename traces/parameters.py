"""What the synthetic generators are set by: arrival processes and mixtures of lengths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class LogRateDrift:
    """A stationary AR(1) process added to the log of the arrival rate: standard deviation and time constant."""

    sd: float
    tau_s: float


@dataclass(frozen=True, slots=True)
class DriftingArrivals:
    """A Cox-Poisson process: the rate is constant within a step and drifts slowly and fast from step to step.

    ``mean_rps`` counts all requests. With ``near_duplicate_probability`` a request is followed by
    another one after an exponential delay of mean ``near_duplicate_delay_s``.
    """

    step_s: float
    mean_rps: float
    slow_log_rate: LogRateDrift
    fast_log_rate: LogRateDrift
    near_duplicate_probability: float
    near_duplicate_delay_s: float


@dataclass(frozen=True, slots=True)
class LengthComponent:
    """One 2-D log-normal: medians in tokens, standard deviations and correlation of the logs."""

    weight: float
    prompt_median: float
    prompt_sd: float
    output_median: float
    output_sd: float
    rho: float


@dataclass(frozen=True, slots=True)
class LengthMixture:
    """Log-normals mixed by their weights (scaled to sum 1), rounded to whole tokens and clipped to (low, high)."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    components: tuple[LengthComponent, ...]


@dataclass(frozen=True, slots=True)
class ConversationParameters:
    """Arrivals and lengths of a conversation service."""

    arrivals: DriftingArrivals
    lengths: LengthMixture


def azure_conv_parameters() -> ConversationParameters:
    """Read the bundled fit to the Azure 2023 conversation trace (source and licence stand in the file)."""
    fields = json.loads(resources.files("traces").joinpath("azure_conv.json").read_text(encoding="utf-8"))
    arrivals, lengths = dict(fields["arrivals"]), fields["lengths"]
    for drift in ("slow_log_rate", "fast_log_rate"):
        arrivals[drift] = LogRateDrift(**arrivals[drift])
    mixture = LengthMixture(
        prompt_tokens=tuple(lengths["prompt_tokens"]),
        output_tokens=tuple(lengths["output_tokens"]),
        components=tuple(LengthComponent(**component) for component in lengths["components"]),
    )
    return ConversationParameters(DriftingArrivals(**arrivals), mixture)
