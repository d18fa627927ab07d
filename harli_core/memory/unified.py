"""One pool for KV cache and finetuning (paper section 4): tokens, rows and blocks under one set of rules."""

from __future__ import annotations

from harli_core.memory.compaction import Compaction, plan_compaction
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.provider import PageProvider
from harli_core.memory.row_pool import RowPool
from harli_core.memory.token_slots import Slots, TokenSlots


class UnifiedAllocator(RowPool):
    """The books of one GPU's pool, down to the slot of every token; the `PageProvider` has the bytes."""

    def __init__(self, geometry: GridGeometry, provider: PageProvider, pinned_tokens: int = 1) -> None:
        """Reserve and commit the whole grid; all of it is free for KV."""
        self.slots = TokenSlots(geometry, pinned_tokens)
        super().__init__(geometry, provider, self.slots)

    def can_allocate_tokens(self, tokens: int) -> bool:
        """Whether ``allocate_tokens(tokens)`` would succeed without reclaiming."""
        return self.slots.can_allocate(tokens)

    def allocate_tokens(self, tokens: int) -> Slots:
        """Take the lowest ``tokens`` free slots; raises `MemoryAccountingError` if too few are free."""
        return self.slots.allocate(tokens)

    def free_tokens(self, slots: Slots) -> None:
        """Give token slots back; raises `MemoryAccountingError` if one is not in use."""
        self.slots.free(slots)

    def compact(self, rows_wanted: int, max_tokens: int | None = None) -> Compaction:
        """Empty up to ``rows_wanted`` rows more in the books, and return the copies that the backend has to make."""
        compaction = plan_compaction(self.slots, rows_wanted, max_tokens)
        self.slots.apply(compaction)
        return compaction
