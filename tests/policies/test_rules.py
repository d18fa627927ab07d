"""What each built-in policy does of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.errors import ConfigError
from harli_core.policy import PolicyContext
from harli_core.qos.monitor import WHOLE_CHIP, LatencyMonitor
from harli_core.types import Hold, Split, StepPlan, StepResult, StepView
from policies.harli import Harli
from policies.hybrid import Hybrid
from policies.inference_only import InferenceOnly
from policies.pause_on_load import PauseOnLoad
from policies.separate import Separate
from policies.static_split import StaticSplit


def result_of(latency_ms: float, steps: int = 1) -> StepResult:
    """Equal steps."""
    return StepResult(0, 0, 8, 8000, (latency_ms,) * steps, (latency_ms,) * steps, (0.0,) * steps)


def heaviest_of(view: StepView, hold: Hold) -> tuple[int, int]:
    """Batch and KV tokens of the heaviest step that a hold allows."""
    if hold.batches is None:
        return view.batch, view.kv_tokens + hold.steps * view.batch
    assert hold.most_kv_tokens is not None
    return hold.batches[1], hold.most_kv_tokens


def split_of(plan: StepPlan) -> tuple[int, int]:
    """SMs for decode and beside it."""
    return plan.decode_sms, sum(job.sms for job in plan.jobs)


# -- harli ------------------------------------------------------------------------------------------------------------


@given(batch=st.integers(1, 300), context=st.integers(1, 4000), qos_ms=st.floats(5.0, 80.0))
def test_harli_takes_the_split_closest_to_the_target(
    context_of: Any, view_of: Any, batch: int, context: int, qos_ms: float
) -> None:
    """Of the corrected predictions for the heaviest step that the hold allows, the largest that keeps the target."""
    policy_context = context_of(qos_ms=qos_ms)
    view = view_of(batch, batch * context)
    plan = Harli(policy_context, hold_steps=64).plan(view)
    hold = plan.hold if any(job.sms for job in plan.jobs) else Hold(64, None)
    prediction = policy_context.predictor.predict(*heaviest_of(view, hold))
    level = LatencyMonitor(policy_context, 0.99).ring(0).centre
    fitting = {
        (split.decode_sms, split.finetune_sms): ms * level
        for split, ms in zip(policy_context.capabilities.splits, prediction.colocated_ms, strict=True)
        if ms * level <= qos_ms
    }
    if not fitting:
        assert split_of(plan) == (132, 0)
    else:
        assert fitting[split_of(plan)] == max(fitting.values())
    assert all(job.turn_ms == 0.0 for job in plan.jobs)


def test_harli_pauses_when_nothing_fits(context_of: Any, view_of: Any) -> None:
    """A target that decode alone would miss: the whole chip to decode, and the prediction is for that."""
    policy_context = context_of(qos_ms=3.0)
    plan = Harli(policy_context).plan(view_of(64))
    assert split_of(plan) == (132, 0)
    assert plan.predicted_ms == pytest.approx(policy_context.predictor.predict(64, 64_000).whole_chip_ms, rel=0.05)
    assert plan.hold.max_step_ms is None


def test_harli_gives_an_idle_gpu_to_finetuning(context_of: Any, view_of: Any) -> None:
    """Nothing to decode: all SMs, until something arrives."""
    assert Harli(context_of()).plan(view_of(0)).jobs[0].sms == 132


def test_harli_pauses_after_a_step_over_target(context_of: Any, view_of: Any) -> None:
    """The guard trips on one slow step beside finetuning, and a pause lasts its steps."""
    policy = Harli(context_of(qos_ms=40.0))
    assert policy.plan(view_of(8)).jobs[0].sms > 0
    policy.observe(result_of(41.0))
    paused = policy.plan(view_of(8))
    assert split_of(paused) == (132, 0)
    assert paused.hold.steps <= 16
    policy.observe(result_of(5.0, paused.hold.steps))
    assert policy.plan(view_of(8)).jobs[0].sms > 0


def test_harli_learns_from_slow_steps(context_of: Any, view_of: Any) -> None:
    """Where a split is slower than predicted (and still within target) its predictions rise."""
    policy = Harli(context_of(qos_ms=1000.0))
    before = policy.plan(view_of(8)).predicted_ms
    for _ in range(10):
        policy.observe(result_of(100.0, 64))
        after = policy.plan(view_of(8))
    assert after.predicted_ms is not None
    assert before is not None
    assert after.predicted_ms > 2 * before


def test_harli_keeps_its_split_until_another_fits_clearly(context_of: Any, view_of: Any) -> None:
    """A coarser split needs ``hysteresis`` to spare: none switches when it just fits, all do well inside."""
    policy_context = context_of()
    level = LatencyMonitor(policy_context, 0.99).ring(0).centre
    kv_tokens, batch = 8000, 8
    predicted = policy_context.predictor.predict(batch, kv_tokens + 64 * batch).colocated_ms
    coarse, fine = (index for index in (1, 2))
    assert predicted[coarse] > predicted[fine]
    for slack, expected in ((1.001, fine), (1.2, coarse)):
        context = dataclasses.replace(policy_context, qos_ms=predicted[coarse] * level * slack)
        policy = Harli(context, hysteresis=0.03)
        # so much KV that only the finer split fits at first
        crowded = next(
            tokens for tokens in range(kv_tokens, 400_000, 500)
            if policy_context.predictor.predict(batch, tokens + 64 * batch).colocated_ms[coarse] * level > context.qos_ms
        )  # fmt: skip
        first = policy.plan(view_of(batch, crowded))
        assert split_of(first) == (52, 80)
        assert (
            split_of(policy.plan(view_of(batch, kv_tokens)))[0]
            == policy_context.capabilities.splits[expected].decode_sms
        )


# -- hybrid -----------------------------------------------------------------------------------------------------------


def hybrid_bound_ms(context: PolicyContext, view: StepView, plan: StepPlan, quantile: float) -> float:
    """The predicted quantile of the heaviest step's latency that the hold allows.

    It is made of the turn, decode's bound, what has passed, and units on decode's SMs.
    """
    prediction = context.predictor.predict(*heaviest_of(view, plan.hold))
    monitor = LatencyMonitor(context, quantile)
    turn_ms = sum(job.turn_ms for job in plan.jobs)
    overlapping = [job.in_flight_ms for job in view.jobs if job.in_flight_sms + plan.decode_sms > 132]
    spent_ms = view.elapsed_ms + sum(overlapping)
    if sum(job.sms for job in plan.jobs) == 0:
        return spent_ms + turn_ms + prediction.whole_chip_ms * monitor.ring(WHOLE_CHIP).bound
    index = context.capabilities.splits.index(Split(*split_of(plan)))
    return spent_ms + turn_ms + prediction.colocated_ms[index] * monitor.ring(index).bound


@given(
    batch=st.integers(1, 300),
    context=st.integers(1, 4000),
    qos_ms=st.floats(5.0, 80.0),
    elapsed_ms=st.sampled_from([0.0, 3.0, 30.0]),
    in_flight=st.sampled_from([(0, 0.0), (132, 1.5), (96, 2.0)]),
    margin=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_hybrid_keeps_its_bound_within_the_margin(
    context_of: Any,
    view_of: Any,
    batch: int,
    context: int,
    qos_ms: float,
    elapsed_ms: float,
    in_flight: tuple[int, float],
    margin: float,
) -> None:
    """Turn plus the quantile of decode stay within target * (1 - margin), or finetuning has neither turn nor SMs."""
    policy_context = context_of(qos_ms=qos_ms)
    job = {"in_flight_sms": in_flight[0], "in_flight_ms": in_flight[1]}
    view = view_of(batch, batch * context, job=job, elapsed_ms=elapsed_ms)
    plan = Hybrid(policy_context, margin=margin, quantile=0.99, hold_steps=16).plan(view)
    if plan.jobs[0].sms or plan.jobs[0].turn_ms:
        bound_ms = hybrid_bound_ms(policy_context, view, plan, 0.99)
        assert bound_ms <= qos_ms * (1.0 - margin) + 1e-9
        assert bound_ms == pytest.approx(qos_ms * (1.0 - margin)), "the turn takes all that is left"


@given(batch=st.integers(1, 300), context=st.integers(1, 4000), qos_ms=st.floats(5.0, 80.0))
def test_hybrid_finetunes_whenever_decode_alone_fits(
    context_of: Any, view_of: Any, batch: int, context: int, qos_ms: float
) -> None:
    """Turns on the whole chip are possible where decode's bound leaves time; it pauses only where it does not."""
    policy_context = context_of(qos_ms=qos_ms)
    view = view_of(batch, batch * context)
    plan = Hybrid(policy_context, margin=0.0, quantile=0.99, hold_steps=16).plan(view)
    alone = StepPlan(132, (), Hold(16, None))
    fits = hybrid_bound_ms(policy_context, view, alone, 0.99) < qos_ms
    assert (plan.jobs[0].sms > 0 or plan.jobs[0].turn_ms > 0.0) >= fits


