"""Split choice, pacing, and how many rows a job may hold."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.memory.reservation import Reservation
from harli_core.qos.first_job import first_job_plan
from harli_core.qos.monitor import WHOLE_CHIP
from harli_core.qos.pacing import Pace, fastest
from harli_core.qos.residuals import ResidualRing
from harli_core.qos.rows import GROW_ROWS, rows_for
from harli_core.qos.split_choice import closest_below
from harli_core.types import Hold, JobPlan, JobView, MemoryView, StepPlan, StepView

RESERVATION = Reservation.measured(1024, 20.0, 10.0, 2048)
JOB = JobView("job-0", "forward", 1024, 50, 100, 20, 8, 32, 0, 0.0)


def view_with(
    free_rows: int, held: int = 50, batch: int = 0, waiting_tokens: int = 0, free_tokens: int = 0
) -> StepView:
    """A view in which ``free_rows`` rows hold no token and ``held`` are lent; ``free_tokens`` more lie in KV rows."""
    total = free_rows + held + 10
    tokens = free_rows * 1024 + free_tokens
    memory = MemoryView(1024, 1 << 27, total, 10, held, free_rows, 0, 5000, tokens, 0)
    return StepView(0, 0, 0.0, batch, 5000, 0, waiting_tokens, 0.0, memory, (dataclasses.replace(JOB, rows_held=held),))


def rows(view: StepView) -> int:
    """Target rows of the view's job."""
    return rows_for(view.jobs[0], view, RESERVATION)


# -- split choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted_ms", "expected"),
    [
        ([50.0, 39.0, 30.0], 1),
        ([41.0, 42.0], None),
        ([], None),
        ([40.0, 39.9], 0),
        ([10.0, 30.0, 20.0], 1),
        ([7.0, 7.0], 0),
    ],
)
def test_closest_below(predicted_ms: list[float], expected: int | None) -> None:
    """The largest that does not exceed 40; exactly 40 counts; of equals the first; None when all exceed it."""
    assert closest_below(predicted_ms, 40.0) == expected


@given(st.lists(st.floats(0.1, 100.0), max_size=10), st.floats(0.1, 100.0))
def test_no_split_fits_better(predicted_ms: list[float], target_ms: float) -> None:
    """Whatever is chosen fits, and nothing that fits is closer."""
    fitting = [ms for ms in predicted_ms if ms <= target_ms]
    choice = closest_below(predicted_ms, target_ms)
    assert (choice is None) == (not fitting)
    if choice is not None:
        assert predicted_ms[choice] == max(fitting)


# -- pacing -----------------------------------------------------------------------------------------------------------


def paced(expected_ms: float, bound_ms: float, budget_ms: float, alone_rate: float, beside_rate: float) -> Pace | None:
    """The pace of choice 3, the only one, predicted to take ``expected_ms`` and allowed for with ``bound_ms``."""
    ring = ResidualRing([1.0, bound_ms / expected_ms], quantile=1.0)
    ring.centre = 1.0
    return fastest([3], [ring], [expected_ms], [budget_ms], [beside_rate], alone_rate, last=WHOLE_CHIP, hysteresis=0.1)


def test_the_turn_is_what_the_bound_leaves() -> None:
    """A budget of 40 ms, decode of 10 ms that may take 12: a turn of 28 ms."""
    found = paced(10.0, 12.0, 40.0, alone_rate=0.5, beside_rate=0.25)
    assert found is not None
    assert (found.choice, found.turn_ms) == (3, 28.0)
    assert found.work_rate == pytest.approx((28.0 * 0.5 + 10.0 * 0.25) / 38.0)


def test_a_bound_over_budget_is_no_pace() -> None:
    """Even without a turn the step would be too long; exactly the budget is a turn of nothing."""
    assert paced(32.0, 40.001, 40.0, 1.0, 1.0) is None
    exact = paced(32.0, 40.0, 40.0, 1.0, 0.5)
    assert exact is not None
    assert (exact.turn_ms, exact.work_rate) == (0.0, 0.5)


@given(
    expected_ms=st.floats(1.0, 50.0),
    spread=st.floats(1.0, 1.5),
    budget_ms=st.floats(1.0, 200.0),
    rates=st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)),
)
def test_rate_is_a_mean_of_both_rates(
    expected_ms: float, spread: float, budget_ms: float, rates: tuple[float, float]
) -> None:
    """Turn and bound fill the budget; the work rate lies between the rates alone and beside decode."""
    found = paced(expected_ms, expected_ms * spread, budget_ms, *rates)
    if found is None:
        assert expected_ms * spread > budget_ms - 1e-9
        return
    assert found.turn_ms + expected_ms * spread == pytest.approx(budget_ms)
    assert min(rates) - 1e-9 <= found.work_rate <= max(rates) + 1e-9


