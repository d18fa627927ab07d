"""SGLang's own scheduler on the unified pool, with real finetuning between and beside its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cuda.serving import interleaving, turn
from backends.cuda.serving.graph_start import GraphStart
from harli_core.errors import ConfigError
from harli_core.types import Hold
from tests.sglang import scenes

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang and transformers warn about much on a CPU


def churn(instance: Any, *, finetunes: bool = True) -> scenes.Scripted:
    """All splits and turns, a window that comes and goes."""
    return scenes.Scripted(instance.predictor, scenes.CHURN, finetunes=finetunes)


@pytest.mark.parametrize("shared", [False, True])
def test_tokens_do_not_change_with_finetuning_beside_them(
    instance: Any, model: tuple[Path, dict[str, Any]], expected: Any, shared: bool
) -> None:
    """Through lending, reclaiming and compaction, every request gets the tokens that transformers gives it."""
    instance.add_job(scenes.job_of(model[1], 32, shared=shared))
    given = scenes.prompts(12, 256, 60)
    served = scenes.serve(
        instance, churn(instance), given, 24, gap_s=0.01, each_step=lambda _loop: instance.decoder.check_integrity()
    )
    assert instance.job.pump.failure is None
    assert instance.job.pump.launched > 20
    assert served.tokens == {index: expected(ids, 24) for index, ids in enumerate(given)}
    assert shared or instance.job.memory.reclaimed_total > 0


def test_compaction_moves_live_tokens_and_nobody_notices(instance: Any, expected: Any) -> None:
    """Tokens of running requests are copied into lower rows in the middle of decoding."""
    given = scenes.prompts(8, 256, 60, seed=1)
    moved = []

    def compact(_loop: Any) -> None:
        held = instance.decoder.running
        if len(held) > 2:
            compaction = instance.decoder.compact(3)
            moved.append(0 if compaction is None else len(compaction.source))

    long_and_short = [5 if index % 2 else 40 for index in range(8)]
    for index, ids in enumerate(given):
        instance.decoder.submit(index, ids, long_and_short[index], 0.0)
    served = {}
    requests = dict(instance.decoder._served)
    while not instance.decoder.idle:
        instance.decoder.admit(lambda: None)
        instance.decoder.take_prefilled(0.0)
        if instance.decoder.running and instance.decoder.launch(0):
            instance.decoder.finish(0.0)
            compact(None)
    served = {int(name): entry.tokens for name, entry in requests.items()}
    assert sum(moved) > 0
    assert served == {index: expected(ids, long_and_short[index]) for index, ids in enumerate(given)}
    instance.decoder.check_idle()


def test_leak_check_of_sglang_is_on_and_sees_a_leak(instance: Any) -> None:
    """A slot that nobody gives back is found by SGLang's own check of an idle server."""
    instance.decoder.check_idle()
    slots = instance.decoder.memory.allocator.slots
    lost = slots.allocate(1)
    try:
        with pytest.raises(Exception, match="leak"):
            instance.decoder.check_idle()
    finally:
        slots.free(lost)
    instance.decoder.check_idle()


@pytest.mark.parametrize("fault", ["unit raises", "out of memory", "NaN"])
def test_a_failing_job_never_reaches_the_requests(
    instance: Any, model: tuple[Path, dict[str, Any]], expected: Any, fault: str
) -> None:
    """The job stops with the reason, its rows come back, and every request gets its tokens."""
    instance.add_job(scenes.job_of(model[1], 32))
    assert instance.job.memory.rows_held > 0
    strike = {
        "unit raises": scenes.unit_raises,
        "out of memory": scenes.out_of_memory,
        "NaN": lambda: scenes.nan_in_adapter(instance),
    }[fault]
    instance.job.pump.work = scenes.FaultyWork(instance.engine, 6, strike)
    given = scenes.prompts(6, 256, 40, seed=2)
    served = scenes.serve(instance, churn(instance), given, 30)
    for _ in range(10):
        instance.job.memory.poll(0.0)
    assert served.tokens == {index: expected(ids, 30) for index, ids in enumerate(given)}
    assert instance.job.pump.failure
    assert {"unit raises": "a unit failed", "out of memory": "out of memory", "NaN": "is nan"}[fault] in (
        instance.job.pump.failure
    )
    assert instance.decoder.memory.allocator.view().rows_lent == 0