def test_hybrid_does_better_than_sharing_or_turns_alone(context_of: Any, view_of: Any) -> None:
    """At a loose target it takes both: a split, and a turn of most of the step."""
    plan = Hybrid(context_of(qos_ms=40.0)).plan(view_of(8))
    assert plan.jobs[0].sms > 0
    assert plan.jobs[0].turn_ms > 10.0


def test_hybrid_leaves_a_split_whose_units_take_longer_than_predicted(context_of: Any, view_of: Any) -> None:
    """What units really take beside decode counts for the choice between splits, and only there."""
    policy = Hybrid(context_of(qos_ms=40.0))
    first = policy.plan(view_of(16))
    assert first.jobs[0].sms > 0
    for _ in range(60):
        decode_ms = (first.predicted_ms or 0.0) - first.jobs[0].turn_ms
        policy.observe(dataclasses.replace(result_of(decode_ms), batch=16, kv_tokens=16_000, unit_ratio=1.5))
    second = policy.plan(view_of(16))
    assert split_of(second) != split_of(first)
    assert second.jobs[0].turn_ms > 0.0


def test_hybrid_stands_back_while_requests_wait(context_of: Any, view_of: Any) -> None:
    """Requests that could not be admitted: decode gets the whole chip until they are in."""
    plan = Hybrid(context_of()).plan(view_of(8, waiting=3, waiting_tokens=900))
    assert (split_of(plan), plan.jobs[0].turn_ms) == ((132, 0), 0.0)


