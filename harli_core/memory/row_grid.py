"""Who owns each row of the grid."""

from __future__ import annotations

from typing import Literal

import numpy as np

from harli_core.errors import MemoryAccountingError
from harli_core.memory.token_slots import TokenSlots

RowState = Literal["kv", "free", "lent", "reclaiming"]
"""``kv`` holds tokens, ``free`` nothing, ``lent`` belongs to finetuning, ``reclaiming`` is on its way back."""

RowOwner = Literal["kv", "finetune"]


class RowGrid:
    """The state of each row; token use is read from `TokenSlots`, never kept twice.

    ::

        free --lend--> lent --begin_reclaim--> reclaiming --finish_reclaim--> free
          \\--first token--> kv --last token freed or moved--> free

    A reclaiming row still belongs to finetuning: KV gets no slot of it before `finish_reclaim`.
    """

    def __init__(self, slots: TokenSlots) -> None:
        """Start with the rows that ``slots`` withholds as lent (normally none)."""
        self._slots = slots
        self._reclaiming: set[int] = set()

    @property
    def rows_kv(self) -> int:
        """Rows that hold tokens, and row 0, which holds the pinned slots."""
        return self._slots.rows_in_use

    @property
    def rows_lent(self) -> int:
        """Rows that finetuning owns, the reclaiming ones included."""
        return self._slots.rows_withheld

    @property
    def rows_reclaiming(self) -> int:
        """Lent rows that are on their way back."""
        return len(self._reclaiming)

    @property
    def rows_free(self) -> int:
        """Rows that hold no token and are not lent."""
        return self._slots.geometry.rows - self.rows_kv - self.rows_lent

    def state(self, row: int) -> RowState:
        """Return the state of ``row``."""
        if row in self._reclaiming:
            return "reclaiming"
        if self._slots.is_withheld(row):
            return "lent"
        return "kv" if self._slots.row_used_tokens()[row] else "free"

    def owner(self, row: int) -> RowOwner | None:
        """Return who may write to ``row`` now; `None` for a free row."""
        state = self.state(row)
        if state == "free":
            return None
        return "kv" if state == "kv" else "finetune"

    def free_rows(self) -> tuple[int, ...]:
        """Rows that can be lent, ascending."""
        held = self._slots.row_used_tokens()
        held[list(self._slots.withheld_rows())] = 1
        return tuple(np.nonzero(held == 0)[0].tolist())

    def lent_rows(self) -> tuple[int, ...]:
        """Rows that finetuning may use, ascending, without the reclaiming ones."""
        return tuple(row for row in self._slots.withheld_rows() if row not in self._reclaiming)

    def reclaiming_rows(self) -> tuple[int, ...]:
        """Rows on their way back, ascending."""
        return tuple(sorted(self._reclaiming))

    def lend(self, row: int) -> None:
        """Turn a free row into a lent one; raises `MemoryAccountingError` for any other."""
        self._slots.withhold_row(row)

    def begin_reclaim(self, row: int) -> None:
        """Turn a lent row into a reclaiming one."""
        if row in self._reclaiming or not 0 <= row < self._slots.geometry.rows or not self._slots.is_withheld(row):
            raise MemoryAccountingError(f"cannot reclaim row {row}: it is not lent")
        self._reclaiming.add(row)

    def finish_reclaim(self, row: int) -> None:
        """Turn a reclaiming row into a free one."""
        if row not in self._reclaiming:
            raise MemoryAccountingError(f"cannot finish reclaiming row {row}: it is not being reclaimed")
        self._slots.return_row(row)
        self._reclaiming.remove(row)

    def check_integrity(self) -> None:
        """Raise `MemoryAccountingError` unless reclaiming rows are withheld from KV and the counts add up."""
        self._slots.check_integrity()
        stray = sorted(row for row in self._reclaiming if not self._slots.is_withheld(row))
        if stray:
            raise MemoryAccountingError(f"row grid: rows {stray} are being reclaimed but open to KV")
        if self.rows_free != len(self.free_rows()):
            raise MemoryAccountingError(f"row grid: {self.rows_free} rows counted free, {len(self.free_rows())} are")
