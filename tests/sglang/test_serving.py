"""SGLang's own scheduler on the unified pool, with real finetuning between and beside its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harli_core.errors import ConfigError
from tests.sglang import scenes

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang and transformers warn about much on a CPU


@pytest.fixture(scope="session")
def expected(model: tuple[Path, dict[str, Any]]) -> Any:
    """Greedy tokens of plain transformers."""
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained(model[0], dtype=torch.float32)

    def tokens(prompt: list[int], count: int) -> list[int]:
        ids = plain.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found: list[int] = ids[0, len(prompt) :].tolist()
        return found

    return tokens


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


def test_draining_finishes_what_arrived_and_takes_no_more(instance: Any) -> None:
    """After `drain`, running requests get all their tokens; requests that have not arrived never do."""
    given = scenes.prompts(6, 256, 20, seed=4)

    def drain(loop: Any) -> None:
        if loop._step == 3:
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
