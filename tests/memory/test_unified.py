"""KV and finetuning share one pool, and no row, slot or block ever has two owners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harli_core.errors import MemoryAccountingError
from harli_core.memory.counting_provider import CountingProvider
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.lent_blocks import Extents
from harli_core.memory.unified import UnifiedAllocator
from harli_core.types import MemoryView

GRID = GridGeometry(row_tokens=4, columns=2, rows=6)


class FailingProvider(CountingProvider):
    """A provider whose driver refuses one row."""

    def __init__(self, bad_row: int) -> None:
        """Refuse ``bad_row``."""
        super().__init__()
        self.bad_row = bad_row

    def lend_row(self, row: int) -> None:
        """Lend any other row."""
        if row == self.bad_row:
            raise MemoryAccountingError("driver: out of memory")
        super().lend_row(row)


def test_lends_the_highest_free_rows_but_never_row_zero() -> None:
    """Of six rows, one with tokens, four are lent at most; the provider sees the same."""
    provider = CountingProvider()
    allocator = UnifiedAllocator(GRID, provider)
    allocator.allocate_tokens(5)
    assert allocator.lend_rows(1) == 1
    assert allocator.grid.lent_rows() == (5,)
    assert allocator.lend_rows(9) == 3
    assert allocator.grid.lent_rows() == (2, 3, 4, 5)
    assert allocator.lend_rows(-1) == 0
    assert provider.rows_lent == 4
    assert provider.committed_bytes == 6 * GRID.row_bytes


def test_return_takes_two_steps() -> None:
    """A reclaiming row can be used by neither side; finished, its slots are KV's."""
    provider = CountingProvider()
    allocator = UnifiedAllocator(GRID, provider)
    allocator.lend_rows(5)
    held = allocator.finetune_blocks.allocate(2, contiguous=True)
    assert allocator.rows_returnable() == (1, 2, 3, 4)
    rows = allocator.begin_return(2)
    assert rows == (1, 2)
    assert not allocator.can_allocate_tokens(4)
    assert allocator.finetune_blocks.free_blocks == 4
    assert allocator.view().rows_reclaiming == 2
    assert provider.rows_lent == 5
    allocator.finish_return(rows)
    assert allocator.allocate_tokens(11).tolist() == list(range(1, 12))
    assert provider.rows_lent == 3
    allocator.finetune_blocks.free(held)
    assert allocator.rows_returnable() == (3, 4, 5)


def test_finish_of_other_rows_is_refused_and_changes_nothing() -> None:
    """A list with a lent, free or doubled row is refused as a whole."""
    allocator = UnifiedAllocator(GRID, CountingProvider())
    allocator.lend_rows(3)
    (row,) = allocator.begin_return(1)
    for rows in ((row, 5), (row, 1), (row, row)):
        with pytest.raises(MemoryAccountingError, match="cannot finish returning"):
            allocator.finish_return(rows)
    assert allocator.view().rows_reclaiming == 1
    allocator.finish_return((row,))
    allocator.check_integrity()


def test_failing_driver_leaves_the_books_intact() -> None:
    """Rows lent before the failure stay lent, the failing one stays free."""
    allocator = UnifiedAllocator(GRID, FailingProvider(bad_row=4))
    with pytest.raises(MemoryAccountingError, match="driver"):
        allocator.lend_rows(3)
    assert allocator.grid.lent_rows() == (5,)
    allocator.check_integrity()


def test_view_counts() -> None:
    """Row 0 is a KV row, reclaiming rows are lent ones, and free slots beside tokens cannot be lent."""
    allocator = UnifiedAllocator(GRID, CountingProvider())
    allocator.allocate_tokens(5)
    allocator.lend_rows(2)
    allocator.begin_return(1)
    assert allocator.view() == MemoryView(
        row_tokens=4,
        row_bytes=GRID.row_bytes,
        rows_total=6,
        rows_kv=2,
        rows_lent=2,
        rows_free=2,
        rows_reclaiming=1,
        used_tokens=5,
        free_tokens=10,
        free_but_unlendable_bytes=2 * GRID.token_bytes,
    )


def test_compaction_makes_rows_lendable() -> None:
    """Three rows with a token each become one row more to lend for every row wanted."""
    allocator = UnifiedAllocator(GRID, CountingProvider())
    got = allocator.allocate_tokens(23)
    allocator.free_tokens(np.setdiff1d(got, [1, 9, 22]).astype(np.int32))
    assert allocator.free_but_unlendable_bytes == 8 * GRID.token_bytes
    assert allocator.lend_rows(9) == 3
    compaction = allocator.compact(2)
    assert compaction.freed_rows == (2, 5)
    assert compaction.rewrite(np.array([1, 9, 22], dtype=np.int32)).tolist() == [1, 2, 3]
    assert allocator.free_but_unlendable_bytes == 0
    assert allocator.lend_rows(9) == 2


def test_integrity_finds_a_row_lent_behind_the_books() -> None:
    """A row that the grid lends but finetuning does not have is found."""
    allocator = UnifiedAllocator(GRID, CountingProvider())
    allocator.grid.lend(3)
    with pytest.raises(MemoryAccountingError, match=r"lent rows \(3,\), finetuning has \(\)"):
        allocator.check_integrity()


def test_release_gives_the_memory_back() -> None:
    """Nothing stays committed."""
    provider = CountingProvider()
    UnifiedAllocator(GRID, provider).release()
    assert provider.committed_bytes == 0


