"""Which token slots hold KV: handed out lowest first, so that high rows drain and can be lent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import ConfigError, MemoryAccountingError
from harli_core.memory.geometry import GridGeometry

if TYPE_CHECKING:
    from harli_core.memory.compaction import Compaction

Slots = NDArray[np.int32]
"""Token slot indices: ``row * row_tokens + offset``."""

LOOK_AHEAD_TOKENS = 1024
"""Slots to search in advance of need."""


class TokenSlots:
    """The use of every token slot, and the one truth about which rows hold tokens.

    ::

        slot   0 1 2 3 | 4 5 6 7 | 8 9 . . | . . . .      row_tokens = 4, pinned_tokens = 1
               P # # # | # . # . | (withheld)| . . . .    P pinned, # used, . free
                             ^ the next slot to be handed out

    The first ``pinned_tokens`` slots belong to no request: padded entries of a decode graph write there. They count as
    neither used nor free, and because of them row 0 is never empty and can never be withheld.
    A withheld row (one that is lent) has no free slot. Calls that raise leave everything as it was.
    """

    def __init__(self, geometry: GridGeometry, pinned_tokens: int = 1) -> None:
        """Start with every slot free but the pinned ones; raises `ConfigError` unless 1..row_tokens are pinned."""
        if not 1 <= pinned_tokens <= geometry.row_tokens:
            raise ConfigError(f"pinned_tokens is {pinned_tokens}, must be 1 to {geometry.row_tokens} (a row)")
        self.geometry = geometry
        self.pinned_tokens = pinned_tokens
        self._row_shift = geometry.row_tokens.bit_length() - 1  # slot >> _row_shift is its row
        self._free = np.ones(geometry.capacity_tokens, dtype=np.bool_)
        self._free[:pinned_tokens] = False
        self._free_by_row = self._free.reshape(geometry.rows, geometry.row_tokens)
        self._row_free = np.full(geometry.rows, geometry.row_tokens, dtype=np.int64)
        self._row_free[0] -= pinned_tokens
        self._withheld = np.zeros(geometry.rows, dtype=np.bool_)
        self._lowest = pinned_tokens  # no slot below is free
        self._ahead: Slots | None = None  # free slots from there on, ascending, none left out
        self._free_tokens = geometry.capacity_tokens - pinned_tokens
        self._rows_in_use = 1
        self._rows_withheld = 0

    @property
    def free_tokens(self) -> int:
        """Slots that can be handed out now (none of a withheld row)."""
        return self._free_tokens

    @property
    def used_tokens(self) -> int:
        """Slots that requests hold."""
        rows = self.geometry.rows - self._rows_withheld
        return rows * self.geometry.row_tokens - self.pinned_tokens - self._free_tokens

    @property
    def rows_in_use(self) -> int:
        """Rows that hold a token or a pinned slot."""
        return self._rows_in_use

    @property
    def rows_withheld(self) -> int:
        """Rows taken out by `withhold_row`."""
        return self._rows_withheld

    def is_withheld(self, row: int) -> bool:
        """Whether ``row`` is withheld."""
        return bool(self._withheld[row])

    def withheld_rows(self) -> tuple[int, ...]:
        """All withheld rows, ascending."""
        return tuple(self._withheld.nonzero()[0].tolist())

    def row_used_tokens(self) -> NDArray[np.int64]:
        """Slots that are taken in each row, pinned ones included, 0 in withheld rows (a copy)."""
        return np.where(self._withheld, 0, self.geometry.row_tokens - self._row_free)

    def used_slots(self, rows: NDArray[np.int64]) -> Slots:
        """Slots that requests hold in ``rows`` (ascending, none of them withheld), ascending."""
        slots = self._slots_where(~self._free_by_row[rows], rows)
        return slots[slots >= self.pinned_tokens].astype(np.int32)

    def free_slots(self, rows: NDArray[np.int64]) -> Slots:
        """Free slots of ``rows`` (ascending), ascending."""
        return self._slots_where(self._free_by_row[rows], rows).astype(np.int32)

    def can_allocate(self, tokens: int) -> bool:
        """Whether ``allocate(tokens)`` would succeed."""
        return 0 <= tokens <= self._free_tokens

    def allocate(self, tokens: int) -> Slots:
        """Take and return the lowest ``tokens`` free slots, ascending; raises `MemoryAccountingError` if too few."""
        if not self.can_allocate(tokens):
            raise MemoryAccountingError(f"cannot allocate {tokens} token slots: {self._free_tokens} are free")
        if tokens == 0:
            return np.empty(0, dtype=np.int32)
        slots = self._lowest_free(tokens)
        self._take_up_to(int(slots[-1]), tokens)
        return slots

    def free(self, slots: Slots) -> None:
        """Give ``slots`` back (any order); raises `MemoryAccountingError` if one is not in use or is given twice."""
        if slots.size and not self._give_back(slots):
            self._checked_in_use(slots)  # finds out which slot it is, and raises

    def withhold_row(self, row: int) -> None:
        """Take an empty row out of use, so that it can be lent."""
        if not 0 <= row < self.geometry.rows:
            raise MemoryAccountingError(f"cannot withhold row {row}: the grid has rows 0 to {self.geometry.rows - 1}")
        if self._withheld[row]:
            raise MemoryAccountingError(f"cannot withhold row {row}: it is withheld already")
        if self._row_free[row] != self.geometry.row_tokens:
            taken = self.geometry.row_tokens - self._row_free[row]
            raise MemoryAccountingError(f"cannot withhold row {row}: {taken} of its slots are in use or pinned")
        self._ahead = None
        self._withheld[row] = True
        self._free_by_row[row] = False
        self._row_free[row] = 0
        self._rows_withheld += 1
        self._free_tokens -= self.geometry.row_tokens

    def return_row(self, row: int) -> None:
        """Put a withheld row back into use, all its slots free."""
        if not 0 <= row < self.geometry.rows or not self._withheld[row]:
            raise MemoryAccountingError(f"cannot return row {row}: it is not withheld")
        self._ahead = None
        self._withheld[row] = False
        self._free_by_row[row] = True
        self._row_free[row] = self.geometry.row_tokens
        self._rows_withheld -= 1
        self._free_tokens += self.geometry.row_tokens
        self._lowest = min(self._lowest, row * self.geometry.row_tokens)

    def apply(self, compaction: Compaction) -> None:
        """Move tokens as planned; raises `MemoryAccountingError` if the plan does not fit the slots any more."""
        if compaction.source.size == 0:
            return
        source = self._checked_in_use(compaction.source)
        destination = np.sort(compaction.destination.astype(np.int64))
        if destination.size != source.size or not _strictly_ascending(destination):
            raise MemoryAccountingError("stale or malformed compaction: its destinations do not match its sources")
        if destination[0] < 0 or destination[-1] >= self._free.size or not self._free[destination].all():
            raise MemoryAccountingError("stale or malformed compaction: a destination slot is not free")
        self._release(source)
        self._take(destination)

    def check_integrity(self) -> None:
        """Recount everything from the bitmap; raises `MemoryAccountingError` naming what is inconsistent."""
        row_tokens = self.geometry.row_tokens
        row_free = self._free_by_row.sum(axis=1)
        in_use = ~self._withheld & (row_free < row_tokens)
        lowest = int(self._free.argmax()) if self._free.any() else self._free.size
        checks = {
            "a pinned slot is free": not self._free[: self.pinned_tokens].any(),
            "a withheld row has free slots": not row_free[self._withheld].any(),
            "row 0 is withheld": not self._withheld[0],
            "free slots by row are miscounted": np.array_equal(row_free, self._row_free),
            "free slots are miscounted": int(row_free.sum()) == self._free_tokens,
            "rows in use are miscounted": int(in_use.sum()) == self._rows_in_use,
            "withheld rows are miscounted": int(self._withheld.sum()) == self._rows_withheld,
            "a free slot lies below the search hint": lowest >= self._lowest,
        }
        wrong = [text for text, right in checks.items() if not right]
        if wrong:
            raise MemoryAccountingError("token slots: " + "; ".join(wrong))

    def _lowest_free(self, tokens: int) -> Slots:
        """Find the lowest ``tokens`` free slots, among those found ahead of need since the last free.

        Whatever frees a slot forgets them (``_ahead = None``), so they are always the lowest.
        """
        ahead = self._ahead
        if ahead is None or ahead.size < tokens:
            ahead = self._look_ahead(tokens)
        self._ahead = ahead[tokens:]
        return ahead[:tokens].copy()

    def _look_ahead(self, tokens: int) -> Slots:
        """At least the lowest ``tokens`` free slots, and some more; they are near unless the grid is almost full."""
        near = self._free[self._lowest : self._lowest + tokens + LOOK_AHEAD_TOKENS].nonzero()[0]
        if near.size < tokens:
            first = self._lowest >> self._row_shift
            reach = self._row_free[first:].cumsum()
            end = first + 1 + int(reach.searchsorted(tokens))
            near = self._free[self._lowest : end << self._row_shift].nonzero()[0]
        return (near + self._lowest).astype(np.int32)

    def _slots_where(self, mask: NDArray[np.bool_], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slot indices of the true entries of ``mask``, whose line ``i`` is row ``rows[i]``."""
        hits = mask.reshape(-1).nonzero()[0]
        first_slots: NDArray[np.int64] = rows[hits >> self._row_shift] << self._row_shift
        return first_slots + (hits & (self.geometry.row_tokens - 1))

    def _take_up_to(self, last: int, tokens: int) -> None:
        """Mark all ``tokens`` free slots up to and including ``last`` as used."""
        first_row, last_row = self._lowest >> self._row_shift, last >> self._row_shift
        left = int(self._row_free[last_row])
        self._rows_in_use += left == self.geometry.row_tokens
        if first_row == last_row:
            self._row_free[last_row] = left - tokens
        else:
            before = self._row_free[first_row:last_row]
            self._rows_in_use += int(np.count_nonzero(before == self.geometry.row_tokens))
            self._row_free[last_row] = left - (tokens - int(before.sum()))
            before[:] = 0
        self._free[self._lowest : last + 1] = False
        self._free_tokens -= tokens
        self._lowest = last + 1

    def _give_back(self, slots: Slots) -> bool:
        """Mark ``slots`` as free; says `False`, having changed nothing, unless each was in use and is given once.

        All of them were taken, so if they differ, the rows' count of free slots rises by as many as were given.
        """
        index = slots.astype(np.int64)  # what numpy looks up fastest
        lowest = int(index.min())
        if lowest < self.pinned_tokens:
            return False
        counts = np.bincount(index >> self._row_shift)
        first_row, last_row = lowest >> self._row_shift, counts.size - 1
        if last_row >= self.geometry.rows or np.count_nonzero(self._free[index]):
            return False
        counts = counts[first_row:]
        withheld = self._withheld[first_row : last_row + 1]
        if np.count_nonzero(withheld) and np.count_nonzero(counts[withheld]):
            return False
        self._free[index] = True
        row_free = self._row_free[first_row : last_row + 1] + counts
        if np.count_nonzero(self._free_by_row[first_row : last_row + 1]) != int(row_free.sum()):
            self._free[index] = False
            return False
        self._row_free[first_row : last_row + 1] = row_free
        self._rows_in_use -= int(np.count_nonzero((row_free == self.geometry.row_tokens) & (counts > 0)))
        self._free_tokens += slots.size
        self._lowest = min(self._lowest, lowest)
        self._ahead = None
        return True

    def _checked_in_use(self, slots: Slots) -> NDArray[np.int64]:
        """Return ``slots`` ascending if a request holds each of them, once; otherwise raise."""
        ordered = slots.astype(np.int64)
        if not _strictly_ascending(ordered):
            ordered.sort()
            if not _strictly_ascending(ordered):
                twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
                raise MemoryAccountingError(f"slot {twice} is given more than once")
        first, last = int(ordered[0]), int(ordered[-1])
        if first < self.pinned_tokens or last >= self._free.size:
            raise MemoryAccountingError(
                f"slot {first if first < self.pinned_tokens else last} belongs to no request: "
                f"those are {self.pinned_tokens} to {self._free.size - 1}"
            )
        if np.count_nonzero(self._free[_index(ordered)]):
            unused = int(ordered[self._free[ordered]][0])
            raise MemoryAccountingError(f"slot {unused} is not in use (freed twice?)")
        if np.count_nonzero(self._withheld[first >> self._row_shift : (last >> self._row_shift) + 1]):
            lent = ordered[self._withheld[ordered >> self._row_shift]]
            if lent.size:
                raise MemoryAccountingError(f"slot {lent[0]} lies in the lent row {lent[0] >> self._row_shift}")
        return ordered

    def _take(self, ordered: NDArray[np.int64]) -> None:
        """Mark free slots (ascending) as used."""
        row_free, counts = self._row_counts(ordered)
        self._rows_in_use += int(np.count_nonzero((row_free == self.geometry.row_tokens) & (counts > 0)))
        row_free -= counts
        self._free[ordered] = False
        self._ahead = None
        self._free_tokens -= ordered.size

    def _release(self, ordered: NDArray[np.int64]) -> None:
        """Mark used slots (ascending) as free."""
        row_free, counts = self._row_counts(ordered)
        row_free += counts
        self._rows_in_use -= int(np.count_nonzero((row_free == self.geometry.row_tokens) & (counts > 0)))
        self._free[_index(ordered)] = True
        self._ahead = None
        self._free_tokens += ordered.size
        self._lowest = min(self._lowest, int(ordered[0]))

    def _row_counts(self, ordered: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free counts (a view to be changed) of the rows that ``ordered`` spans, and its slots in each of them."""
        first, last = int(ordered[0]) >> self._row_shift, int(ordered[-1]) >> self._row_shift
        if first == last:
            counts = np.array([ordered.size], dtype=np.int64)
        else:
            counts = np.bincount((ordered >> self._row_shift) - first)
        return self._row_free[first : last + 1], counts


def _strictly_ascending(slots: NDArray[np.int64]) -> bool:
    return int(np.count_nonzero(slots[1:] > slots[:-1])) == slots.size - 1


def _index(ordered: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return ``ordered`` (strictly ascending) as a slice where it has no gap: much faster to index with."""
    first, last = int(ordered[0]), int(ordered[-1])
    return slice(first, last + 1) if last - first + 1 == ordered.size else ordered
