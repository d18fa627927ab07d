"""What each request holds in each row is what handing out slots token by token gives it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sim import running_batch
from backends.sim.request import SimRequest
from backends.sim.running_batch import RunningBatch
from harli_core.errors import AuditError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.row_tokens import RowTokens
from harli_core.memory.token_slots import TokenSlots
from harli_core.records import RequestBook
from harli_core.requests import RequestSpec

GRID = GridGeometry(row_tokens=8, columns=2, rows=12)


def request(index: int, prompt: int, output: int) -> SimRequest:
    """A request of ``prompt`` tokens that wants ``output``."""
    return SimRequest.of(RequestSpec(index, 0.0, prompt, output))


def book(count: int) -> RequestBook:
    """Room for ``count`` requests."""
    return RequestBook(np.ones(count, dtype=np.int64), np.ones(count, dtype=np.int64))


class TokenByToken:
    """The plain model: one slot for each token, handed out step by step in the order of admission."""

    def __init__(self) -> None:
        """Nobody holds a slot."""
        self.slots = TokenSlots(GRID)
        self.held: dict[int, list[int]] = {}

    def by_row(self, index: int) -> dict[int, int]:
        """Row to tokens of request ``index``."""
        rows, counts = np.unique(np.array(self.held[index]) // GRID.row_tokens, return_counts=True)
        return dict(zip(rows.tolist(), counts.tolist(), strict=True))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=12),
    choices=st.lists(st.integers(0, 7), max_size=60),
    shortest_trail=st.booleans(),
)
def test_rows_are_those_of_single_slots(sizes: list[tuple[int, int]], choices: list[int], shortest_trail: bool) -> None:
    """Random admissions, runs of steps, preemptions and departures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_batch, "LONGEST_TRAIL", 0 if shortest_trail else 4096)
        batch, model = RunningBatch(RowTokens(GRID), book(len(sizes))), TokenByToken()
        waiting = [request(index, *size) for index, size in enumerate(sizes)]
        for choice in choices:
            if choice == 0 and batch.members:
                gone = batch.preempt()
                model.slots.free(np.array(model.held.pop(gone.spec.index), dtype=np.int32))
            elif choice <= 2 and waiting and model.slots.can_allocate(waiting[0].kv_tokens):
                new = waiting.pop(0)
                batch.admit(new)
                model.held[new.spec.index] = model.slots.allocate(new.kv_tokens).tolist()
            elif batch.members and batch.steps_left():
                steps = min(choice, batch.steps_left())
                members = [member.spec.index for member in batch.members]
                leaving = batch.emit([float(step) for step in range(steps)])
                for _ in range(steps):
                    for index in members:
                        model.held[index] += model.slots.allocate(1).tolist()
                for gone in leaving:
                    model.slots.free(np.array(model.held.pop(gone.spec.index), dtype=np.int32))
            batch.check_integrity()
            assert {member.spec.index: member.held for member in batch.members} == {
                index: model.by_row(index) for index in model.held
            }


def test_a_compaction_is_followed() -> None:
    """The tokens of an emptied row lie in the rows that took them."""
    tokens = RowTokens(GRID)
    batch = RunningBatch(tokens, book(3))
    for index, prompt in enumerate((7, 8, 3)):
        batch.admit(request(index, prompt, 5))
    batch.emit([1.0])
    batch.preempt()
    batch.rewrite(tokens.compact(1))
    batch.check_integrity()
    assert tokens.rows_in_use == 3


def test_books_that_disagree_are_told() -> None:
    """A token that no request holds is named with its row."""
    tokens = RowTokens(GRID)
    batch = RunningBatch(tokens, book(1))
    batch.admit(request(0, 7, 5))
    tokens.allocate(1)
    with pytest.raises(AuditError, match="requests hold 0 slots of row 1, 1 are counted"):
        batch.check_integrity()
