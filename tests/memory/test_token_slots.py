"""Token slots are handed out lowest first, never twice, and never from a withheld row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harli_core.errors import ConfigError, MemoryAccountingError
from harli_core.memory.compaction import Compaction, plan_compaction
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.token_slots import Slots, TokenSlots

GRID = GridGeometry(row_tokens=4, columns=2, rows=6)


def array(*slots: int) -> Slots:
    """Slots as the allocator takes them."""
    return np.array(slots, dtype=np.int32)


def test_pinned_slots_are_never_handed_out() -> None:
    """The whole grid without its pinned slots can be allocated, in ascending order, and not one slot more."""
    slots = TokenSlots(GRID, pinned_tokens=3)
    assert slots.allocate(21).tolist() == list(range(3, 24))
    assert not slots.can_allocate(1)
    with pytest.raises(MemoryAccountingError, match="cannot allocate 1 token slots: 0 are free"):
        slots.allocate(1)


def test_lowest_free_slot_first() -> None:
    """A freed low slot is reused before a higher one; the result is int32."""
    slots = TokenSlots(GRID)
    slots.allocate(15)
    slots.free(array(9, 2))
    got = slots.allocate(3)
    assert got.tolist() == [2, 9, 16]
    assert got.dtype == np.int32


def test_withheld_row_is_skipped_and_comes_back() -> None:
    """Slots of a withheld row are not free; after its return they are the next ones."""
    slots = TokenSlots(GRID)
    slots.withhold_row(1)
    assert slots.free_tokens == 19
    assert slots.allocate(5).tolist() == [1, 2, 3, 8, 9]
    slots.return_row(1)
    assert slots.allocate(5).tolist() == [4, 5, 6, 7, 10]
    slots.check_integrity()


def test_free_slots_far_apart() -> None:
    """The lowest free slots are found across thousands of full rows."""
    slots = TokenSlots(GridGeometry(row_tokens=4, columns=1, rows=3000))
    slots.allocate(11999)
    slots.free(array(11998, 5, 6000))
    assert slots.allocate(3).tolist() == [5, 6000, 11998]
    slots.check_integrity()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (array(1, 2, 2), "slot 2 is given more than once"),
        (array(2, 1, 2), "slot 2 is given more than once"),
        (array(1, 20), "slot 20 is not in use"),
        (array(0, 1), "slot 0 belongs to no request"),
        (array(-1, 1), "slot -1 belongs to no request"),
        (array(1, 24), "slot 24 belongs to no request"),
        (array(1, 9), r"slot 9 lies in the lent row 2"),
        (array(8, 9, 10, 11), r"slot 8 lies in the lent row 2"),
    ],
)
def test_bad_free_is_refused_and_changes_nothing(bad: Slots, message: str) -> None:
    """A double free, a pinned, foreign, unused or lent slot: an error that names it, and the books stay."""
    slots = TokenSlots(GRID)
    slots.allocate(7)
    slots.withhold_row(2)
    before = (slots.used_tokens, slots.free_tokens, slots.row_used_tokens().tolist())
    with pytest.raises(MemoryAccountingError, match=message):
        slots.free(bad)
    assert (slots.used_tokens, slots.free_tokens, slots.row_used_tokens().tolist()) == before
    slots.check_integrity()
    assert slots.allocate(2).tolist() == [12, 13]


def test_double_free_is_refused() -> None:
    """Slots that were just freed cannot be freed again."""
    slots = TokenSlots(GRID)
    got = slots.allocate(6)
    slots.free(got)
    with pytest.raises(MemoryAccountingError, match="slot 1 is not in use"):
        slots.free(got)


@pytest.mark.parametrize("row", [0, 1, 3, -1, 6])
def test_only_an_empty_row_can_be_withheld(row: int) -> None:
    """Row 0, a row with a token, a withheld row and rows that do not exist are refused."""
    slots = TokenSlots(GRID)
    slots.allocate(4)
    slots.withhold_row(3)
    with pytest.raises(MemoryAccountingError, match=f"cannot withhold row {row}"):
        slots.withhold_row(row)
    slots.check_integrity()


def test_only_a_withheld_row_can_be_returned() -> None:
    """Returning a row that is not withheld is refused."""
    with pytest.raises(MemoryAccountingError, match="cannot return row 2"):
        TokenSlots(GRID).return_row(2)


@pytest.mark.parametrize("pinned", [0, 5])
def test_pinned_slots_are_within_row_zero(pinned: int) -> None:
    """At least one slot, at most a row, is pinned."""
    with pytest.raises(ConfigError, match=f"pinned_tokens is {pinned}"):
        TokenSlots(GRID, pinned_tokens=pinned)


def test_stale_compaction_is_refused_and_changes_nothing() -> None:
    """A plan whose destination has been taken since is refused."""
    slots = TokenSlots(GRID)
    slots.free(slots.allocate(9)[1:7])
    plan = plan_compaction(slots, 1)
    slots.allocate(5)
    used = slots.row_used_tokens().tolist()
    with pytest.raises(MemoryAccountingError, match="a destination slot is not free"):
        slots.apply(plan)
    with pytest.raises(MemoryAccountingError, match="do not match"):
        slots.apply(Compaction(array(1, 2), array(20, 20), ()))
    assert slots.row_used_tokens().tolist() == used
    slots.check_integrity()


def test_integrity_names_what_is_wrong() -> None:
    """A corrupted count is found and named."""
    slots = TokenSlots(GRID)
    slots.allocate(3)
    slots._free_tokens += 1  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(MemoryAccountingError, match="token slots: free slots are miscounted"):
        slots.check_integrity()


@settings(max_examples=60, deadline=None, database=None)
@given(
    rows=st.sampled_from([6, 200]),
    withheld=st.sets(st.integers(2, 5)),
    filled=st.integers(0, 14),
    data=st.data(),
)
def test_split_allocation_equals_one_allocation(
    rows: int, withheld: set[int], filled: int, data: st.DataObject
) -> None:
    """``allocate(a)`` then ``allocate(b)`` gives what ``allocate(a + b)`` gives, from any state."""
    split, whole = (TokenSlots(GridGeometry(row_tokens=4, columns=1, rows=rows)) for _ in range(2))
    freed = data.draw(st.sets(st.integers(1, max(1, filled)))) if filled else set[int]()
    for slots in (split, whole):
        if filled and slots.can_allocate(filled):
            slots.allocate(filled)
            slots.free(array(*freed))
        for row in withheld:
            if slots.row_used_tokens()[row] == 0:
                slots.withhold_row(row)
    total = data.draw(st.integers(0, whole.free_tokens))
    first = data.draw(st.integers(0, total))
    parts = [split.allocate(first), split.allocate(total - first)]
    assert np.concatenate(parts).tolist() == whole.allocate(total).tolist()
    split.check_integrity()


class TokenSlotsMachine(RuleBasedStateMachine):
    """Random use against a set of used slots and a set of withheld rows."""

    @initialize(rows=st.integers(1, 9), pinned=st.integers(1, 4))
    def start(self, rows: int, pinned: int) -> None:
        """Begin with an empty grid."""
        self.pinned = pinned
        self.geometry = GridGeometry(row_tokens=4, columns=1, rows=rows)
        self.slots = TokenSlots(self.geometry, pinned)
        self.used: set[int] = set()
        self.withheld: set[int] = set()

    def model_free(self) -> list[int]:
        """Free slots by the model."""
        every = range(self.pinned, self.geometry.capacity_tokens)
        return [slot for slot in every if slot not in self.used and slot // 4 not in self.withheld]

    @rule(tokens=st.integers(0, 20))
    def allocate(self, tokens: int) -> None:
        """The lowest free slots are handed out, or the call is refused."""
        expected = self.model_free()[:tokens]
        if len(expected) < tokens:
            assert not self.slots.can_allocate(tokens)
            with pytest.raises(MemoryAccountingError):
                self.slots.allocate(tokens)
            return
        assert self.slots.allocate(tokens).tolist() == expected
        self.used.update(expected)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Any subset of the used slots can be freed, in any order."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        self.slots.free(array(*chosen))
        self.used.difference_update(chosen)

    @precondition(lambda self: self.used)
    @rule()
    def free_all(self) -> None:
        """All used slots can be freed at once."""
        self.slots.free(array(*sorted(self.used)))
        self.used.clear()

    @rule(slots=st.lists(st.integers(-2, 40), min_size=1, max_size=4))
    def free_anything(self, slots: list[int]) -> None:
        """Slots that are not all in use, each given once, are refused."""
        if len(set(slots)) == len(slots) and self.used.issuperset(slots):
            return
        with pytest.raises(MemoryAccountingError):
            self.slots.free(array(*slots))

    @rule(row=st.integers(0, 8))
    def withhold(self, row: int) -> None:
        """Exactly the empty rows but row 0 can be withheld."""
        holds = {slot // 4 for slot in self.used} | self.withheld | {0}
        if row in holds or row >= self.geometry.rows:
            with pytest.raises(MemoryAccountingError):
                self.slots.withhold_row(row)
        else:
            self.slots.withhold_row(row)
            self.withheld.add(row)

    @precondition(lambda self: self.withheld)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A withheld row can be returned."""
        row = data.draw(st.sampled_from(sorted(self.withheld)))
        self.slots.return_row(row)
        self.withheld.remove(row)

    @rule(rows=st.integers(0, 3), limit=st.none() | st.integers(0, 6))
    def compact(self, rows: int, limit: int | None) -> None:
        """A fresh compaction always applies and moves exactly what it says."""
        plan = plan_compaction(self.slots, rows, limit)
        self.slots.apply(plan)
        self.used.difference_update(plan.source.tolist())
        assert self.used.isdisjoint(plan.destination.tolist())
        self.used.update(plan.destination.tolist())

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Counts by row and in total are those of the model."""
        self.slots.check_integrity()
        assert self.slots.used_tokens == len(self.used)
        assert self.slots.free_tokens == len(self.model_free())
        assert self.slots.rows_in_use == len({slot // 4 for slot in self.used} | {0})
        assert self.slots.withheld_rows() == tuple(sorted(self.withheld))
        rows = np.array([row for row in range(self.geometry.rows) if row not in self.withheld], dtype=np.int64)
        assert self.slots.used_slots(rows).tolist() == sorted(self.used)
        assert self.slots.free_slots(rows).tolist() == self.model_free()


TestTokenSlotsMachine = TokenSlotsMachine.TestCase
TestTokenSlotsMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, database=None)
