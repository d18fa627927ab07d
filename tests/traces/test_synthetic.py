"""The generators give the same bytes for the same seed, and the statistics that they were fitted to."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from harli_core.errors import ConfigError
from tests.traces.azure import load_azure
from traces.parameters import (
    ConversationParameters,
    DriftingArrivals,
    LengthComponent,
    LengthMixture,
    LogRateDrift,
    azure_conv_parameters,
)
from traces.schema import RequestTrace
from traces.synthetic import azure_conv, poisson

HOUR_S = 3600.0
SEEDS = range(20)
# of the public conversation trace: its quantiles, and its index of dispersion by seconds counted over
QUANTILES_AT = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
PROMPT_QUANTILES = (29, 181, 207, 396, 1020, 1189, 2735, 4083, 4142, 6212)
OUTPUT_QUANTILES = (16, 41, 54, 85, 129, 395, 424, 451, 601, 954)
DISPERSION = {0.1: (1.06, 0.03), 1: (1.38, 0.1), 10: (3.86, 0.2), 60: (16.1, 0.35)}


def seeded(seed: int) -> np.random.Generator:
    """A generator of the bit stream that `load_trace` uses."""
    return np.random.Generator(np.random.PCG64(seed))


@pytest.fixture(scope="module")
def hours() -> list[RequestTrace]:
    """One hour for each of 20 seeds."""
    return [azure_conv(seeded(seed), duration_s=HOUR_S) for seed in SEEDS]


def digest(trace: RequestTrace) -> str:
    """Hash all three columns."""
    columns = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens)
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


def kolmogorov_smirnov(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """The largest distance between two empirical distribution functions."""
    at = np.concatenate((a, b))
    shares = [np.searchsorted(np.sort(sample), at, side="right") / sample.size for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


def dispersion(arrival_s: NDArray[np.float64], over_s: float) -> float:
    """Index of dispersion: variance by mean of the counts in whole windows of ``over_s``; 1 for a Poisson process."""
    counts = np.bincount((arrival_s // over_s).astype(np.int64))[:-1]
    return float(counts.var() / counts.mean())


def test_same_seed_same_bytes() -> None:
    """Two generators of one seed give the same trace."""
    assert digest(azure_conv(seeded(7), duration_s=600)) == digest(azure_conv(seeded(7), duration_s=600))


def test_other_seed_other_trace(hours: list[RequestTrace]) -> None:
    """Every seed gives a trace of its own."""
    assert len({digest(hour) for hour in hours}) == len(hours)


def test_count_varies_around_the_mean_rate(hours: list[RequestTrace]) -> None:
    """An hour brings 5.53 requests a second in the mean (within 6 %, 2.6 standard errors), and varies by 4 to 16 %."""
    counts = np.array([len(hour) for hour in hours])
    assert counts.mean() == pytest.approx(5.53 * HOUR_S, rel=0.06)
    assert 0.04 < counts.std() / counts.mean() < 0.16


@pytest.mark.parametrize("over_s", DISPERSION)
def test_index_of_dispersion(hours: list[RequestTrace], over_s: float) -> None:
    """Counts scatter as the trace's do at every time scale, within 3 % at 0.1 s to 35 % at 60 s."""
    target, tolerance = DISPERSION[over_s]
    found = np.mean([dispersion(hour.arrival_s, over_s) for hour in hours])
    assert found == pytest.approx(target, rel=tolerance)


def test_near_duplicates(hours: list[RequestTrace]) -> None:
    """Gaps under 2 ms are more frequent than the rate explains, by the share of near-duplicates."""
    gaps_s = np.concatenate([np.diff(hour.arrival_s) for hour in hours])
    by_chance = -math.expm1(-5.53 * 0.002)
    duplicates = 0.0165 / 1.0165 * -math.expm1(-2)
    assert (gaps_s < 0.002).mean() == pytest.approx(by_chance + duplicates, abs=0.003)


@pytest.mark.parametrize("column", ["prompt_tokens", "output_tokens"])
def test_lengths_follow_the_quantiles(hours: list[RequestTrace], column: str) -> None:
    """At the trace's quantiles the distribution functions differ by 0.04 at most, for every seed."""
    quantiles = PROMPT_QUANTILES if column == "prompt_tokens" else OUTPUT_QUANTILES
    for hour in hours:
        lengths = np.sort(getattr(hour, column))
        below, upto = (np.searchsorted(lengths, quantiles, side=side) / len(hour) for side in ("left", "right"))
        off = np.maximum(below - QUANTILES_AT, np.array(QUANTILES_AT) - upto)
        assert off.max() <= 0.04


def test_lengths_against_the_public_trace(shared: Path, hours: list[RequestTrace]) -> None:
    """Kolmogorov-Smirnov distance to the public trace: 0.031 in and 0.021 out as fitted, plus 0.01 for chance."""
    real, _ = load_azure(shared / "traces" / "azure" / "AzureLLMInferenceTrace_conv.csv")
    for hour in hours:
        assert kolmogorov_smirnov(hour.prompt_tokens, real.prompt_tokens) <= 0.041
        assert kolmogorov_smirnov(hour.output_tokens, real.output_tokens) <= 0.031


def test_mean_lengths(hours: list[RequestTrace]) -> None:
    """Mean lengths are those of the trace within 2 %."""
    assert np.mean([hour.prompt_tokens.mean() for hour in hours]) == pytest.approx(1154.7, rel=0.02)
    assert np.mean([hour.output_tokens.mean() for hour in hours]) == pytest.approx(211.1, rel=0.02)


