"""A row has one owner at a time and changes hands only when empty."""

from __future__ import annotations

import pytest

from harli_core.errors import MemoryAccountingError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.row_grid import RowGrid
from harli_core.memory.token_slots import TokenSlots

GRID = GridGeometry(row_tokens=4, columns=2, rows=5)


def test_states_and_owners() -> None:
    """Row 0 and rows with tokens are KV's, lent and reclaiming rows finetuning's, free rows nobody's."""
    slots = TokenSlots(GRID)
    grid = RowGrid(slots)
    slots.allocate(5)
    grid.lend(3)
    grid.lend(4)
    grid.begin_reclaim(3)
    assert [grid.state(row) for row in range(5)] == ["kv", "kv", "free", "reclaiming", "lent"]
    assert [grid.owner(row) for row in range(5)] == ["kv", "kv", None, "finetune", "finetune"]
    assert (grid.rows_kv, grid.rows_free, grid.rows_lent, grid.rows_reclaiming) == (2, 1, 2, 1)
    assert (grid.free_rows(), grid.lent_rows(), grid.reclaiming_rows()) == ((2,), (4,), (3,))
    grid.check_integrity()


def test_reclaiming_row_opens_to_kv_only_when_finished() -> None:
    """A row on its way back gives no slot before `finish_reclaim`."""
    slots = TokenSlots(GRID)
    grid = RowGrid(slots)
    grid.lend(1)
    grid.begin_reclaim(1)
    assert slots.allocate(4).tolist() == [1, 2, 3, 8]
    grid.finish_reclaim(1)
    assert grid.state(1) == "free"
    assert slots.allocate(1).tolist() == [4]


def test_row_with_tokens_cannot_be_lent() -> None:
    """Neither row 0 nor a row in use is lent."""
    slots = TokenSlots(GRID)
    grid = RowGrid(slots)
    slots.allocate(4)
    for row in (0, 1):
        with pytest.raises(MemoryAccountingError, match="in use or pinned"):
            grid.lend(row)


def test_steps_out_of_order_are_refused() -> None:
    """A row that is not lent cannot be reclaimed, one that is not reclaiming not finished, none twice."""
    grid = RowGrid(TokenSlots(GRID))
    for row in (1, -1, 5):
        with pytest.raises(MemoryAccountingError, match=f"cannot reclaim row {row}"):
            grid.begin_reclaim(row)
    grid.lend(2)
    with pytest.raises(MemoryAccountingError, match="cannot finish reclaiming row 2"):
        grid.finish_reclaim(2)
    grid.begin_reclaim(2)
    with pytest.raises(MemoryAccountingError, match="cannot reclaim row 2"):
        grid.begin_reclaim(2)


def test_integrity_finds_a_reclaiming_row_that_kv_may_use() -> None:
    """A row that was opened to KV behind the grid's back is found."""
    slots = TokenSlots(GRID)
    grid = RowGrid(slots)
    grid.lend(2)
    grid.begin_reclaim(2)
    slots.return_row(2)
    with pytest.raises(MemoryAccountingError, match=r"rows \[2\] are being reclaimed but open to KV"):
        grid.check_integrity()
