"""Blocks of lent rows: one owner each, and whole rows kept empty for as long as possible."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harli_core.errors import MemoryAccountingError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.lent_blocks import Extent, Extents, LentBlocks

GRID = GridGeometry(row_tokens=4, columns=4, rows=6)


def lent(*rows: int) -> LentBlocks:
    """Return blocks over ``rows``."""
    blocks = LentBlocks(GRID)
    for row in rows:
        blocks.add_row(row)
    return blocks


def test_block_ids_are_contiguous_across_adjacent_rows() -> None:
    """An allocation of more than a row runs through two adjacent lent rows."""
    blocks = lent(2, 3, 5)
    assert blocks.largest_allocatable_blocks == 8
    assert blocks.allocate(7, contiguous=True) == Extents((Extent(9, 7),))
    assert blocks.largest_allocatable_blocks == 4


def test_partly_filled_row_is_used_before_an_empty_one() -> None:
    """Small allocations share a row, from the highest down, and leave the others returnable."""
    blocks = lent(1, 3, 5)
    blocks.allocate(2, contiguous=True)
    blocks.allocate(2, contiguous=True)
    assert blocks.empty_rows() == (1, 3)
    blocks.allocate(1, contiguous=False)
    assert blocks.empty_rows() == (1,)


def test_contiguous_allocation_opens_the_fewest_empty_rows() -> None:
    """Five blocks next to a half-filled row take its rest and one empty row, not two empty rows."""
    blocks = lent(0, 1, 3, 4)
    blocks.allocate(2, contiguous=True)
    assert blocks.empty_rows() == (0, 1, 3)
    assert blocks.allocate(5, contiguous=True) == Extents((Extent(13, 5),))
    assert blocks.empty_rows() == (0, 1)


def test_scattered_allocation_merges_neighbours() -> None:
    """Blocks without a gap form one extent, partly filled rows go first."""
    blocks = lent(1, 2, 5)
    first = blocks.allocate(3, contiguous=True)
    assert first == Extents((Extent(21, 3),))
    assert blocks.allocate(6, contiguous=False) == Extents((Extent(4, 1), Extent(8, 4), Extent(20, 1)))
    assert (blocks.free_blocks, blocks.used_blocks) == (3, 9)


def test_contiguous_needs_a_range() -> None:
    """Enough free blocks in separate rows do not make a contiguous range; the message says how long one is."""
    blocks = lent(1, 3)
    assert blocks.can_allocate(5, contiguous=False)
    assert not blocks.can_allocate(5, contiguous=True)
    with pytest.raises(MemoryAccountingError, match=r"cannot allocate 5 contiguous blocks: 8 are free, at most 4"):
        blocks.allocate(5, contiguous=True)


@pytest.mark.parametrize("count", [0, -1, 9])
def test_impossible_counts_are_refused(count: int) -> None:
    """Nothing, less than nothing and more than there is."""
    with pytest.raises(MemoryAccountingError, match=f"cannot allocate {count} blocks"):
        lent(1, 3).allocate(count, contiguous=False)


def test_only_live_allocations_can_be_freed() -> None:
    """A double free and the free of a part are refused and change nothing."""
    blocks = lent(2)
    whole = blocks.allocate(3, contiguous=True)
    part = Extents((Extent(whole.ranges[0].first, 1),))
    with pytest.raises(MemoryAccountingError, match="not a live allocation"):
        blocks.free(part)
    blocks.free(whole)
    with pytest.raises(MemoryAccountingError, match="not a live allocation"):
        blocks.free(whole)
    assert blocks.free_blocks == 4


def test_row_in_use_cannot_be_removed() -> None:
    """Rows leave only empty, and only once; they come only once."""
    blocks = lent(2, 3)
    blocks.allocate(1, contiguous=True)
    with pytest.raises(MemoryAccountingError, match="cannot remove row 3: 1 of its blocks are in use"):
        blocks.remove_row(3)
    blocks.remove_row(2)
    with pytest.raises(MemoryAccountingError, match="cannot remove row 2"):
        blocks.remove_row(2)
    with pytest.raises(MemoryAccountingError, match="cannot add row 3"):
        blocks.add_row(3)
    assert blocks.rows() == (3,)


def test_integrity_names_what_is_wrong() -> None:
    """A block marked free while it is allocated is found."""
    blocks = lent(2)
    blocks.allocate(2, contiguous=True)
    blocks._free[2, :] = True  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(MemoryAccountingError, match="free blocks are not the unowned ones"):
        blocks.check_integrity()


class LentBlocksMachine(RuleBasedStateMachine):
    """Random use against a dictionary from block to allocation."""

    @initialize()
    def start(self) -> None:
        """Begin without rows."""
        self.blocks = LentBlocks(GRID)
        self.rows: set[int] = set()
        self.live: list[Extents] = []
        self.owner: dict[int, int] = {}

    def free_ids(self) -> set[int]:
        """Free blocks by the model."""
        return {row * 4 + column for row in self.rows for column in range(4)} - self.owner.keys()

    def longest_free(self) -> int:
        """Longest free range by the model."""
        longest = length = 0
        free = self.free_ids()
        for block in range(24):
            length = length + 1 if block in free else 0
            longest = max(longest, length)
        return longest

    @rule(row=st.integers(0, 6))
    def add(self, row: int) -> None:
        """A row that is not held is added."""
        if row in self.rows or row == 6:
            with pytest.raises(MemoryAccountingError):
                self.blocks.add_row(row)
        else:
            self.blocks.add_row(row)
            self.rows.add(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """A row is removed if nothing lives in it, and otherwise stays."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        if any(block // 4 == row for block in self.owner):
            with pytest.raises(MemoryAccountingError):
                self.blocks.remove_row(row)
        else:
            self.blocks.remove_row(row)
            self.rows.remove(row)

    @rule(count=st.integers(1, 10), contiguous=st.booleans())
    def allocate(self, count: int, contiguous: bool) -> None:
        """Blocks come from the free ones, and no more empty rows are opened than needed."""
        free = self.free_ids()
        if count > (self.longest_free() if contiguous else len(free)):
            assert not self.blocks.can_allocate(count, contiguous)
            with pytest.raises(MemoryAccountingError):
                self.blocks.allocate(count, contiguous)
            return
        empty = set(self.blocks.empty_rows())
        extents = self.blocks.allocate(count, contiguous)
        got = [block for extent in extents.ranges for block in range(extent.first, extent.first + extent.count)]
        assert len(got) == len(set(got)) == count == extents.blocks
        assert free.issuperset(got)
        assert got == sorted(got)
        assert not contiguous or len(extents.ranges) == 1
        opened = len(empty) - len(set(self.blocks.empty_rows()))
        if contiguous:
            places = [range(at, at + count) for at in range(25 - count) if free.issuperset(range(at, at + count))]
            assert opened == min(len(empty & {block // 4 for block in place}) for place in places)
        else:
            assert opened == max(0, -((len([b for b in free if b // 4 not in empty]) - count) // 4))
        self.owner.update(dict.fromkeys(got, len(self.live)))
        self.live.append(extents)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A live allocation is freed once."""
        extents = data.draw(st.sampled_from(self.live))
        self.blocks.free(extents)
        self.live.remove(extents)
        for extent in extents.ranges:
            for block in range(extent.first, extent.first + extent.count):
                del self.owner[block]
        with pytest.raises(MemoryAccountingError):
            self.blocks.free(extents)

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Counts, rows and the longest range are those of the model."""
        self.blocks.check_integrity()
        assert self.blocks.free_blocks == len(self.free_ids())
        assert self.blocks.used_blocks == len(self.owner)
        assert self.blocks.largest_allocatable_blocks == self.longest_free()
        assert self.blocks.rows() == tuple(sorted(self.rows))
        assert set(self.blocks.empty_rows()) == self.rows - {block // 4 for block in self.owner}


TestLentBlocksMachine = LentBlocksMachine.TestCase
TestLentBlocksMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, database=None)