class UnifiedMachine(RuleBasedStateMachine):
    """KV requests write their name into a plain memory, finetuning its own; nobody ever reads another's."""

    @initialize(pinned=st.integers(1, 4))
    def start(self, pinned: int) -> None:
        """Begin with everything free."""
        self.provider = CountingProvider()
        self.allocator = UnifiedAllocator(GRID, self.provider, pinned)
        self.pinned = pinned
        self.content = np.zeros(GRID.capacity_tokens, dtype=np.int64)  # what stands in each slot, 0 nothing
        self.requests: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
        self.blocks: list[Extents] = []
        self.lent: set[int] = set()
        self.reclaiming: set[int] = set()
        self.names = 0

    def kv_rows(self) -> set[int]:
        """Rows that hold tokens by the model."""
        return {int(slot) // 4 for slots in self.requests.values() for slot in slots} | {0}

    def block_rows(self) -> set[int]:
        """Rows that hold blocks by the model."""
        ranges = [extent for extents in self.blocks for extent in extents.ranges]
        return {block // 2 for extent in ranges for block in range(extent.first, extent.first + extent.count)}

    @rule(tokens=st.integers(1, 9))
    def admit(self, tokens: int) -> None:
        """A request gets slots in which nothing stands, outside lent rows."""
        if not self.allocator.can_allocate_tokens(tokens):
            assert tokens > self.allocator.view().free_tokens
            return
        slots = self.allocator.allocate_tokens(tokens)
        assert not self.content[slots].any()
        assert (self.lent | self.reclaiming).isdisjoint((slots // 4).tolist())
        assert slots.min() >= self.pinned
        self.names += 1
        self.content[slots] = self.names
        self.requests[self.names] = slots

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """A request leaves."""
        slots = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        self.allocator.free_tokens(slots)
        self.content[slots] = 0

    @rule(rows=st.integers(0, 4))
    def lend(self, rows: int) -> None:
        """The highest free rows are lent."""
        free = set(range(6)) - self.kv_rows() - self.lent - self.reclaiming
        expected = sorted(free, reverse=True)[:rows]
        assert self.allocator.lend_rows(rows) == len(expected)
        self.lent.update(expected)

    @rule(count=st.integers(1, 4), contiguous=st.booleans())
    def take_blocks(self, count: int, contiguous: bool) -> None:
        """Finetuning gets blocks of lent rows that nobody has."""
        before = self.owned_blocks()
        if self.allocator.finetune_blocks.can_allocate(count, contiguous):
            self.blocks.append(self.allocator.finetune_blocks.allocate(count, contiguous))
            assert len(self.owned_blocks()) == len(set(self.owned_blocks())) == len(before) + count

    def owned_blocks(self) -> list[int]:
        """Blocks of all live allocations, doubles included."""
        ranges = [extent for extents in self.blocks for extent in extents.ranges]
        return [block for extent in ranges for block in range(extent.first, extent.first + extent.count)]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def drop_blocks(self, data: st.DataObject) -> None:
        """Finetuning gives an allocation back."""
        extents = data.draw(st.sampled_from(self.blocks))
        self.allocator.finetune_blocks.free(extents)
        self.blocks.remove(extents)

    @rule(rows=st.integers(0, 4))
    def begin_return(self, rows: int) -> None:
        """The lowest lent rows without a block are on their way back."""
        expected = sorted(self.lent - self.block_rows())
        assert self.allocator.rows_returnable() == tuple(expected)
        assert self.allocator.begin_return(rows) == tuple(expected[:rows])
        self.lent.difference_update(expected[:rows])
        self.reclaiming.update(expected[:rows])

    @rule(data=st.data())
    def finish_return(self, data: st.DataObject) -> None:
        """Any reclaiming rows come home."""
        rows = data.draw(st.sets(st.sampled_from(sorted(self.reclaiming)))) if self.reclaiming else set[int]()
        self.allocator.finish_return(sorted(rows))
        self.reclaiming.difference_update(rows)

    @rule(rows=st.integers(0, 3), limit=st.none() | st.integers(0, 8))
    def compact(self, rows: int, limit: int | None) -> None:
        """Copies go to slots in which nothing stands; requests find their tokens through the rewritten table."""
        compaction = self.allocator.compact(rows, limit)
        assert not self.content[compaction.destination].any()
        self.content[compaction.destination] = self.content[compaction.source]
        self.content[compaction.source] = 0
        self.requests = {name: compaction.rewrite(slots) for name, slots in self.requests.items()}
        assert self.kv_rows().isdisjoint(set(compaction.freed_rows))

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Every token is where its request looks for it, no row has two owners, and all counts are the model's."""
        self.allocator.check_integrity()
        self.provider.check_integrity()
        for name, slots in self.requests.items():
            assert (self.content[slots] == name).all()
        view = self.allocator.view()
        used = sum(slots.size for slots in self.requests.values())
        away = self.lent | self.reclaiming
        assert self.kv_rows().isdisjoint(away)
        assert self.block_rows() <= self.lent
        assert view.used_tokens == np.count_nonzero(self.content) == used
        assert (view.rows_kv, view.rows_lent) == (len(self.kv_rows()), len(away))
        assert view.rows_free == 6 - len(self.kv_rows()) - len(away)
        assert view.rows_reclaiming == len(self.reclaiming)
        assert view.free_tokens == 4 * (6 - len(away)) - used - self.pinned
        assert view.free_but_unlendable_bytes == (view.free_tokens - 4 * view.rows_free) * GRID.token_bytes
        assert self.provider.rows_lent == len(away)


TestUnifiedMachine = UnifiedMachine.TestCase
TestUnifiedMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
