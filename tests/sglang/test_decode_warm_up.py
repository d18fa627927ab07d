"""Before anything is served requests were let in as they will be: alone, together, and beside others."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from backends.cuda.serving.decode_warm_up import warm_up_decoder
from backends.cuda.serving.host_stalls import HostStalls, Look

pytestmark = pytest.mark.filterwarnings("ignore")


def test_requests_are_let_in_one_by_one_and_several_at_a_time(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one token and more, with and without requests that decode already; nothing is left behind."""
    scheduler, seen = instance.decoder.scheduler, []
    run_batch = scheduler.run_batch

    def watched(batch: Any, *arguments: Any, **options: Any) -> Any:
        if batch.forward_mode.is_extend():
            seen.append((len(batch.reqs), sum(batch.extend_lens), len(scheduler.running_batch.reqs)))
        return run_batch(batch, *arguments, **options)

    monkeypatch.setattr(scheduler, "run_batch", watched)
    warm_up_decoder(instance.decoder, 1)
    assert {requests for requests, _, _ in seen} >= {1, 2, 3}
    assert {tokens % 16 == 0 for requests, tokens, _ in seen if requests == 1} == {True, False}
    assert {running > 0 for _, _, running in seen} == {True, False}
    assert instance.decoder.idle
    instance.decoder.check_idle()


def test_without_a_gpu_only_collections_are_counted() -> None:
    """No driver is asked and Triton is not even imported; what was before the look is left out."""
    stalls = HostStalls(on_gpu=False)
    gc.collect()
    before = stalls.look()
    assert before == Look(0, 0, len(stalls.collections_ms))
    assert before.collections > 0
    gc.collect()
    found = stalls.since(before)
    assert found["garbage_collections"] == 1
    assert found["longest_collection_ms"] > 0.0
    assert (found["driver_allocations"], found["kernels_made"]) == (0, [])


def test_kernels_that_triton_makes_are_named() -> None:
    """Those since the look, by what Triton calls them."""
    stalls = HostStalls(on_gpu=False)
    stalls._made(key="", repr="first", fn=None)
    before = Look(0, len(stalls.kernels), 0)
    stalls._made(repr="second")
    assert stalls.kernels[before.kernels :] == ["second"]