def test_one_component_is_the_log_normal_that_it_names() -> None:
    """Medians, standard deviations and correlation of the logs of a mixture of one come out as given."""
    fit = azure_conv_parameters()
    component = LengthComponent(
        weight=0.3, prompt_median=5000, prompt_sd=0.4, output_median=900, output_sd=0.7, rho=-0.8
    )
    lengths = LengthMixture((1, 10**6), (1, 10**6), (component,))
    trace = azure_conv(seeded(0), requests=40_000, parameters=ConversationParameters(fit.arrivals, lengths))
    logs = np.log([trace.prompt_tokens, trace.output_tokens])
    assert np.exp(np.median(logs, axis=1)) == pytest.approx([5000, 900], rel=0.02)
    assert logs.std(axis=1) == pytest.approx([0.4, 0.7], rel=0.02)
    assert np.corrcoef(logs)[0, 1] == pytest.approx(-0.8, abs=0.01)


def test_neither_drift_nor_near_duplicates_move_the_mean_rate() -> None:
    """With strong, short-lived drift and every second request doubled the rate is still the one asked for."""
    drift = LogRateDrift(sd=0.5, tau_s=5)
    arrivals = DriftingArrivals(
        step_s=5,
        mean_rps=10,
        slow_log_rate=drift,
        fast_log_rate=drift,
        near_duplicate_probability=0.5,
        near_duplicate_delay_s=0.001,
    )
    parameters = ConversationParameters(arrivals, azure_conv_parameters().lengths)
    trace = azure_conv(seeded(0), duration_s=40_000, parameters=parameters)
    assert len(trace) == pytest.approx(400_000, rel=0.06)


def test_lengths_stay_within_their_bounds(hours: list[RequestTrace]) -> None:
    """Lengths are positive and clipped where the trace's own end."""
    prompts = np.concatenate([hour.prompt_tokens for hour in hours])
    outputs = np.concatenate([hour.output_tokens for hour in hours])
    assert 2 <= prompts.min() <= prompts.max() <= 14_050
    assert 7 <= outputs.min() <= outputs.max() <= 1_000


def test_duration_bounds_the_span(hours: list[RequestTrace]) -> None:
    """All arrivals fall within the duration, the first one at 0 and the last one near its end."""
    assert all(hour.arrival_s[0] == 0 and HOUR_S - 30 < hour.span_s < HOUR_S for hour in hours)


def test_duration_need_not_be_whole_steps() -> None:
    """A duration that ends within a step cuts it there."""
    assert 5 < azure_conv(seeded(3), duration_s=7.5).span_s < 7.5


@pytest.mark.parametrize("requests", [1, 2, 999, 30_000])
def test_exact_number_of_requests(requests: int) -> None:
    """Asked for a number of requests, the generator gives as many."""
    assert len(azure_conv(seeded(1), requests=requests)) == requests


def test_arrivals_are_whole_ticks(hours: list[RequestTrace]) -> None:
    """Arrivals are multiples of 100 ns, as in the public files, so that no machine's rounding shows."""
    arrival_s = hours[0].arrival_s
    assert np.array_equal(np.rint(arrival_s * 1e7) / 1e7, arrival_s)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"duration_s": 1.0, "requests": 1},
        {"duration_s": 0.0},
        {"duration_s": math.nan},
        {"requests": 0},
        {"duration_s": -1.0},
        {"duration_s": math.inf},
        {"duration_s": 1e-6},
    ],
)
def test_impossible_sizes(asked: dict[str, float]) -> None:
    """Neither, both, nothing, less than nothing or no end of a trace cannot be drawn."""
    with pytest.raises(ConfigError):
        azure_conv(seeded(0), **asked)  # type: ignore[arg-type]


def test_poisson_rate_and_lengths() -> None:
    """Poisson arrivals have the rate asked for, exponential gaps (variation 1) and equal lengths."""
    trace = poisson(seeded(0), rate_rps=4.0, requests=50_000, prompt_tokens=3, output_tokens=2)
    gaps_s = np.diff(trace.arrival_s)
    assert len(trace) == 50_000
    assert gaps_s.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1, abs=0.02)
    assert (set(trace.prompt_tokens), set(trace.output_tokens)) == ({3}, {2})


def test_poisson_is_seeded() -> None:
    """The same seed gives the same arrivals and another one others."""
    first, again, other = (poisson(seeded(seed), 2.0, 100, 1, 1) for seed in (0, 0, 1))
    assert digest(first) == digest(again) != digest(other)


def test_poisson_of_one_request() -> None:
    """One request arrives at 0."""
    assert poisson(seeded(0), 1.0, 1, 5, 6).arrival_s.tolist() == [0.0]


@pytest.mark.parametrize(
    ("rate_rps", "requests", "prompt_tokens", "output_tokens"),
    [(0.0, 1, 1, 1), (math.nan, 1, 1, 1), (math.inf, 1, 1, 1), (1.0, 0, 1, 1), (1.0, 1, 0, 1), (1.0, 1, 1, -1)],
)
def test_poisson_refuses(rate_rps: float, requests: int, prompt_tokens: int, output_tokens: int) -> None:
    """Rates and counts that are not above 0 are refused by name."""
    with pytest.raises(ConfigError, match="expected a finite number above 0"):
        poisson(seeded(0), rate_rps, requests, prompt_tokens, output_tokens)