def test_a_policy_without_finetuning_has_the_rows_that_one_before_it_lent(
    instance: Any, model: tuple[Path, dict[str, Any]]
) -> None:
    """The job stands still, with its smallest window; it grows again under a policy that finetunes."""
    instance.add_job(scenes.job_of(model[1], 32))
    memory, given, held = instance.job.memory, scenes.prompts(3, 256, 40, seed=5), []
    for finetunes in (True, False, True):
        policy = scenes.Scripted(instance.predictor, [(3, 2.0, 1.0)], finetunes=finetunes)
        scenes.serve(instance, policy, given, 6, each_step=lambda _: held.append(memory.rows_held))
        held.append(memory.rows_held)
    assert sorted(set(held)) == [memory.needs.rows_floor, memory.needs.rows_wanted]
    third = len(held) // 3
    assert set(held[third : 2 * third]) == {memory.needs.rows_floor}
    assert held[third - 1] == held[-1] == memory.needs.rows_wanted


def test_books_of_a_run_add_up(instance: Any, model: tuple[Path, dict[str, Any]]) -> None:
    """Steps emit what requests have, first tokens come from prefill, and every step lies under a plan with its view."""
    instance.add_job(scenes.job_of(model[1], 32))
    given = scenes.prompts(9, 256, 40, seed=3)
    served = scenes.serve(instance, churn(instance), given, 12, gap_s=0.005)
    emitted = int(np.dot(served.steps.span_column("batch"), served.steps.span_steps()))
    assert emitted + len(given) == int(served.requests.produced_tokens.sum()) == 12 * len(given)
    results = [result for result in served.policy.results if result.latency_ms]
    assert sum(len(result.latency_ms) for result in results) == len(served.steps)
    firsts = [result.first_step for result in results]
    assert firsts == list(np.cumsum([0, *(len(result.latency_ms) for result in results)])[:-1] + firsts[0])
    assert all(len(result.latency_ms) <= 2 for result in results)


