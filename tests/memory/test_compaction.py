"""Compaction empties rows with the fewest moves and loses no token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harli_core.memory.compaction import plan_compaction
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.token_slots import TokenSlots

GRID = GridGeometry(row_tokens=4, columns=1, rows=6)


def slots_holding(*held: int, withheld: tuple[int, ...] = ()) -> TokenSlots:
    """Return slots in which exactly ``held`` are used."""
    slots = TokenSlots(GRID)
    everything = slots.allocate(GRID.capacity_tokens - 1)
    slots.free(everything[~np.isin(everything, held)])
    for row in withheld:
        slots.withhold_row(row)
    return slots


def test_sparsest_row_moves_into_the_lowest_free_slots() -> None:
    """Row 3 with two tokens goes before row 2 with three; both tokens land in row 0 and row 1."""
    plan = plan_compaction(slots_holding(1, 2, 4, 5, 8, 9, 10, 13, 15), rows_wanted=1)
    assert plan.source.tolist() == [13, 15]
    assert plan.destination.tolist() == [3, 6]
    assert plan.freed_rows == (3,)


def test_of_equally_sparse_rows_the_highest_is_emptied() -> None:
    """Low rows stay with KV."""
    plan = plan_compaction(slots_holding(4, 8, 12), rows_wanted=2)
    assert plan.freed_rows == (2, 3)
    assert plan.destination.tolist() == [1, 2]


def test_empty_and_lent_rows_are_no_destination() -> None:
    """Three nearly full rows cannot give one up: moving into an empty or lent row would win nothing."""
    slots = slots_holding(1, 2, 3, 4, 5, 6, 8, 9, 10, withheld=(5,))
    plan = plan_compaction(slots, rows_wanted=1)
    assert plan.source.size == plan.destination.size == len(plan.freed_rows) == 0


def test_token_limit_bounds_the_moves() -> None:
    """Three rows can be emptied; a limit of two tokens allows two, a limit of none allows none."""
    slots = slots_holding(4, 8, 12, 13)
    assert len(plan_compaction(slots, 3).freed_rows) == 2
    assert plan_compaction(slots, 3, max_tokens=2).source.size == 2
    assert plan_compaction(slots, 3, max_tokens=1).freed_rows == (2,)
    assert plan_compaction(slots, 3, max_tokens=0).freed_rows == ()


def test_rewrite_follows_the_moves() -> None:
    """Moved slots are replaced wherever they stand in a request-to-slot table; others and the shape stay."""
    plan = plan_compaction(slots_holding(1, 2, 4, 5, 8, 9, 10, 13, 15), rows_wanted=1)
    table = np.array([[15, 0, 1], [13, 8, 15]], dtype=np.int32)
    rewritten = plan.rewrite(table)
    assert rewritten.tolist() == [[6, 0, 1], [3, 8, 6]]
    assert rewritten.dtype == np.int32
    assert table[0, 0] == 15


def test_empty_compaction_rewrites_nothing() -> None:
    """With nothing to move the table comes back equal, and applying changes nothing."""
    slots = slots_holding(1)
    plan = plan_compaction(slots, 1)
    slots.apply(plan)
    assert plan.rewrite(np.array([1, 2], dtype=np.int32)).tolist() == [1, 2]
    assert slots.used_tokens == 1


@pytest.mark.parametrize("rows_wanted", [0, -1])
def test_no_rows_wanted_means_no_moves(rows_wanted: int) -> None:
    """Nothing wanted, nothing moved."""
    assert plan_compaction(slots_holding(4, 8), rows_wanted).source.size == 0


@settings(max_examples=80, deadline=None, database=None)
@given(
    held=st.sets(st.integers(1, 23)),
    wanted=st.integers(0, 5),
    lend=st.sets(st.integers(1, 5)),
    limit=st.integers(0, 12),
)
def test_every_token_is_found_again(held: set[int], wanted: int, lend: set[int], limit: int) -> None:
    """After copying and rewriting each request reads its own token, and as many rows as possible are empty."""
    withheld = tuple(row for row in sorted(lend) if not any(slot // 4 == row for slot in held))
    slots = slots_holding(*held, withheld=withheld)
    table = np.array(sorted(held), dtype=np.int32)
    content = np.arange(24)
    plan = plan_compaction(slots, wanted, limit)
    slots.apply(plan)
    slots.check_integrity()
    content[plan.destination] = content[plan.source]
    moved = plan.rewrite(table)
    assert content[moved].tolist() == table.tolist()
    assert slots.used_slots(np.setdiff1d(np.arange(6), withheld)).tolist() == sorted(moved.tolist())
    used = slots.row_used_tokens()
    assert not used[list(plan.freed_rows)].any()
    counts = sorted(sum(slot // 4 == row for slot in held) for row in range(1, 6))
    counts = [count for count in counts if count]
    possible = [
        k
        for k in range(min(wanted, len(counts)) + 1)
        if sum(counts[:k]) <= limit and len(held) + 1 <= 4 * (len(counts) + 1 - k)
    ]
    assert len(plan.freed_rows) == max(possible)
    assert plan.source.size == sum(counts[: max(possible)])
