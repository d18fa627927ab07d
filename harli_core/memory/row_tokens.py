"""How many tokens each row holds, for a backend that has no bytes: the same rows as `TokenSlots`, without the slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from harli_core.errors import ConfigError, MemoryAccountingError
from harli_core.memory.compaction import choose_rows
from harli_core.memory.geometry import GridGeometry

Pieces = list[tuple[int, int]]
"""(row, tokens), rows ascending, in the order in which the tokens were asked for."""


@dataclass(frozen=True, slots=True)
class RowMoves:
    """A compaction by rows: the ``tokens`` of each source row, in their order, go to its pieces."""

    moves: Mapping[int, Pieces]
    tokens: int

    @property
    def freed_rows(self) -> tuple[int, ...]:
        """The rows that it empties, ascending."""
        return tuple(self.moves)


class RowTokens:
    """Tokens go into the lowest row with room, and leave the rows they are in: which slot in the row does not matter.

    ::

        row            0        1       2        3        4
        tokens       3 + P    4 of 4  2 of 4   withheld   0      row_tokens = 4, P pinned
                                        ^ the next token

    Whatever `TokenSlots` says of rows after the same calls, this says too, at the cost of a few list entries a call;
    only a compaction may spread the tokens of one row differently over the rows that take them.
    """

    def __init__(self, geometry: GridGeometry, pinned_tokens: int = 1) -> None:
        """Start empty but for the pinned slots; raises `ConfigError` unless 1..row_tokens are pinned."""
        if not 1 <= pinned_tokens <= geometry.row_tokens:
            raise ConfigError(f"pinned_tokens is {pinned_tokens}, must be 1 to {geometry.row_tokens} (a row)")
        self.geometry = geometry
        self.pinned_tokens = pinned_tokens
        self.free_tokens = geometry.capacity_tokens - pinned_tokens
        self.rows_in_use = 1
        self._row_tokens = geometry.row_tokens
        self._free = [geometry.row_tokens] * geometry.rows
        self._free[0] -= pinned_tokens
        self._withheld: set[int] = set()
        self._lowest = 0  # no row below has room

    @property
    def used_tokens(self) -> int:
        """Tokens of requests."""
        rows = self.geometry.rows - len(self._withheld)
        return rows * self._row_tokens - self.pinned_tokens - self.free_tokens

    @property
    def rows_withheld(self) -> int:
        """Rows taken out by `withhold_row`."""
        return len(self._withheld)

    def is_withheld(self, row: int) -> bool:
        """Whether ``row`` is withheld."""
        return row in self._withheld

    def withheld_rows(self) -> tuple[int, ...]:
        """All withheld rows, ascending."""
        return tuple(sorted(self._withheld))

    def row_used_tokens(self) -> NDArray[np.int64]:
        """Tokens in each row, pinned ones included, 0 in withheld rows."""
        used = self._row_tokens - np.array(self._free, dtype=np.int64)
        used[list(self._withheld)] = 0
        return used

    def allocate(self, tokens: int) -> Pieces:
        """Take ``tokens`` into the lowest rows with room; raises `MemoryAccountingError` if there is too little."""
        if not 0 <= tokens <= self.free_tokens:
            raise MemoryAccountingError(f"cannot allocate {tokens} token slots: {self.free_tokens} are free")
        free, row, whole, left = self._free, self._lowest, self._row_tokens, tokens
        pieces: Pieces = []
        while left:
            room = free[row]
            if room:
                if room == whole:
                    self.rows_in_use += 1
                if room >= left:
                    free[row] = room - left
                    pieces.append((row, left))
                    break
                free[row] = 0
                left -= room
                pieces.append((row, room))
            row += 1
        self._lowest = row
        self.free_tokens -= tokens
        return pieces

    def free(self, held: Mapping[int, int]) -> None:
        """Give tokens back, by row; raises `MemoryAccountingError` for more than a row holds of requests, or none."""
        if not held:
            return
        lowest = min(held)
        if lowest < 0 or max(held) >= len(self._free) or min(held.values()) < 1 or not self._withheld.isdisjoint(held):
            self._refuse(held)
        free, whole = self._free, self._row_tokens
        rooms = [free[row] + tokens for row, tokens in held.items()]
        if max(rooms) > whole or (lowest == 0 and free[0] + held[0] > whole - self.pinned_tokens):
            self._refuse(held)
        for row, room in zip(held, rooms, strict=True):
            free[row] = room
        self.rows_in_use -= rooms.count(whole)
        self._lowest = min(self._lowest, lowest)
        self.free_tokens += sum(held.values())

    def withhold_row(self, row: int) -> None:
        """Take an empty row out of use, so that it can be lent."""
        if not 0 <= row < self.geometry.rows:
            raise MemoryAccountingError(f"cannot withhold row {row}: the grid has rows 0 to {self.geometry.rows - 1}")
        if row in self._withheld:
            raise MemoryAccountingError(f"cannot withhold row {row}: it is withheld already")
        if self._free[row] != self._row_tokens:
            taken = self._row_tokens - self._free[row]
            raise MemoryAccountingError(f"cannot withhold row {row}: {taken} of its slots are in use or pinned")
        self._withheld.add(row)
        self._free[row] = 0
        self.free_tokens -= self._row_tokens

    def return_row(self, row: int) -> None:
        """Put a withheld row back into use, empty."""
        if row not in self._withheld:
            raise MemoryAccountingError(f"cannot return row {row}: it is not withheld")
        self._withheld.remove(row)
        self._free[row] = self._row_tokens
        self.free_tokens += self._row_tokens
        self._lowest = min(self._lowest, row)

    def compact(self, rows_wanted: int, max_tokens: int | None = None) -> RowMoves:
        """Empty up to ``rows_wanted`` rows more, chosen as `plan_compaction` chooses them."""
        used = self.row_used_tokens()
        freed, kept = choose_rows(used, self._row_tokens, rows_wanted, max_tokens)
        rows: list[int] = kept.tolist()
        targets = [(row, self._free[row]) for row in rows if self._free[row]]
        moves: dict[int, Pieces] = {}
        for row in freed.tolist():
            left = int(used[row])
            pieces: Pieces = []
            while left:
                target, room = targets[0]
                taken = min(room, left)
                pieces.append((target, taken))
                self._free[target] -= taken
                left -= taken
                targets[:1] = [(target, room - taken)] if room > taken else []
            moves[row] = pieces
            self._free[row] = self._row_tokens
            self._lowest = min(self._lowest, row)
        self.rows_in_use -= len(moves)
        return RowMoves(moves, int(used[freed].sum()))

    def check_integrity(self) -> None:
        """Recount everything from the rows; raises `MemoryAccountingError` naming what is inconsistent."""
        held = range(self.geometry.rows)
        open_rows = [row for row in held if row not in self._withheld]
        checks = {
            "a row has more room than a row": all(0 <= room <= self._row_tokens for room in self._free),
            "a pinned slot is free": self._free[0] <= self._row_tokens - self.pinned_tokens,
            "a withheld row has free slots": not any(self._free[row] for row in self._withheld),
            "row 0 is withheld": 0 not in self._withheld,
            "free slots are miscounted": sum(self._free) == self.free_tokens,
            "rows in use are miscounted": sum(self._free[row] < self._row_tokens for row in open_rows)
            == self.rows_in_use,
            "a row with room lies below the search hint": not any(self._free[: self._lowest]),
        }
        wrong = [text for text, right in checks.items() if not right]
        if wrong:
            raise MemoryAccountingError("row tokens: " + "; ".join(wrong))

    def _refuse(self, held: Mapping[int, int]) -> NoReturn:
        for row, tokens in held.items():
            in_use = self._in_use(row)
            if not 1 <= tokens <= in_use:
                raise MemoryAccountingError(f"cannot free {tokens} tokens of row {row}: requests hold {in_use} there")
        raise AssertionError("what is refused is wrong somewhere")

    def _in_use(self, row: int) -> int:
        """Tokens of requests in ``row``; 0 where there is no such row, or a lent one."""
        if not 0 <= row < self.geometry.rows or row in self._withheld:
            return 0
        return self._row_tokens - self._free[row] - (self.pinned_tokens if row == 0 else 0)
