"""Who owns each row of the grid."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import MemoryAccountingError
from harli_core.memory.geometry import GridGeometry

RowState = Literal["kv", "free", "lent", "reclaiming"]
"""``kv`` holds tokens, ``free`` nothing, ``lent`` belongs to finetuning, ``reclaiming`` is on its way back."""

RowOwner = Literal["kv", "finetune"]


class TokenUse(Protocol):
    """How many tokens each row holds: `TokenSlots`, which knows the slot of each, or `RowTokens`, which counts them."""

    @property
    def geometry(self) -> GridGeometry:
        """The grid."""
        ...

    @property
    def free_tokens(self) -> int:
        """Tokens that can be taken in now."""
        ...

    @property
    def used_tokens(self) -> int:
        """Tokens of requests."""
        ...

    @property
    def rows_in_use(self) -> int:
        """Rows that hold a token or a pinned slot."""
        ...

    @property
    def rows_withheld(self) -> int:
        """Rows that take no tokens, as they are lent."""
        ...

    def is_withheld(self, row: int) -> bool:
        """Whether ``row`` is withheld."""
        ...

    def withheld_rows(self) -> tuple[int, ...]:
        """All withheld rows, ascending."""
        ...

    def row_used_tokens(self) -> NDArray[np.int64]:
        """Slots that are taken in each row, pinned ones included, 0 in withheld rows."""
        ...

    def withhold_row(self, row: int) -> None:
        """Take an empty row out of use; raises `MemoryAccountingError` for any other."""
        ...

    def return_row(self, row: int) -> None:
        """Put a withheld row back into use."""
        ...

    def check_integrity(self) -> None:
        """Recount; raises `MemoryAccountingError`."""
        ...


class RowGrid:
    """The state of each row; token use is read from a `TokenUse`, never kept twice.

    ::

        free --lend--> lent --begin_reclaim--> reclaiming --finish_reclaim--> free
          \\--first token--> kv --last token freed or moved--> free

    A reclaiming row still belongs to finetuning: KV gets no slot of it before `finish_reclaim`.
    """

    def __init__(self, use: TokenUse) -> None:
        """Start with the rows that ``use`` withholds as lent (normally none)."""
        self._use = use
        self._reclaiming: set[int] = set()

    @property
    def rows_kv(self) -> int:
        """Rows that hold tokens, and row 0, which holds the pinned slots."""
        return self._use.rows_in_use

    @property
    def rows_lent(self) -> int:
        """Rows that finetuning owns, the reclaiming ones included."""
        return self._use.rows_withheld

    @property
    def rows_reclaiming(self) -> int:
        """Lent rows that are on their way back."""
        return len(self._reclaiming)

    @property
    def rows_free(self) -> int:
        """Rows that hold no token and are not lent."""
        return self._use.geometry.rows - self.rows_kv - self.rows_lent

    def state(self, row: int) -> RowState:
        """Return the state of ``row``."""
        if row in self._reclaiming:
            return "reclaiming"
        if self._use.is_withheld(row):
            return "lent"
        return "kv" if self._use.row_used_tokens()[row] else "free"

    def owner(self, row: int) -> RowOwner | None:
        """Return who may write to ``row`` now; `None` for a free row."""
        state = self.state(row)
        if state == "free":
            return None
        return "kv" if state == "kv" else "finetune"

    def free_rows(self) -> tuple[int, ...]:
        """Rows that can be lent, ascending."""
        held = self._use.row_used_tokens()
        held[list(self._use.withheld_rows())] = 1
        return tuple(np.nonzero(held == 0)[0].tolist())

    def lent_rows(self) -> tuple[int, ...]:
        """Rows that finetuning may use, ascending, without the reclaiming ones."""
        return tuple(row for row in self._use.withheld_rows() if row not in self._reclaiming)

    def reclaiming_rows(self) -> tuple[int, ...]:
        """Rows on their way back, ascending."""
        return tuple(sorted(self._reclaiming))

    def lend(self, row: int) -> None:
        """Turn a free row into a lent one; raises `MemoryAccountingError` for any other."""
        self._use.withhold_row(row)

    def begin_reclaim(self, row: int) -> None:
        """Turn a lent row into a reclaiming one."""
        if row in self._reclaiming or not 0 <= row < self._use.geometry.rows or not self._use.is_withheld(row):
            raise MemoryAccountingError(f"cannot reclaim row {row}: it is not lent")
        self._reclaiming.add(row)

    def finish_reclaim(self, row: int) -> None:
        """Turn a reclaiming row into a free one."""
        if row not in self._reclaiming:
            raise MemoryAccountingError(f"cannot finish reclaiming row {row}: it is not being reclaimed")
        self._use.return_row(row)
        self._reclaiming.remove(row)

    def check_integrity(self) -> None:
        """Raise `MemoryAccountingError` unless reclaiming rows are withheld from KV and the counts add up."""
        self._use.check_integrity()
        stray = sorted(row for row in self._reclaiming if not self._use.is_withheld(row))
        if stray:
            raise MemoryAccountingError(f"row grid: rows {stray} are being reclaimed but open to KV")
        if self.rows_free != len(self.free_rows()):
            raise MemoryAccountingError(f"row grid: {self.rows_free} rows counted free, {len(self.free_rows())} are")