@pytest.mark.parametrize(("last", "chosen"), [(WHOLE_CHIP, WHOLE_CHIP), (0, 0), (1, WHOLE_CHIP)])
def test_the_fastest_choice_replaces_the_last_by_more_than_the_hysteresis(last: int, chosen: int) -> None:
    """With equal steps the rates beside decode decide: the first choice is 5 % ahead of the second, the third is late."""
    ring = ResidualRing([], quantile=1.0)
    found = fastest(
        (WHOLE_CHIP, 0, 1), [ring] * 3, [20.0, 20.0, 50.0], [40.0] * 3, [1.1, 1.0, 9.0], 1.0, last, hysteresis=0.1
    )
    assert found is not None
    assert found.choice == chosen


# -- rows -------------------------------------------------------------------------------------------------------------


def test_kv_keeps_reservation_and_waiting_prompts() -> None:
    """Of 40 free and 50 lent rows: 2 tokens a request for 512 requests, 2,048 admission tokens, 4,096 waiting: 7 rows."""
    assert rows(view_with(40)) == 88
    assert rows(view_with(40, batch=512, waiting_tokens=4096)) == 83


def test_rows_give_way_at_once() -> None:
    """One row too many is given back, without hysteresis."""
    assert rows(view_with(2, held=50, waiting_tokens=1024)) == 49


@pytest.mark.parametrize(("gain", "expected"), [(1, 50), (GROW_ROWS - 1, 50), (GROW_ROWS, 50 + GROW_ROWS), (9, 59)])
def test_rows_grow_in_larger_steps(gain: int, expected: int) -> None:
    """A gain of less than `GROW_ROWS` rows is not worth the change."""
    assert rows(view_with(2 + gain)) == expected


def test_the_last_rows_to_the_wish_are_taken() -> None:
    """A job one row short of its wish gets it, though that is a small step."""
    assert rows(view_with(60, held=99)) == 100


def test_never_under_the_floor() -> None:
    """No room at all: the floor stays, KV must do with less."""
    assert rows(view_with(0, held=20, waiting_tokens=10**6)) == 20


def test_hysteresis_does_not_keep_a_job_under_its_floor() -> None:
    """A job that could not get its floor at once gets the rest of it, however few rows that is."""
    assert rows(view_with(0, held=19)) == 20


@given(
    free_rows=st.integers(0, 200),
    held=st.integers(0, 120),
    batch=st.integers(0, 400),
    waiting_tokens=st.integers(0, 200_000),
    free_tokens=st.integers(0, 5000),
)
def test_rows_lie_between_floor_and_wish(
    free_rows: int, held: int, batch: int, waiting_tokens: int, free_tokens: int
) -> None:
    """Any memory: the target is within the job's bounds, and above the floor only from tokens that KV can spare."""
    view = view_with(free_rows, held, batch, waiting_tokens, free_tokens)
    target = rows(view)
    assert JOB.rows_floor <= target <= JOB.rows_wanted
    if target > JOB.rows_floor:
        left = view.memory.free_tokens + (held - target) * 1024
        assert left >= RESERVATION.reserved_tokens(batch) + waiting_tokens


# -- plans of one job at a time ---------------------------------------------------------------------------------------


def test_the_first_job_gets_the_sms() -> None:
    """Of several jobs the first has SMs and turn; each keeps its rows."""
    jobs = (JOB, dataclasses.replace(JOB, job_id="job-1"))
    view = dataclasses.replace(view_with(10), jobs=jobs)
    plan = first_job_plan(view, [30, 40], Hold(2, None), 84, 48, 5.0, 33.0)
    expected = (JobPlan("job-0", 48, 5.0, 30), JobPlan("job-1", 0, 0.0, 40))
    assert plan == StepPlan(84, expected, Hold(2, None), 33.0)


def test_without_jobs_there_is_nothing_beside() -> None:
    """An empty view gives a plan without jobs."""
    view = dataclasses.replace(view_with(10), jobs=())
    assert first_job_plan(view, [], Hold(1, None), 132, 48).jobs == ()
