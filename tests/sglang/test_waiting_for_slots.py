"""Where slots run out: who waits for them, who comes back, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harli_core.types import Hold
from tests.sglang import scenes

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang and transformers warn about much on a CPU


def test_requests_that_lose_their_slots_come_back(instance: Any, expected: Any) -> None:
    """Slots run out in the middle: SGLang sends some back and prefills them again; all get their tokens, books add up."""
    instance.remove_job()
    given = scenes.prompts(6, 256, 40, seed=6)
    slots, taken = instance.decoder.memory.allocator.slots, []

    def squeeze(loop: Any) -> None:
        if loop.plans.step == 10:
            taken.append(slots.allocate(slots.free_tokens - 3))
        elif taken and instance.decoder.waiting:
            slots.free(taken.pop())

    served = scenes.serve(instance, scenes.Holding(Hold(64, None, (1, 8))), given, 30, each_step=squeeze)
    assert not taken
    assert int(served.requests.preemptions.sum()) > 0
    assert served.tokens == {index: expected(ids, 30) for index, ids in enumerate(given)}
    emitted = int(np.dot(served.steps.span_column("batch"), served.steps.span_steps()))
    assert emitted + served.loop.prefilled_tokens == int(served.requests.produced_tokens.sum()) == 6 * 30


def test_the_only_request_waits_for_slots_instead_of_being_given_up(instance: Any, expected: Any) -> None:
    """Where not even one request has a slot left, SGLang would drop it; here it waits, as slots come back from a job."""
    instance.remove_job()
    given = scenes.prompts(1, 256, 40, seed=7)
    slots, taken = instance.decoder.memory.allocator.slots, []
    enqueue = instance.decoder.scheduler._add_request_to_queue

    def squeeze(loop: Any) -> None:
        if loop.plans.step == 10:
            taken.append(slots.allocate(slots.free_tokens))

    def enqueue_and_free(*arguments: Any, **options: Any) -> None:
        enqueue(*arguments, **options)
        if taken:
            slots.free(taken.pop())

    instance.decoder.scheduler._add_request_to_queue = enqueue_and_free
    try:
        served = scenes.serve(
            instance, scenes.Holding(Hold(64, None, (1, 8))), given, 30, each_step=squeeze, horizon_s=10.0
        )
    finally:
        del instance.decoder.scheduler._add_request_to_queue
    assert not taken
    assert served.tokens == {0: expected(given[0], 30)}
    assert served.requests.preemptions.tolist() == [1]
    emitted = int(np.dot(served.steps.span_column("batch"), served.steps.span_steps()))
    assert emitted + served.loop.prefilled_tokens == int(served.requests.produced_tokens.sum()) == 30


def test_who_waits_for_slots_joins_when_rows_come_back(instance: Any) -> None:
    """While another request decodes, and not only when that one leaves."""
    instance.remove_job()
    decoder = instance.decoder
    slots = decoder.memory.allocator.slots
    decoder.submit(0, [5] * 20, 20, 0.0)
    assert decoder.admit(lambda: None)
    taken = slots.allocate(slots.free_tokens - 25)
    try:
        decoder.submit(1, [6] * 40, 10, 0.0)
        assert decoder.admit(lambda: None)
        assert (len(decoder.running), len(decoder.waiting)) == (1, 1)
    finally:
        slots.free(taken)
    decoder.totals_changed()
    assert decoder.admit(lambda: None)
    assert (len(decoder.running), len(decoder.waiting)) == (2, 0)
    while not decoder.idle:
        decoder.admit(lambda: None)
        decoder.take_prefilled(0.0)
        if decoder.running and decoder.launch(0):
            decoder.finish(0.0)
    decoder.check_idle()
