"""Whole runs on the measured device: what must hold whatever the policy does."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harli_core.errors import AuditError, ConfigError
from harli_core.memory.row_tokens import RowTokens
from harli_core.policy import PolicyContext
from harli_core.qos.first_job import first_job_plan
from harli_core.records import COMPLETED, REJECTED, SPAN_FIELDS, UNFINISHED, RequestBook, StepBook
from harli_core.types import Hold, StepPlan, StepResult, StepView
from policies import POLICIES
from policies.inference_only import InferenceOnly
from policies.static_split import StaticSplit

OPTIONS: dict[str, dict[str, Any]] = {"separate": {"serving_gpus": 1}}


@pytest.mark.parametrize("prefill_gpus", [0, 1])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_gets_its_tokens(policy: str, prefill_gpus: int, conversation: Any) -> None:
    """Under each policy, with and without prefill: all complete, in order of events, with exactly their tokens."""
    outcome = conversation(80, 8.0).simulate(policy, OPTIONS.get(policy, {}), gpus=2, prefill_gpus=prefill_gpus)
    book = outcome.requests
    assert (book.state == COMPLETED).all()
    assert np.array_equal(book.produced_tokens, book.output_tokens)
    assert (book.first_token_s > book.arrival_s).all()
    assert (book.last_token_s >= book.first_token_s).all()
    assert np.array_equal(book.last_token_s > book.first_token_s, book.output_tokens > 1)
    assert outcome.duration_s == pytest.approx(book.last_token_s.max())


@pytest.mark.parametrize("policy", ["hybrid", "harli", "static_split", "inference_only", "pause_on_load"])
@pytest.mark.parametrize(("arrivals", "output"), [([0.0], 1), ([0.0], 40), ([0.0, 0.1, 0.2], 1)])
def test_very_small_traces(policy: str, arrivals: list[float], output: int, requests_of: Any) -> None:
    """One request; one token; both, with prefill too."""
    count = len(arrivals)
    for prefill_gpus in (0, 1):
        outcome = requests_of(arrivals, [500] * count, [output] * count).simulate(policy, prefill_gpus=prefill_gpus)
        assert outcome.requests.produced_tokens.tolist() == [output] * count
        assert (outcome.requests.state == COMPLETED).all()


@pytest.mark.parametrize("policy", ["hybrid", "static_split", "inference_only"])
def test_step_latencies_add_up_to_the_time(policy: str, conversation: Any) -> None:
    """Busy and idle time of an instance are the whole run: no time is lost between steps, none counted twice."""
    outcome = conversation(60, 5.0).simulate(policy, prefill_gpus=1)
    steps = outcome.steps
    busy_s = np.frombuffer(steps.latency_ms).sum() / 1000.0
    assert busy_s + steps.idle_s == pytest.approx(outcome.duration_s, rel=1e-9)


def test_a_request_in_the_batch_sees_every_step(requests_of: Any) -> None:
    """First to last token of a lone request is the sum of the step latencies after the first."""
    outcome = requests_of([0.0], [300], [50]).simulate("hybrid")
    latency_ms = np.frombuffer(outcome.steps.latency_ms)
    book = outcome.requests
    assert len(latency_ms) == 50
    assert (book.last_token_s[0] - book.first_token_s[0]) * 1000.0 == pytest.approx(latency_ms[1:].sum())


# -- laying out ahead -------------------------------------------------------------------------------------------------


class FixedTurns:
    """Decode beside finetuning on 84 + 48 SMs after a turn of 8 ms, in spans of up to 64 steps."""

    serves = True
    finetunes = True

    def __init__(self, context: PolicyContext) -> None:
        """There is nothing to set."""

    def plan(self, view: StepView) -> StepPlan:
        """The same at every step; no more rows than the floor, so that the window stays small."""
        rows = [job.rows_floor for job in view.jobs]
        return first_job_plan(view, rows, Hold(64, None), 84, 48, 8.0)

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


def by_step(steps: StepBook) -> NDArray[np.float64]:
    """Step latencies in order of instance and step, whenever they were written down."""
    order = np.lexsort((steps.spread("first_step") + steps.step_within_span(), steps.spread("instance")))
    latency_ms: NDArray[np.float64] = np.frombuffer(steps.latency_ms)[order]
    return latency_ms


def asking_again(policy: Any, steps: int) -> type:
    """The same policy, asked again after ``steps`` steps at the latest."""

    class Impatient(policy):  # type: ignore[misc]
        """Asks more often."""

        def plan(self, view: StepView) -> StepPlan:
            """The same plan, held shorter."""
            plan: StepPlan = super().plan(view)
            return dataclasses.replace(plan, hold=Hold(steps, None))

    return Impatient


@pytest.mark.parametrize("policy", [InferenceOnly, StaticSplit, FixedTurns])
@pytest.mark.parametrize("steps", [1, 7])
def test_times_do_not_depend_on_how_far_ahead_was_laid_out(
    policy: type, steps: int, conversation: Any, policy_named: Any
) -> None:
    """Asked at every step or every 64: every token of every request comes at the same time, finetuning is as far."""
    outcomes = []
    for hold in (64, steps):
        name = policy_named(asking_again(policy, hold))
        outcomes.append(conversation(50, 12.0).simulate(name, gpus=2, prefill_gpus=1))
    ahead, single = outcomes
    for name in ("first_token_s", "last_token_s"):
        difference_s = np.abs(getattr(ahead.requests, name) - getattr(single.requests, name))
        assert difference_s.max() < 1e-9
    assert by_step(ahead.steps) == pytest.approx(by_step(single.steps), abs=1e-6)
    assert len(ahead.steps.span_steps()) < len(single.steps.span_steps())
    for one, other in zip(ahead.instances, single.instances, strict=True):
        assert (one.finetune_steps, one.swaps_in) == (other.finetune_steps, other.swaps_in)
        assert one.stall_s == pytest.approx(other.stall_s, abs=1e-6)


class TurnsOnlyWhileBusy(FixedTurns):
    """Nothing while idle, so that the first turn of all is laid out with an empty window."""

    def plan(self, view: StepView) -> StepPlan:
        """Turns before steps, a pause without."""
        plan = super().plan(view)
        return plan if view.batch else first_job_plan(view, [job.rows for job in plan.jobs], Hold(1, None), 132, 0)


def test_a_first_turn_can_be_taken_back(requests_of: Any, policy_named: Any) -> None:
    """An arrival cuts the very first steps, in which layers were already on their way."""
    outcome = requests_of([0.0, 0.03, 0.05], [100] * 3, [50] * 3).simulate(policy_named(TurnsOnlyWhileBusy))
    assert (outcome.requests.state == COMPLETED).all()
    assert outcome.instances[0].swaps_in > 0


# -- finetuning -------------------------------------------------------------------------------------------------------


def test_a_finetuning_gpu_runs_at_full_speed(requests_of: Any) -> None:
    """Tokens/s of the GPU that `separate` leaves to finetuning: one optimizer step of all units on all SMs."""
    scenario = requests_of([0.0, 250.0], [100, 100], [2, 2]).scenario(gpus=2)
    outcome, device = scenario.run("separate", {"serving_gpus": 1})
    layers, micro_batches = 32, 4
    passes_ms = micro_batches * layers * (device.unit_ms("forward", 132) + device.unit_ms("backward", 132))
    step_ms = passes_ms + micro_batches * device.unit_ms("head_loss", 132) + layers * device.unit_ms("optimizer", 132)
    tokens = sum(state.finetune_tokens for state in outcome.instances)
    assert tokens / outcome.duration_s == pytest.approx(4096 / (step_ms / 1000.0), rel=0.01)
    assert [state.hosts_job for state in outcome.instances] == [False, True]


def test_serving_gpus_of_separate_do_not_notice(conversation: Any) -> None:
    """One of two GPUs serves: its requests fare exactly as on a single GPU under `inference_only`."""
    apart = conversation(40, 5.0).simulate("separate", {"serving_gpus": 1}, gpus=2).requests
    alone = conversation(40, 5.0).simulate("inference_only", gpus=1).requests
    assert np.array_equal(apart.last_token_s, alone.last_token_s)


def test_sharing_weights_swaps_nothing(conversation: Any) -> None:
    """The served model's own weights: no swaps, and no less finetuning."""
    own, shared = (
        conversation(40, 5.0).simulate("hybrid", share_weights=share).instances[0] for share in (False, True)
    )
    assert (shared.swaps_in, shared.swapped_bytes, shared.stall_s) == (0, 0, 0.0)
    assert own.swaps_in == 32
    assert shared.finetune_tokens >= own.finetune_tokens


