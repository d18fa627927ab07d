"""Moving live tokens out of sparse rows, so that whole rows become lendable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from harli_core.memory.token_slots import Slots, TokenSlots


@dataclass(frozen=True, slots=True, eq=False)
class Compaction:
    """Token moves ``source[i] -> destination[i]``, and the rows that are empty once all of them are made.

    Sources are ascending, no slot is both source and destination: the copies may run in any order or all at once.
    """

    source: Slots
    destination: Slots
    freed_rows: tuple[int, ...]

    def rewrite(self, slots: Slots) -> Slots:
        """Return ``slots`` (any shape, any order) with every moved slot replaced by its new one."""
        if self.source.size == 0:
            return slots.copy()
        at = np.minimum(self.source.searchsorted(slots), self.source.size - 1)
        return np.where(self.source[at] == slots, self.destination[at], slots)


def plan_compaction(slots: TokenSlots, rows_wanted: int, max_tokens: int | None = None) -> Compaction:
    """Plan the cheapest moves that empty up to ``rows_wanted`` rows more, moving at most ``max_tokens`` tokens.

    The sparsest rows (of equals the highest) move into the lowest free slots of the other rows that hold tokens; a move
    into an empty row would win nothing. Emptying ``k`` rows takes ``k`` rows' worth of free slots in rows that hold
    tokens, whichever rows are chosen, hence sparsest first is cheapest. Empty if not even one row can be emptied.

    ::

        row 0  P # # .        P # # a       a, b moved
        row 1  # # . .   ->   # # b .
        row 2  # # # #        # # # #
        row 3  a . b .        . . . .       can be lent
    """
    used = slots.row_used_tokens()
    freed, kept = choose_rows(used, slots.geometry.row_tokens, rows_wanted, max_tokens)
    source = slots.used_slots(freed)
    room = (slots.geometry.row_tokens - used[kept]).cumsum()
    filled = kept[: int(room.searchsorted(source.size)) + 1]
    return Compaction(source, slots.free_slots(filled)[: source.size], tuple(freed.tolist()))


def choose_rows(
    used: NDArray[np.int64], row_tokens: int, rows_wanted: int, max_tokens: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to be emptied, and rows that stay in use and take their tokens, both ascending; ``used`` as for a plan."""
    rows = used.nonzero()[0]
    free_tokens = rows.size * row_tokens - int(used.sum())
    movable = rows[1:]  # row 0 holds the pinned slots
    sparsest = movable[np.lexsort((-movable, used[movable]))]
    count = max(0, min(rows_wanted, free_tokens // row_tokens, sparsest.size))
    if max_tokens is not None:
        count = min(count, int(used[sparsest].cumsum().searchsorted(max_tokens, side="right")))
    freed = np.sort(sparsest[:count])
    return freed, np.setdiff1d(rows, freed, assume_unique=True)
