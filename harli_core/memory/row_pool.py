"""Rows that change hands between KV and finetuning (paper section 4): lending, returning, and who owns what."""

from __future__ import annotations

from collections.abc import Sequence

from harli_core.errors import MemoryAccountingError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.lent_blocks import LentBlocks
from harli_core.memory.provider import PageProvider
from harli_core.memory.row_grid import RowGrid, TokenUse
from harli_core.types import MemoryView


class RowPool:
    """The rows of one GPU's pool; how tokens lie within them is ``use``'s to know.

    ::

        rows low  ->  high
        [0 kv][kv][kv .][free][reclaiming][lent, empty][lent #][lent ##]
         KV grows upwards ->                     <- finetuning fills downwards

    A row changes hands only when nothing lives in it: `lend_rows` takes free rows, `begin_return` lent rows without a
    block. The provider is called first, so that a failing driver leaves the books as they were. Row 0 is never lent.
    """

    def __init__(self, geometry: GridGeometry, provider: PageProvider, use: TokenUse) -> None:
        """Reserve and commit the whole grid; all of it is free for KV."""
        self.geometry = geometry
        self.grid = RowGrid(use)
        self.finetune_blocks = LentBlocks(geometry)
        self._use = use
        self._provider = provider
        self._rows, self._row_tokens = geometry.rows, geometry.row_tokens
        self._row_bytes, self._token_bytes = geometry.row_bytes, geometry.token_bytes
        provider.reserve(geometry)
        for row in range(geometry.rows):
            provider.commit_row(row)

    def lend_rows(self, rows_wanted: int) -> int:
        """Lend up to ``rows_wanted`` free rows to finetuning, highest first, and return how many it were."""
        chosen = self.grid.free_rows()[::-1][: max(0, rows_wanted)]
        for row in chosen:
            self._provider.lend_row(row)
            self.grid.lend(row)
            self.finetune_blocks.add_row(row)
        return len(chosen)

    def rows_returnable(self) -> tuple[int, ...]:
        """Lent rows in which no block is allocated, ascending."""
        return self.finetune_blocks.empty_rows()

    def begin_return(self, rows_wanted: int) -> tuple[int, ...]:
        """Mark up to ``rows_wanted`` returnable rows, lowest first, as reclaiming: neither side may use them now."""
        chosen = self.rows_returnable()[: max(0, rows_wanted)]
        for row in chosen:
            self.finetune_blocks.remove_row(row)
            self.grid.begin_reclaim(row)
        return chosen

    def finish_return(self, rows: Sequence[int]) -> None:
        """Open ``rows`` to KV, once the work that used them is fenced; raises unless all of them are reclaiming."""
        stray = sorted(set(rows).difference(self.grid.reclaiming_rows()))
        if stray or len(set(rows)) != len(rows):
            raise MemoryAccountingError(f"cannot finish returning rows {list(rows)}: not reclaiming, or given twice")
        for row in rows:
            self._provider.return_row(row)
            self.grid.finish_reclaim(row)

    @property
    def free_but_unlendable_bytes(self) -> int:
        """Bytes of the free slots that sit in rows with tokens (or in row 0, which is never lent)."""
        use = self._use
        rows_free = self._rows - use.rows_in_use - use.rows_withheld
        return (use.free_tokens - rows_free * self._row_tokens) * self._token_bytes

    def view(self) -> MemoryView:
        """Return what a policy may see; reclaiming rows count as lent, row 0 as a KV row."""
        use = self._use
        rows_kv, rows_lent, free_tokens = use.rows_in_use, use.rows_withheld, use.free_tokens
        rows_free = self._rows - rows_kv - rows_lent
        return MemoryView(
            self._row_tokens,
            self._row_bytes,
            self._rows,
            rows_kv,
            rows_lent,
            rows_free,
            self.grid.rows_reclaiming,
            use.used_tokens,
            free_tokens,
            (free_tokens - rows_free * self._row_tokens) * self._token_bytes,
        )

    def release(self) -> None:
        """Give the physical memory back; the pool must not be used after that."""
        self._provider.release()

    def check_integrity(self) -> None:
        """Check every part and that they agree on who holds which row; raises `MemoryAccountingError`."""
        self.grid.check_integrity()
        self.finetune_blocks.check_integrity()
        if self.finetune_blocks.rows() != self.grid.lent_rows():
            raise MemoryAccountingError(
                f"row pool: lent rows {self.grid.lent_rows()}, finetuning has {self.finetune_blocks.rows()}"
            )
        view = self.view()
        if view.rows_total != view.rows_kv + view.rows_lent + view.rows_free or view.free_but_unlendable_bytes < 0:
            raise MemoryAccountingError(f"row pool: counts do not add up in {view}")