# -- horizon ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["hybrid", "static_split", "inference_only"])
@pytest.mark.parametrize("prefill_gpus", [0, 1])
@pytest.mark.parametrize("horizon_s", [0.001, 0.75, 3.3])
def test_a_horizon_leaves_requests_unfinished(
    policy: str, prefill_gpus: int, horizon_s: float, conversation: Any
) -> None:
    """The audit passes, every arrival is counted, what was produced by then is kept and nothing lies beyond."""
    outcome = conversation(80, 10.0).simulate(policy, horizon_s=horizon_s, prefill_gpus=prefill_gpus)
    book = outcome.requests
    arrived = np.isfinite(book.arrival_s)
    assert outcome.duration_s == pytest.approx(horizon_s)
    assert 0 < arrived.sum() < 80
    assert (book.arrival_s[arrived] <= horizon_s).all()
    unfinished = arrived & (book.state == UNFINISHED)
    assert unfinished.sum() > 0
    assert (book.produced_tokens[unfinished] < book.output_tokens[unfinished]).all()
    assert (book.produced_tokens[~arrived] == 0).all()
    assert np.nanmax([*book.last_token_s, 0.0]) <= horizon_s + 1e-9


def test_a_horizon_after_the_end_changes_nothing(conversation: Any) -> None:
    """The run ends with its last request anyway."""
    trace = conversation(10, 10.0)
    with_horizon, without = trace.simulate("hybrid", horizon_s=1000.0), trace.simulate("hybrid")
    assert with_horizon.duration_s == without.duration_s


