"""The result in numbers: quantiles, latencies, attainment and errors, on books filled in by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.hardware import GpuSheet
from harli_core.model import ModelShape
from harli_core.records import COMPLETED, SPAN_FIELDS, RequestBook, StepBook
from harli_core.summary import (
    RunFacts,
    distribution,
    finetune_section,
    itl_over_target,
    prediction_error,
    quantiles_of_many,
    request_counts,
    request_latencies,
    slo,
    step_section,
    summarise,
    token_gaps,
    utilisation,
)

FACTS = RunFacts(
    qos_ms=40.0,
    ttft_slo_ms=1000.0,
    total_sms=100,
    gpus=2,
    duration_s=10.0,
    finetune_tokens=50_000,
    finetune_steps=5,
    finetune_gpus=1,
)


def add_steps(
    book: StepBook,
    latency_ms: Sequence[float],
    turn_ms: Sequence[float] | None = None,
    join_gap_ms: Sequence[float] = (),
    **span: float,
) -> None:
    """Add a span; what is not named is 0, and decode takes what the turn leaves of each step."""
    turns_ms = [0.0] * len(latency_ms) if turn_ms is None else list(turn_ms)
    decode_ms = [latency - turn for latency, turn in zip(latency_ms, turns_ms, strict=True)]
    fields = {name: 0 if code == "q" else 0.0 for name, code in SPAN_FIELDS}
    assert not span.keys() - fields.keys()
    book.add(tuple({**fields, **span}.values()), list(latency_ms), decode_ms, turns_ms, list(join_gap_ms))


@pytest.fixture
def requests() -> RequestBook:
    """Seven requests: good, slow to start, slow to go on, one token only, rejected, unfinished, not yet arrived."""
    book = RequestBook(np.full(7, 100), np.array([11, 11, 11, 1, 5000, 11, 11]))
    book.arrival_s[:6] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    book.first_token_s[:4] = [0.5, 2.5, 2.5, 3.25]
    book.last_token_s[:4] = [0.9, 2.9, 3.0, 3.25]
    book.first_token_s[5] = 5.5
    book.produced_tokens[:] = [11, 11, 11, 1, 0, 4, 0]
    book.state[:4] = COMPLETED
    book.preemptions[2] = 3
    book.reject(4, "too long")
    return book


@pytest.fixture
def steps() -> StepBook:
    """Two spans of three and two steps."""
    book = StepBook()
    add_steps(
        book, [10.0, 20.0, 30.0], [1.0, 2.0, 3.0], [50.0], batch=2, joined=1, decode_sms=60, finetune_sms=40,
        kv_tokens=1000, predicted_ms=12.5, free_but_unlendable_bytes=7,
    )  # fmt: skip
    add_steps(book, [45.0, 5.0], batch=3, decode_sms=100, kv_tokens=2000, predicted_ms=math.nan)
    return book


# -- distributions ----------------------------------------------------------------------------------------------------


def test_quantiles_are_values_that_occurred() -> None:
    """1 to 1,000: the median is 500, the 99.9 % quantile 999, not something between two values."""
    found = distribution(np.arange(1.0, 1001.0))
    assert found == {
        "count": 1000,
        "mean": 500.5,
        "p50": 500.0,
        "p90": 900.0,
        "p99": 990.0,
        "p99.9": 999.0,
        "max": 1000.0,
    }


def test_nothing_has_no_distribution() -> None:
    """No values, and values that all weigh nothing, give None and no zeros."""
    assert distribution(np.array([])) is None
    assert distribution(np.array([1.0, 2.0]), np.array([0, 0])) is None


@given(
    pairs=st.lists(
        st.tuples(st.one_of(st.floats(-1e9, 1e9), st.integers(0, 3).map(lambda ulps: 7.0 + ulps * 2**-50), st.just(0.0)),
                  st.integers(0, 9)),
        min_size=1, max_size=60,
    ).filter(lambda pairs: any(weight for _, weight in pairs)),
    levels=st.lists(st.floats(0.001, 0.999), min_size=1, max_size=4),
)  # fmt: skip
def test_quantiles_of_many_are_those_of_numpy(pairs: list[tuple[float, int]], levels: list[float]) -> None:
    """Counting into bins first changes no quantile, with ties, weights of 0 and values too close for bins."""
    values, weights = np.array([value for value, _ in pairs]), np.array([weight for _, weight in pairs])
    expected = np.quantile(values, levels, method="inverted_cdf", weights=weights)
    assert quantiles_of_many(values, weights, levels) == expected.tolist()


@given(st.lists(st.tuples(st.floats(0.001, 1e6), st.integers(1, 9)), min_size=1, max_size=30))
def test_weights_are_repetitions(pairs: list[tuple[float, int]]) -> None:
    """A value of weight n counts as n equal values, in the mean and in every quantile."""
    values = np.array([value for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs])
    weighted, plain = distribution(values, weights), distribution(np.repeat(values, weights))
    assert weighted is not None
    assert plain is not None
    assert weighted["mean"] == pytest.approx(plain["mean"])
    assert {**weighted, "mean": 0} == {**plain, "mean": 0}


# -- requests ---------------------------------------------------------------------------------------------------------


def test_every_request_is_counted_once(requests: RequestBook) -> None:
    """Arrivals = completed + rejected + unfinished; one that has not arrived is none of them, and asked for nothing."""
    found = request_counts(requests)
    assert (found["arrivals"], found["completed"], found["rejected"], found["unfinished"]) == (6, 4, 1, 1)
    assert found["not_arrived"] == 1
    assert found["rejection_reasons"] == {"too long": 1}
    assert (found["output_tokens_asked"], found["output_tokens_produced"]) == (5045, 38)
    assert found["preemptions"] == 3


def test_equal_reasons_are_counted_together(requests: RequestBook) -> None:
    """Reasons with their number, in the order of the trace."""
    requests.reject(6, "too long")
    requests.reject(5, "other")
    assert list(request_counts(requests)["rejection_reasons"].items()) == [("too long", 2), ("other", 1)]


def test_ttft_and_tpot_by_definition(requests: RequestBook, steps: StepBook) -> None:
    """TTFT of all that had a first token; TPOT of completed ones over n - 1 gaps."""
    found = request_latencies(requests, token_gaps(steps))
    assert found["ttft_ms"]["count"] == 5
    assert found["ttft_ms"]["max"] == pytest.approx(1500.0)
    assert found["tpot_ms"]["count"] == 3
    assert found["tpot_ms"]["p50"] == pytest.approx(40.0)
    assert found["tpot_ms"]["max"] == pytest.approx(50.0)


def test_tpot_is_undefined_for_one_token(requests: RequestBook) -> None:
    """One token has no gap, an unfinished request no last token: NaN, not 0."""
    assert np.isnan(requests.tpot_s()).tolist() == [False, False, False, True, True, True, True]


def test_itl_counts_each_gap_of_each_request(requests: RequestBook, steps: StepBook) -> None:
    """Steps of 2, 2 (one of them joined: its own gap of 50 ms instead) and 3 requests."""
    found = request_latencies(requests, token_gaps(steps))["itl_ms"]
    gaps_ms = [10.0] + 2 * [20.0] + 2 * [30.0] + 3 * [45.0] + 3 * [5.0] + [50.0]
    assert found == distribution(np.array(gaps_ms))


def test_gaps_over_target_include_the_first_of_a_joined_request(steps: StepBook) -> None:
    """Twelve gaps; over 40 ms are three of 45 ms, and the 50 ms that one request waited although its step took 10."""
    assert itl_over_target(token_gaps(steps), FACTS) == {"count": 4, "share": 4 / 12}
    assert itl_over_target(token_gaps(steps), dataclasses.replace(FACTS, qos_ms=45.0)) == {"count": 1, "share": 1 / 12}


def test_no_gaps_have_no_share() -> None:
    """No steps, nothing over the target, no share."""
    assert itl_over_target(token_gaps(StepBook()), FACTS) == {"count": 0, "share": None}


def test_slo_attainment_needs_both_limits(requests: RequestBook) -> None:
    """Of five finished the first (exactly at both limits) and the one-token request attain; the rejected one does not."""
    facts = dataclasses.replace(FACTS, qos_ms=31.25, ttft_slo_ms=500.0)
    requests.last_token_s[0] = 0.5 + 10 * 0.03125
    assert slo(requests, facts) == {"slo_attainment": 2 / 5, "goodput_rps": 0.2}
    assert slo(requests, dataclasses.replace(facts, qos_ms=31.0))["slo_attainment"] == 1 / 5
    assert slo(requests, dataclasses.replace(facts, ttft_slo_ms=499.0))["slo_attainment"] == 1 / 5


def test_no_arrivals_have_no_attainment() -> None:
    """A share of nothing is None."""
    nobody = RequestBook(np.array([1]), np.array([1]))
    facts = RunFacts(40.0, 1000.0, 100, 1, 0.0, 0, 0, 0)
    assert slo(nobody, facts) == {"slo_attainment": None, "goodput_rps": None}


# -- steps ------------------------------------------------------------------------------------------------------------


def test_step_latencies_and_batches(steps: StepBook) -> None:
    """Latency counts whole steps, decode leaves the turn out, batches are weighted by steps."""
    found = step_section(steps, FACTS)
    assert found["count"] == 5
    assert found["latency_ms"] == distribution(np.array([10.0, 20.0, 30.0, 45.0, 5.0]))
    assert found["decode_ms"] == distribution(np.array([9.0, 18.0, 27.0, 45.0, 5.0]))
    assert found["mean_batch"] == pytest.approx((3 * 2 + 2 * 3) / 5)
    assert found["free_but_unlendable_bytes"] == distribution(np.array([7.0, 7.0, 7.0, 0.0, 0.0]))


def test_violations_of_both_kinds_count_against_the_target(steps: StepBook) -> None:
    """What is within target is the rest; the kinds stay apart."""
    steps.solo_violations, steps.finetune_violations = 1, 2
    found = step_section(steps, FACTS)
    assert found["violations"] == {"solo": 1, "finetune_caused": 2}
    assert found["within_target"] == pytest.approx(1 - 3 / 5)


def test_sm_time_is_allotted_to_decode_turns_and_idle_finetuning(steps: StepBook) -> None:
    """Decode: SMs times decode time. Finetuning: beside decode, whole-chip turns, and idle time."""
    steps.idle_finetune_sm_s = 3.0
    found = step_section(steps, FACTS)["sm_allotment"]
    sm_ms = 100 * 2 * 10_000.0
    assert found["decode"] == pytest.approx((60 * 54.0 + 100 * 50.0) / sm_ms)
    assert found["finetune"] == pytest.approx((40 * 54.0 + 100 * 6.0 + 3000.0) / sm_ms)


def test_prediction_error_is_of_first_steps_that_were_predicted(steps: StepBook) -> None:
    """Predicted 12.5, measured 10: 25 %. The second span predicted nothing."""
    assert prediction_error(steps) == {"count": 1, "mean": 0.25, "p99": 0.25, "max": 0.25}


def test_no_steps_have_no_figures() -> None:
    """An empty book: None everywhere, no division by zero."""
    found = step_section(StepBook(), FACTS)
    assert (found["count"], found["latency_ms"], found["mean_batch"], found["within_target"]) == (0, None, None, None)
    assert found["prediction_error"] is None


def test_finetune_throughput_is_of_completed_steps() -> None:
    """Tokens of completed optimizer steps over the whole duration."""
    assert finetune_section(FACTS)["tokens_per_s"] == 5000.0


def test_utilisation_by_hand() -> None:
    """Eq. 1 as work over peak: bytes of weights and KV a step, two operations a weight and token."""
    model = ModelShape("m", layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=32)
    book = StepBook()
    add_steps(book, [1.0, 1.0], batch=3, kv_tokens=100)
    facts = RunFacts(40.0, 1000.0, 100, 1, 2.0, 0, 0, 0)
    weights = model.weight_bytes / 2
    flops = 2 * weights * 6 + 4 * 1 * 2 * 4 * (100 + 103) + 6 * weights * 1000
    moved = 2 * model.weight_bytes + model.kv_bytes_per_token * (100 + 103)
    found = utilisation(book, model, model, 1000, GpuSheet("g", 1, 1e6, 1e5), facts)
    assert found == {"sm": pytest.approx(flops / 2e6), "dram": pytest.approx(moved / 2e5)}


def test_the_sections_of_a_summary(requests: RequestBook, steps: StepBook) -> None:
    """Everything of DESIGN section 5 has its place."""
    found = summarise(requests, steps, FACTS)
    assert {
        "requests",
        "ttft_ms",
        "tpot_ms",
        "itl_ms",
        "itl_over_target",
        "slo_attainment",
        "goodput_rps",
        "steps",
        "finetune",
    } <= found.keys()
    assert found["duration_s"] == 10.0


# -- books ------------------------------------------------------------------------------------------------------------


def test_steps_know_their_place(steps: StepBook) -> None:
    """Columns of spans spread over their steps, and numbered within them."""
    assert len(steps) == 5
    assert steps.span_steps().tolist() == [3, 2]
    assert steps.spread("batch").tolist() == [2, 2, 2, 3, 3]
    assert steps.step_within_span().tolist() == [0, 1, 2, 0, 1]
    assert steps.span_column("predicted_ms")[0] == 12.5
