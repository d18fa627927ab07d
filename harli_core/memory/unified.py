"""One pool for KV cache and finetuning (paper section 4): tokens, rows and blocks under one set of rules."""

from __future__ import annotations

from collections.abc import Sequence

from harli_core.errors import MemoryAccountingError
from harli_core.memory.compaction import Compaction, plan_compaction
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.lent_blocks import LentBlocks
from harli_core.memory.provider import PageProvider
from harli_core.memory.row_grid import RowGrid
from harli_core.memory.token_slots import Slots, TokenSlots
from harli_core.types import MemoryView


class UnifiedAllocator:
    """The books of one GPU's pool; it decides, the `PageProvider` has the bytes.

    ::

        rows low  ->  high
        [0 kv][kv][kv .][free][reclaiming][lent, empty][lent #][lent ##]
         KV grows upwards ->                     <- finetuning fills downwards

    A row changes hands only when nothing lives in it: `lend_rows` takes free rows, `begin_return` lent rows without a
    block. The provider is called first, so that a failing driver leaves the books as they were. Row 0 is never lent.
    """

    def __init__(self, geometry: GridGeometry, provider: PageProvider, pinned_tokens: int = 1) -> None:
        """Reserve and commit the whole grid; all of it is free for KV."""
        self.geometry = geometry
        self.slots = TokenSlots(geometry, pinned_tokens)
        self.grid = RowGrid(self.slots)
        self.finetune_blocks = LentBlocks(geometry)
        self._provider = provider
        provider.reserve(geometry)
        for row in range(geometry.rows):
            provider.commit_row(row)

    def can_allocate_tokens(self, tokens: int) -> bool:
        """Whether ``allocate_tokens(tokens)`` would succeed without reclaiming."""
        return self.slots.can_allocate(tokens)

    def allocate_tokens(self, tokens: int) -> Slots:
        """Take the lowest ``tokens`` free slots; raises `MemoryAccountingError` if too few are free."""
        return self.slots.allocate(tokens)

    def free_tokens(self, slots: Slots) -> None:
        """Give token slots back; raises `MemoryAccountingError` if one is not in use."""
        self.slots.free(slots)

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

    def compact(self, rows_wanted: int, max_tokens: int | None = None) -> Compaction:
        """Empty up to ``rows_wanted`` rows more in the books, and return the copies that the backend has to make."""
        compaction = plan_compaction(self.slots, rows_wanted, max_tokens)
        self.slots.apply(compaction)
        return compaction

    @property
    def free_but_unlendable_bytes(self) -> int:
        """Bytes of the free slots that sit in rows with tokens (or in row 0, which is never lent)."""
        return (self.slots.free_tokens - self.grid.rows_free * self.geometry.row_tokens) * self.geometry.token_bytes

    def view(self) -> MemoryView:
        """Return what a policy may see; reclaiming rows count as lent, row 0 as a KV row."""
        geometry, slots = self.geometry, self.slots
        rows_free = self.grid.rows_free
        return MemoryView(
            geometry.row_tokens,
            geometry.row_bytes,
            geometry.rows,
            slots.rows_in_use,
            slots.rows_withheld,
            rows_free,
            self.grid.rows_reclaiming,
            slots.used_tokens,
            slots.free_tokens,
            (slots.free_tokens - rows_free * geometry.row_tokens) * geometry.token_bytes,
        )

    def release(self) -> None:
        """Give the physical memory back; the allocator must not be used after that."""
        self._provider.release()

    def check_integrity(self) -> None:
        """Check every part and that they agree on who holds which row; raises `MemoryAccountingError`."""
        self.grid.check_integrity()
        self.finetune_blocks.check_integrity()
        if self.finetune_blocks.rows() != self.grid.lent_rows():
            raise MemoryAccountingError(
                f"unified allocator: lent rows {self.grid.lent_rows()}, finetuning has {self.finetune_blocks.rows()}"
            )
        view = self.view()
        if view.rows_total != view.rows_kv + view.rows_lent + view.rows_free or view.free_but_unlendable_bytes < 0:
            raise MemoryAccountingError(f"unified allocator: counts do not add up in {view}")