def test_hybrid_idles_within_reach_of_the_target(context_of: Any, view_of: Any) -> None:
    """All SMs at a loose target; at a tight one no more than decode can begin beside at once."""
    assert Hybrid(context_of(qos_ms=40.0)).plan(view_of(0)).jobs[0].sms == 132
    tight = context_of(qos_ms=7.5)
    idle_sms = Hybrid(tight).plan(view_of(0)).jobs[0].sms
    splits = {split.finetune_sms: index for index, split in enumerate(tight.capabilities.splits)}
    assert idle_sms in splits
    bound_ms = tight.predictor.predict(1, 1).colocated_ms[splits[idle_sms]] * LatencyMonitor(tight, 0.995).ring(0).bound
    assert bound_ms <= 7.5


def test_hybrid_asks_again_after_a_step_that_began_late(context_of: Any, view_of: Any) -> None:
    """Time that has passed before a step is of that step only, so such a plan holds for one."""
    assert Hybrid(context_of(), hold_steps=16).plan(view_of(8)).hold.steps == 16
    view = view_of(8, elapsed_ms=5.0)
    late = Hybrid(context_of(), quantile=0.99, margin=0.0).plan(view)
    assert late.hold == Hold(1, 40.0)
    assert hybrid_bound_ms(context_of(), view, late, 0.99) == pytest.approx(40.0)


def test_hybrid_pauses_after_a_step_over_target(context_of: Any, view_of: Any) -> None:
    """One slow step: no turns and no SMs until the pause is over."""
    policy = Hybrid(context_of(qos_ms=40.0))
    policy.plan(view_of(8))
    policy.observe(result_of(40.5))
    plan = policy.plan(view_of(8))
    assert (split_of(plan), plan.jobs[0].turn_ms) == ((132, 0), 0.0)


# -- the fixed ones ---------------------------------------------------------------------------------------------------


def test_static_split_is_the_nearest_to_sixty_forty(context_of: Any, view_of: Any) -> None:
    """On 132 SMs 79.2 are wanted: 84 + 48, busy or idle."""
    policy = StaticSplit(context_of())
    for batch in (0, 1, 300):
        assert split_of(policy.plan(view_of(batch))) == (84, 48)


