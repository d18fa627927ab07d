"""Counting tokens by row says of every row what the slots say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harli_core.errors import ConfigError, MemoryAccountingError
from harli_core.memory.compaction import plan_compaction
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.row_tokens import Pieces, RowTokens
from harli_core.memory.token_slots import Slots, TokenSlots

GRID = GridGeometry(row_tokens=4, columns=2, rows=6)


def pieces_of(slots: Slots) -> Pieces:
    """The rows that ``slots`` lie in."""
    rows, counts = np.unique(slots // GRID.row_tokens, return_counts=True)
    return list(zip(rows.tolist(), counts.tolist(), strict=True))


class RowTokensMachine(RuleBasedStateMachine):
    """Every call is made on both books."""

    def __init__(self) -> None:
        """Both start empty."""
        super().__init__()
        self.slots = TokenSlots(GRID)
        self.rows = RowTokens(GRID)
        self.held: list[Slots] = []

    @rule(tokens=st.integers(0, 24))
    def allocate(self, tokens: int) -> None:
        """The same rows, or the same refusal."""
        if not self.slots.can_allocate(tokens):
            with pytest.raises(MemoryAccountingError, match=f"cannot allocate {tokens} "):
                self.rows.allocate(tokens)
            return
        slots = self.slots.allocate(tokens)
        assert self.rows.allocate(tokens) == pieces_of(slots)
        self.held.append(slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Some of what somebody holds."""
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        count = data.draw(st.integers(0, len(slots)))
        self.slots.free(slots[:count])
        self.rows.free(dict(pieces_of(slots[:count])))
        self.held.append(slots[count:])

    @rule(row=st.integers(-1, 6))
    def withhold_or_return(self, row: int) -> None:
        """Both agree on what may be lent and what comes back."""
        for call in ("withhold_row", "return_row"):
            outcomes = []
            for book in (self.slots, self.rows):
                try:
                    getattr(book, call)(row)
                except MemoryAccountingError as error:
                    outcomes.append(str(error))
                else:
                    outcomes.append("done")
            assert outcomes[0] == outcomes[1]
            if outcomes[0] == "done":
                return

    @rule(rows_wanted=st.integers(0, 6), limit=st.none() | st.integers(0, 12))
    def compact(self, rows_wanted: int, limit: int | None) -> None:
        """The same rows become free, all their tokens go somewhere, and every row is as full as after the slots' moves."""
        plan = plan_compaction(self.slots, rows_wanted, limit)
        used = self.rows.row_used_tokens()
        done = self.rows.compact(rows_wanted, limit)
        assert done.freed_rows == plan.freed_rows
        assert done.tokens == plan.source.size
        assert all(sum(tokens for _, tokens in pieces) == used[row] for row, pieces in done.moves.items())
        self.slots.apply(plan)
        self.held = [plan.rewrite(slots) for slots in self.held]

    @invariant()
    def agree(self) -> None:
        """Every figure about rows is the same."""
        slots, rows = self.slots, self.rows
        rows.check_integrity()
        assert rows.row_used_tokens().tolist() == slots.row_used_tokens().tolist()
        for name in ("free_tokens", "used_tokens", "rows_in_use", "rows_withheld"):
            assert getattr(rows, name) == getattr(slots, name), name
        assert rows.withheld_rows() == slots.withheld_rows()
        assert [rows.is_withheld(row) for row in range(6)] == [slots.is_withheld(row) for row in range(6)]


TestRowTokensMachine = RowTokensMachine.TestCase
TestRowTokensMachine.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("pinned", [0, 5])
def test_pinned_tokens_fit_a_row(pinned: int) -> None:
    """None, or more than a row, is refused."""
    with pytest.raises(ConfigError, match=f"pinned_tokens is {pinned}, must be 1 to 4"):
        RowTokens(GRID, pinned)


@pytest.mark.parametrize(
    "given",
    [{0: 4}, {1: 3}, {2: 1}, {5: 1}, {6: 1}, {-1: 1}, {1: -1}],
    ids=[
        "pinned",
        "more than held",
        "empty row",
        "lent row",
        "no row",
        "no row either",
        "negative",
    ],
)
def test_a_wrong_free_is_refused_and_changes_nothing(given: dict[int, int]) -> None:
    """More than requests hold in a row of it; what comes before that in the same call is not freed either."""
    rows = RowTokens(GRID)
    rows.allocate(5)
    rows.withhold_row(5)
    with pytest.raises(MemoryAccountingError, match="cannot free"):
        rows.free({0: 1, **given})
    assert (rows.used_tokens, rows.free_tokens) == (5, 14)
    rows.check_integrity()


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("free_tokens", 3, "free slots are miscounted"),
        ("rows_in_use", 3, "rows in use are miscounted"),
        ("_lowest", 4, "below the search hint"),
        ("_withheld", {0, 5}, "row 0 is withheld"),
    ],
)
def test_integrity_names_what_is_wrong(attribute: str, value: object, text: str) -> None:
    """Books that do not add up are told apart."""
    rows = RowTokens(GRID)
    rows.allocate(5)
    rows.check_integrity()
    setattr(rows, attribute, value)
    with pytest.raises(MemoryAccountingError, match=text):
        rows.check_integrity()