class Behind:
    """Where a decode step goes that is over 15 ms after it began, as on a GPU; units are done when they return."""

    STEP_MS = 15.0

    def __init__(self, instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes the place of the decoder's stream."""
        self._decoder, self._timeline = instance.decoder, instance.timeline
        self.waited = 0
        monkeypatch.setattr(self._decoder, "stream", self)
        monkeypatch.setattr(self._timeline, "mark", self._mark)
        monkeypatch.setattr(self._timeline, "passed", lambda mark: mark <= self._timeline.now_ms())

    def _mark(self, stream: Any) -> float:
        """The mark behind a step lies ahead; every other one has passed."""
        now_ms = float(self._timeline.now_ms())
        return max(now_ms, self._decoder._start.began_ms + self.STEP_MS) if stream is self else now_ms

    def wait_event(self, _mark: Any) -> None:
        """Units are over already."""
        self.waited += 1


def test_turns_are_begun_before_the_emission_where_the_plan_goes_on(
    instance: Any, model: tuple[Path, dict[str, Any]], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens stay the same, steps are counted as before, and most turns begin while the step before them runs."""
    instance.add_job(scenes.job_of(model[1], 32))
    behind = Behind(instance, monkeypatch)
    begun = []

    def goes_first(_pump: Any, _sms: int, decode: Any) -> bool:
        begins = bool(decode.due_ms - instance.timeline.now_ms() < 1.9)  # within the lead, so that the turn is begun
        if begins:
            begun.append(behind)
        return begins

    monkeypatch.setattr(interleaving, "goes_first", goes_first)
    monkeypatch.setattr(turn.Lead, "ms", 2.0)
    given = scenes.prompts(6, 256, 40, seed=4)
    policy = scenes.Scripted(instance.predictor, [(None, 30.0, 1.0)], finetunes=True, hold=8)
    served = scenes.serve(instance, policy, given, 24)
    assert served.tokens == {index: expected(ids, 24) for index, ids in enumerate(given)}
    assert len(begun) > len(served.steps) // 2
    assert instance.job.pump.failure is None
    assert instance.job.pump.launched > len(begun)
    emitted = int(np.dot(served.steps.span_column("batch"), served.steps.span_steps()))
    assert emitted + len(given) == int(served.requests.produced_tokens.sum())


def test_only_the_graph_waits_for_a_unit(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang prepares the step first; then the graph's stream waits, the start is marked, and the graph is replayed."""
    seen: list[str] = []

    class Graphs:
        def replay(self, key: str) -> str:
            seen.append(f"graph {key}")
            return key

    class Stream:
        def wait_event(self, mark: str) -> None:
            seen.append(f"wait for {mark}")

    def mark(_stream: Any) -> float:
        seen.append("mark")
        return float(len(seen))

    monkeypatch.setattr(instance.timeline, "mark", mark)
    graphs = Graphs()
    start = GraphStart(instance.timeline, Stream(), graphs)
    start.before("a unit")
    seen.append("prepare")
    assert graphs.replay("8") == "8"
    assert seen == ["mark", "prepare", "wait for a unit", "mark", "graph 8"]
    assert start.begin == 4.0
    start.before(None)
    graphs.replay("8")
    assert seen[5:] == ["mark", "mark", "graph 8"]


def test_a_plan_outlives_joins_and_leaves_within_its_bounds(instance: Any, expected: Any) -> None:
    """One plan for all batches that its hold covers, with a result for each batch, and the right tokens."""
    instance.remove_job()
    given = scenes.prompts(5, 256, 20, seed=5)
    policy = scenes.Holding(Hold(1000, None, (1, 8)))
    served = scenes.serve(instance, policy, given, 12, gap_s=0.02)
    assert served.tokens == {index: expected(ids, 12) for index, ids in enumerate(given)}
    steps = [result for result in policy.results if result.latency_ms]
    batches = [result.batch for result in steps]
    assert len(steps) > sum(view.batch > 0 for view in policy.views)
    assert max(batches) > 1
    assert len(set(batches)) > 1
    assert sum(result.batch * len(result.latency_ms) for result in steps) == 5 * 11
    predicted = np.isfinite(served.steps.span_column("predicted_ms"))
    assert not predicted.any()


def test_time_of_the_host_between_steps_is_no_elapsed_time(instance: Any) -> None:
    """A view says that time of the coming step is gone only after a wait, a turn or a prefill; else plans would be short."""
    instance.remove_job()
    given = [[7] * 10 for _ in range(4)]
    prefilled = scenes.Holding(Hold(1, None))
    scenes.serve(instance, prefilled, given, 5)
    assert [view.elapsed_ms > 0.0 for view in prefilled.views if view.batch] == [True, False, False, False]
    instance.decoder.prefill = "elsewhere"
    try:
        arrived = scenes.Holding(Hold(1, None))
        scenes.serve(instance, arrived, given, 5, gap_s=0.02)
    finally:
        instance.decoder.prefill = "local"
    assert len(arrived.views) > 4
    assert all(view.elapsed_ms == 0.0 for view in arrived.views)


@pytest.mark.parametrize(
    ("hold", "most"),
    [
        (Hold(1000, None), "one batch"),
        (Hold(1000, None, (1, 2)), "two requests"),
        (Hold(1000, None, (1, 8), 40), "40 tokens"),
        (Hold(3, None, (1, 8)), "three steps"),
    ],
)
def test_a_plan_ends_where_its_hold_does(instance: Any, hold: Hold, most: str) -> None:
    """At another batch, outside the bounds, above the tokens, after the steps: a step beyond any of them has a new plan."""
    instance.remove_job()
    given = [[7] * 10 for _ in range(4)]
    policy = scenes.Holding(hold)
    scenes.serve(instance, policy, given, 10, gap_s=0.03)
    plans = {view.step: view for view in policy.views if view.batch}
    view, done = None, 0
    for result in (result for result in policy.results if result.latency_ms):
        if result.first_step in plans:
            view, done = plans[result.first_step], 0
        assert view is not None
        held_kv = result.kv_tokens + result.batch * (len(result.latency_ms) - 1)
        if result.batch != view.batch:
            assert hold.covers(result.batch, held_kv), most
        elif hold.most_kv_tokens is not None and done + len(result.latency_ms) > 1:
            assert held_kv <= hold.most_kv_tokens, most
        done += len(result.latency_ms)
        assert done <= hold.steps, most


def test_draining_finishes_what_arrived_and_takes_no_more(instance: Any) -> None:
    """After `drain`, running requests get all their tokens; requests that have not arrived never do."""
    given = scenes.prompts(6, 256, 20, seed=4)

    def drain(loop: Any) -> None:
        if loop.plans.step == 3:
            loop.drain()

    arrivals_apart_s = 1000.0
    policy = churn(instance, finetunes=False)
    served = scenes.serve(instance, policy, given, 10, gap_s=arrivals_apart_s, each_step=drain)
    assert list(served.tokens) == [0]
    assert len(served.tokens[0]) == 10


def test_request_that_cannot_fit_is_rejected_with_the_reason(instance: Any) -> None:
    """More tokens than slots: refused at arrival, the others are served."""
    given = [[5] * 10, [5] * 20]
    policy = churn(instance, finetunes=False)
    specs_tokens = 5000
    with pytest.raises(ConfigError, match="context"):
        instance.decoder.submit(0, given[0], specs_tokens, 0.0)
    served = scenes.serve(instance, policy, given, 4)
    assert sorted(served.tokens) == [0, 1]