def test_a_horizon_cuts_what_would_have_happened(conversation: Any) -> None:
    """Up to the horizon a run is the whole run."""
    trace = conversation(60, 10.0)
    cut, whole = trace.simulate("hybrid", horizon_s=3.0), trace.simulate("hybrid")
    done = cut.requests.state == COMPLETED
    assert 0 < done.sum() < 60
    assert np.array_equal(cut.requests.last_token_s[done], whole.requests.last_token_s[done])


# -- rejection --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["hybrid", "inference_only", "static_split"])
@pytest.mark.parametrize("prefill_gpus", [0, 1])
def test_a_request_larger_than_all_kv_is_refused_at_once(
    policy: str, prefill_gpus: int, requests_of: Any, record_list: Any
) -> None:
    """It is rejected as it arrives, with the reason; the others finish as if it had not been there."""
    config = {"memory_gb": 27.5, "prefill_gpus": prefill_gpus}
    arrivals, prompts, outputs = [0.0, 0.1, 0.2], [500, 60_000, 400], [60, 10, 60]
    sink = record_list()
    book = requests_of(arrivals, prompts, outputs).simulate(policy, {}, sink, **config).requests
    others = requests_of(arrivals[::2], prompts[::2], outputs[::2]).simulate(policy, **config).requests
    assert book.state.tolist() == [COMPLETED, REJECTED, COMPLETED]
    assert book.reasons.keys() == {1}
    assert book.reasons[1].startswith("prompt and output need more token slots than a decode instance has (")
    assert book.produced_tokens.tolist() == [60, 0, 60]
    assert book.last_token_s[[0, 2]].tolist() == others.last_token_s.tolist()
    assert all(record.view.waiting == 0 for record in sink.records)


def test_the_largest_request_that_fits_is_served(requests_of: Any) -> None:
    """Exactly all the slots but the pinned one: served. One token more: refused."""
    scenario = requests_of([0.0], [10], [1]).scenario(memory_gb=23.0)
    capacity = scenario.geometry.capacity_tokens - 1
    for prompt, state in ((capacity - 5, COMPLETED), (capacity - 4, REJECTED)):
        book = requests_of([0.0], [prompt], [5]).simulate("inference_only", memory_gb=23.0).requests
        assert book.state.tolist() == [state]


def test_only_refused_requests_make_a_run_too(requests_of: Any) -> None:
    """Nothing to do is no reason to wait for ever."""
    outcome = requests_of([0.0, 0.5], [10**6, 10**6], [10, 10]).simulate("hybrid")
    assert outcome.requests.state.tolist() == [REJECTED, REJECTED]
    assert len(outcome.steps) == 0


# -- roles ------------------------------------------------------------------------------------------------------------


class NeverServes(StaticSplit):
    """Finetunes everywhere."""

    serves = False


def test_somebody_must_serve(requests_of: Any, policy_named: Any) -> None:
    """A policy that serves on no instance is refused before the first step."""
    with pytest.raises(ConfigError, match="no instance serves"):
        requests_of([0.0], [10], [1]).simulate(policy_named(NeverServes))


def test_a_job_that_cannot_fit_is_refused(requests_of: Any) -> None:
    """A pool smaller than the least that finetuning needs: an error that says what to change."""
    with pytest.raises(ConfigError, match=r"needs 37 rows of 128 MiB, the pool has \d+; raise --memory-gb"):
        requests_of([0.0], [10], [1]).simulate("hybrid", memory_gb=26.0)


# -- audit ------------------------------------------------------------------------------------------------------------


def test_steps_that_emit_too_much_are_found(requests_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step book that counts one request more than there was does not pass."""
    place = [name for name, _ in SPAN_FIELDS].index("batch")
    add = StepBook.add

    def add_wrongly(self: StepBook, span: tuple[float, ...], *columns: Any) -> None:
        add(self, (*span[:place], span[place] + 1, *span[place + 1 :]), *columns)

    monkeypatch.setattr(StepBook, "add", add_wrongly)
    with pytest.raises(AuditError, match="audit: steps emitted"):
        requests_of([0.0], [10], [5]).simulate("inference_only")


def test_a_forgotten_reason_is_found(requests_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected without a reason does not pass."""

    def reject_silently(self: RequestBook, index: int, reason: str) -> None:
        self.state[index] = REJECTED

    monkeypatch.setattr(RequestBook, "reject", reject_silently)
    with pytest.raises(AuditError, match="1 requests rejected, 0 reasons given"):
        requests_of([0.0, 0.1], [10**6, 10], [5, 5]).simulate("inference_only")


def test_lost_tokens_are_found(requests_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that gives its slots up without freeing them does not pass."""
    monkeypatch.setattr(RowTokens, "free", lambda self, held: None)
    with pytest.raises(AuditError, match="requests hold 0 slots of row 0, 15 are counted"):
        requests_of([0.0], [10], [5]).simulate("inference_only")