@pytest.mark.parametrize(("share", "expected"), [(0.1, (20, 112)), (0.5, (68, 64)), (0.9, (116, 16)), (0.65, (84, 48))])
def test_static_split_for_other_shares(share: float, expected: tuple[int, int], context_of: Any, view_of: Any) -> None:
    """Any share: the nearest split that exists."""
    assert split_of(StaticSplit(context_of(), inference_share=share).plan(view_of(8))) == expected


def test_static_split_divides_memory_too(context_of: Any, view_of: Any) -> None:
    """40 % of the rows at most: a job that wants more does without, whatever KV needs."""
    policy = StaticSplit(context_of())
    assert policy.plan(view_of(8, job={"rows_wanted": 500})).jobs[0].rows == round(0.4 * 886)
    assert policy.plan(view_of(8, job={"rows_wanted": 135})).jobs[0].rows == 135
    two = policy.plan(view_of(8, job={"rows_wanted": 300}, jobs=2)).jobs
    assert [job.rows for job in two] == [300, round(0.4 * 886) - 300]


@pytest.mark.parametrize(("batch", "expected"), [(31, (68, 64)), (32, (132, 0)), (33, (132, 0))])
def test_pause_on_load_at_its_threshold(batch: int, expected: tuple[int, int], context_of: Any, view_of: Any) -> None:
    """Half and half below 32 requests, nothing from 32 on."""
    assert split_of(PauseOnLoad(context_of()).plan(view_of(batch))) == expected


def test_pause_on_load_with_another_threshold(context_of: Any, view_of: Any) -> None:
    """The threshold is an option; an idle GPU finetunes on all SMs."""
    policy = PauseOnLoad(context_of(), threshold=2)
    assert [split_of(policy.plan(view_of(batch)))[1] for batch in (0, 1, 2)] == [132, 64, 0]


def test_inference_only_never_finetunes(context_of: Any, view_of: Any) -> None:
    """The whole chip to decode, no job anywhere."""
    policy = InferenceOnly(context_of())
    assert (policy.serves, policy.finetunes) == (True, False)
    plan = policy.plan(view_of(300, jobs=0))
    assert (plan.decode_sms, plan.jobs) == (132, ())


# -- separate ---------------------------------------------------------------------------------------------------------


def test_separate_divides_the_gpus(context_of: Any) -> None:
    """The first ones serve, the others finetune, none does both."""
    policies = [Separate(context_of(instance=instance, gpus=4), serving_gpus=3) for instance in range(4)]
    assert [policy.serves for policy in policies] == [True, True, True, False]
    assert [policy.finetunes for policy in policies] == [False, False, False, True]


def test_separate_gives_each_the_whole_chip(context_of: Any, view_of: Any) -> None:
    """Serving: all SMs and no job. Finetuning: all SMs and all rows that the job wants."""
    serving, finetuning = (Separate(context_of(instance=instance), serving_gpus=1) for instance in range(2))
    assert split_of(serving.plan(view_of(8, jobs=0))) == (132, 0)
    plan = finetuning.plan(view_of(0))
    assert (plan.jobs[0].sms, plan.jobs[0].rows) == (132, 135)


@pytest.mark.parametrize("serving_gpus", [0, -1, 3, 1.5, True])
def test_separate_needs_gpus_that_exist(serving_gpus: float, context_of: Any) -> None:
    """More than there are, none, or a part of one: an error that names the option and the value."""
    with pytest.raises(ConfigError, match=f"serving_gpus.* {serving_gpus}"):
        Separate(context_of(gpus=2), serving_gpus=serving_gpus)  # type: ignore[arg-type]


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "name", "value"),
    [
        (Harli, "hold_steps", 0),
        (Harli, "hold_steps", 2.5),
        (Hybrid, "quantile", 1.5),
        (Harli, "hysteresis", "much"),
        (Hybrid, "margin", -0.1),
        (Hybrid, "margin", float("nan")),
        (Hybrid, "hold_steps", True),
        (Hybrid, "quantile", -0.5),
        (StaticSplit, "inference_share", 1.5),
        (PauseOnLoad, "threshold", -1),
        (PauseOnLoad, "threshold", 2.5),
    ],
)
def test_options_out_of_range_are_refused(policy: Any, name: str, value: object, context_of: Any) -> None:
    """An error that names the option and its value, before the first step."""
    with pytest.raises(ConfigError, match=f"{name} = {value!r}"):
        policy(context_of(), **{name: value})
