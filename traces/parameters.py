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


@dataclass(frozen=True, slots=True)
class OnOffArrivals:
    """Bursts with silence between them, and batches of requests within bursts.

    A burst lasts an exponential time of mean ``on_mean_s``; silence lasts ``off_least_s`` and an exponential time of
    one of two means. A burst's rate is log-normal; its log also drifts within the burst, step by step. Batches come
    with gamma gaps; each member of a batch is followed by another with ``batch_continue_probability``, after an
    exponential delay of mean ``batch_delay_s``. Rates count requests, not batches.
    """

    on_mean_s: float
    off_least_s: float
    off_short_probability: float
    off_short_mean_s: float
    off_long_mean_s: float
    on_rate_median_rps: float
    on_rate_sigma: float
    log_rate: LogRateDrift
    step_s: float
    epoch_gamma_shape: float
    batch_continue_probability: float
    batch_delay_s: float


@dataclass(frozen=True, slots=True)
class LogNormals:
    """Log-normals mixed by their weights (scaled to sum 1), rounded to whole tokens and clipped to (low, high)."""

    clip: tuple[int, int]
    weights: tuple[float, ...]
    mu: tuple[float, ...]
    sigma: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CodeParameters:
    """Arrivals and (independent) lengths of a code completion service."""

    arrivals: OnOffArrivals
    prompt_tokens: LogNormals
    output_tokens: LogNormals


def azure_code_parameters() -> CodeParameters:
    """Read the bundled fit to the Azure 2023 code trace (source and licence stand in the file)."""
    fields = json.loads(resources.files("traces").joinpath("azure_code.json").read_text(encoding="utf-8"))
    arrivals = dict(fields["arrivals"])
    arrivals["log_rate"] = LogRateDrift(**arrivals["log_rate"])
    prompts, outputs = (
        LogNormals(**{name: tuple(values) for name, values in fields[column].items()})
        for column in ("prompt_tokens", "output_tokens")
    )
    return CodeParameters(OnOffArrivals(**arrivals), prompts, outputs)


def hourly_rates() -> tuple[float, ...]:
    """The 24 hourly rates of a day, relative to their mean (source and licence stand in the file)."""
    fields = json.loads(resources.files("traces").joinpath("diurnal.json").read_text(encoding="utf-8"))
    return tuple(fields["hourly"])
