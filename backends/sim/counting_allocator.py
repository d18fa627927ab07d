"""One pool for KV cache and finetuning, for a backend without bytes: tokens are counted by row."""

from __future__ import annotations

from harli_core.memory.geometry import GridGeometry
from harli_core.memory.provider import PageProvider
from harli_core.memory.row_pool import RowPool
from harli_core.memory.row_tokens import RowTokens


class CountingAllocator(RowPool):
    """Rows as in `UnifiedAllocator`; ``tokens`` says how full each is. Which slots they are in nobody here asks."""

    def __init__(self, geometry: GridGeometry, provider: PageProvider, pinned_tokens: int = 1) -> None:
        """Reserve and commit the whole grid; all of it is free for KV."""
        self.tokens = RowTokens(geometry, pinned_tokens)
        super().__init__(geometry, provider, self.tokens)
