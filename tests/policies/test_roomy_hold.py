"""How much more load a plan is made for, and when `hybrid` takes less room for a longer turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harli_core.policy import PolicyContext
from harli_core.predict.predictor import StepPredictor
from harli_core.predict.solo import launched_batch
from harli_core.qos.roomy_hold import JOINING_TOKENS, ROOMY, SNUG, RoomyHold
from policies.hybrid import Hybrid


@pytest.mark.parametrize(
    ("batch", "graph_batches", "slack", "batches"),
    [
        (60, (), ROOMY, (45, 75)),
        (60, (), SNUG, (57, 63)),
        (3, (), ROOMY, (1, 5)),
        (3, (), SNUG, (2, 4)),
        (60, (48, 66, 80), ROOMY, (45, 66)),
        (60, (48, 65, 80), ROOMY, (45, 65)),
        (60, (48, 64, 80), ROOMY, (45, 75)),  # four more are less than a third of fifteen
        (60, (48, 61, 80), SNUG, (57, 61)),
        (60, (48, 64, 80), SNUG, (57, 63)),
        (300, (128, 256), ROOMY, (225, 375)),
    ],
)
def test_room_ends_with_a_decode_graph(
    view_of: Any, batch: int, graph_batches: Sequence[int], slack: tuple[int, int], batches: tuple[int, int]
) -> None:
    """Where a size lies within the slack and leaves some of it; memory for those who may join is counted."""
    view = view_of(batch, batch * 100)
    room = RoomyHold.of(view, 64, 40.0, graph_batches, slack)
    assert room.hold.batches == batches
    assert room.batch == batches[1]
    assert room.kv_tokens == view.kv_tokens + (room.batch - batch) * JOINING_TOKENS + 64 * room.batch
    assert room.hold.most_kv_tokens == room.kv_tokens


SIZES = st.lists(st.integers(1, 400), max_size=14, unique=True).map(sorted)


@given(st.integers(1, 600), st.integers(0, 8000), st.integers(1, 200), SIZES, st.sampled_from((ROOMY, SNUG)))
def test_the_heaviest_step_is_at_least_every_step_that_the_hold_allows(
    view_of: Any, batch: int, context_tokens: int, steps: int, graph_batches: list[int], slack: tuple[int, int]
) -> None:
    """Whatever the sizes of decode graphs: the batch as it is may stay, and no batch of the hold runs a larger graph."""
    view = view_of(batch, batch * context_tokens)
    room = RoomyHold.of(view, steps, 40.0, graph_batches, slack)
    assert room.hold.batches is not None
    least, most = room.hold.batches
    assert 1 <= least <= batch < most == room.batch <= batch + max(slack[1], batch // slack[0])
    assert room.hold.covers(batch, view.kv_tokens + steps * batch)
    heaviest = launched_batch(room.batch, graph_batches)
    assert all(launched_batch(allowed, graph_batches) <= heaviest for allowed in range(least, most + 1))


def test_hybrid_takes_less_room_where_that_is_better_by_its_hysteresis(context_of: Any, view_of: Any) -> None:
    """A batch of 60 keeps a quarter of room in reserve only for a policy that asks much for less."""
    view = view_of(60, 66_000)
    assert Hybrid(context_of(), hysteresis=0.0).plan(view).hold.batches == (57, 63)
    assert Hybrid(context_of(), hysteresis=0.5).plan(view).hold.batches == (45, 75)


def test_hybrid_sees_the_sizes_of_decode_graphs(context_of: Any, view_of: Any) -> None:
    """With graphs of 56 and 200 requests one request more than 56 is not planned for as if it were another size."""
    context: PolicyContext = context_of()
    profile = dataclasses.replace(context.predictor.profile, graph_batches=(56, 200))
    padded = dataclasses.replace(context, predictor=StepPredictor(profile))
    hold = Hybrid(padded, hysteresis=0.5).plan(view_of(50, 50_000)).hold
    assert hold.batches == (38, 56)
