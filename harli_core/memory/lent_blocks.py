"""Blocks of lent rows as general-purpose memory for finetuning (paper section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import MemoryAccountingError
from harli_core.memory.geometry import GridGeometry


@dataclass(frozen=True, slots=True)
class Extent:
    """``count`` blocks at adjacent virtual addresses, from block id ``first``."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Extents:
    """What one allocation got: extents, ascending, neither overlapping nor touching."""

    ranges: tuple[Extent, ...]

    @property
    def blocks(self) -> int:
        """Blocks of all ranges together."""
        return sum(extent.count for extent in self.ranges)


class LentBlocks:
    """Free and used blocks of the rows that finetuning holds; block id = ``row * row_blocks + column``.

    ::

        row 6   . . . . . . . .     empty: returned first (low rows are where KV grows)
        row 7   # # # . . . . .     partly filled: used before an empty row is touched
        row 8   # # # # # # # #     adjacent lent rows are contiguous: an extent may run from row 7 into row 8

    Allocation opens as few empty rows as it can, and fills from the highest row, so that whole rows stay returnable.
    Calls that raise leave everything as it was.
    """

    def __init__(self, geometry: GridGeometry) -> None:
        """Start without any row."""
        self._row_blocks = geometry.row_blocks
        self._held = np.zeros(geometry.rows, dtype=np.bool_)
        self._free = np.zeros((geometry.rows, geometry.row_blocks), dtype=np.bool_)
        self._row_used = np.zeros(geometry.rows, dtype=np.int64)
        self._live: set[Extents] = set()
        self._free_blocks = 0
        self._used_blocks = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return self._free_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks in live allocations."""
        return self._used_blocks

    @property
    def largest_allocatable_blocks(self) -> int:
        """Length of the longest contiguous range of free blocks."""
        starts, ends = self._free_ranges()
        return int((ends - starts).max(initial=0))

    def rows(self) -> tuple[int, ...]:
        """All rows held, ascending."""
        return tuple(self._held.nonzero()[0].tolist())

    def empty_rows(self) -> tuple[int, ...]:
        """Rows held that contain no allocated block, ascending."""
        return tuple((self._held & (self._row_used == 0)).nonzero()[0].tolist())

    def add_row(self, row: int) -> None:
        """Take over a lent row, all its blocks free."""
        if not 0 <= row < self._held.size or self._held[row]:
            raise MemoryAccountingError(f"cannot add row {row} to the lent blocks: held already, or no such row")
        self._held[row] = True
        self._free[row] = True
        self._free_blocks += self._row_blocks

    def remove_row(self, row: int) -> None:
        """Give up a row; raises `MemoryAccountingError` if a block of it is in use."""
        if not 0 <= row < self._held.size or not self._held[row]:
            raise MemoryAccountingError(f"cannot remove row {row} from the lent blocks: it is not held")
        if self._row_used[row]:
            raise MemoryAccountingError(f"cannot remove row {row}: {self._row_used[row]} of its blocks are in use")
        self._held[row] = False
        self._free[row] = False
        self._free_blocks -= self._row_blocks

    def can_allocate(self, count: int, contiguous: bool) -> bool:
        """Whether ``allocate(count, contiguous)`` would succeed."""
        return 1 <= count <= (self.largest_allocatable_blocks if contiguous else self._free_blocks)

    def allocate(self, count: int, contiguous: bool) -> Extents:
        """Take ``count`` blocks, as one extent if ``contiguous``; raises `MemoryAccountingError` if too few."""
        if not self.can_allocate(count, contiguous):
            raise MemoryAccountingError(
                f"cannot allocate {count} {'contiguous ' if contiguous else ''}blocks: {self._free_blocks} are free, "
                f"at most {self.largest_allocatable_blocks} of them contiguous"
            )
        extents = Extents((self._contiguous(count),)) if contiguous else self._scattered(count)
        self._mark(extents, free=False)
        self._live.add(extents)
        return extents

    def free(self, extents: Extents) -> None:
        """Give a whole allocation back; raises `MemoryAccountingError` if it is not live."""
        if extents not in self._live:
            raise MemoryAccountingError(f"cannot free {extents}: not a live allocation (freed twice, or in part?)")
        self._live.remove(extents)
        self._mark(extents, free=True)

    def check_integrity(self) -> None:
        """Recount from the live allocations; raises `MemoryAccountingError` naming what is inconsistent."""
        owners = np.zeros(self._free.size, dtype=np.int64)
        for extents in self._live:
            for extent in extents.ranges:
                owners[extent.first : extent.first + extent.count] += 1
        by_row = owners.reshape(self._free.shape)
        checks = {
            "a block has two owners": not (owners > 1).any(),
            "a block outside the rows held is in use": not by_row[~self._held].any(),
            "free blocks are not the unowned ones": np.array_equal(self._free, self._held[:, None] & (by_row == 0)),
            "used blocks by row are miscounted": np.array_equal(self._row_used, by_row.sum(axis=1)),
            "used blocks are miscounted": self._used_blocks == int(owners.sum()),
            "free blocks are miscounted": self._free_blocks == int(self._free.sum()),
        }
        wrong = [text for text, right in checks.items() if not right]
        if wrong:
            raise MemoryAccountingError("lent blocks: " + "; ".join(wrong))

    def _contiguous(self, count: int) -> Extent:
        """Place ``count`` blocks at either end of a free range, where they open the fewest empty rows."""
        starts, ends = self._free_ranges()
        fits = ends - starts >= count
        places = np.concatenate((starts[fits], ends[fits] - count))
        empty_below = np.concatenate(([0], (self._held & (self._row_used == 0)).cumsum()))
        opened = empty_below[(places + count - 1) // self._row_blocks + 1] - empty_below[places // self._row_blocks]
        best = np.lexsort((-places, opened))[0]
        return Extent(int(places[best]), count)

    def _scattered(self, count: int) -> Extents:
        """Take blocks of partly filled rows, then of empty ones, each from the highest row."""
        room = np.where(self._held, self._row_blocks - self._row_used, 0)
        partial = ((room > 0) & (self._row_used > 0)).nonzero()[0][::-1]
        empty = ((room > 0) & (self._row_used == 0)).nonzero()[0][::-1]
        rows = np.concatenate((partial, empty))
        rows = rows[: int(room[rows].cumsum().searchsorted(count)) + 1]
        lines, columns = self._free[rows].nonzero()
        blocks = np.sort((rows[lines] * self._row_blocks + columns)[:count])
        breaks = (np.diff(blocks) > 1).nonzero()[0] + 1
        return Extents(tuple(Extent(int(run[0]), run.size) for run in np.split(blocks, breaks)))

    def _mark(self, extents: Extents, free: bool) -> None:
        flat = self._free.reshape(-1)
        for extent in extents.ranges:
            end = extent.first + extent.count
            flat[extent.first : end] = free
            rows = slice(extent.first // self._row_blocks, (end - 1) // self._row_blocks + 1)
            self._row_used[rows] = self._row_blocks - self._free[rows].sum(axis=1)
        change = extents.blocks if free else -extents.blocks
        self._free_blocks += change
        self._used_blocks -= change

    def _free_ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First block of each maximal free range, and the block after its last."""
        edges = np.diff(self._free.reshape(-1).view(np.int8), prepend=np.int8(0), append=np.int8(0))
        return (edges == 1).nonzero()[0], (edges == -1).nonzero()[0]
