"""SGLang's token allocator on the books of the core: lowest slot first, rows lendable."""

from __future__ import annotations

from typing import Any

import numpy as np


def allocator_class(base: Any) -> Any:
    """SGLang's ``TokenToKVPoolAllocator`` (``base``) on the `TokenSlots` of the pool that it is given.

    Slots of lent rows are not available; SGLang's own totals follow with `lent_tokens`. SGLang hands tensors on the
    device around; the books are on the host, so freeing copies the slots of a finished request back (their work is over
    by then), and allocating sends them out in stream order.
    """

    class HarliTokenAllocator(base):  # type: ignore[misc]
        def __init__(self, size: int, dtype: Any, device: str, kvcache: Any, need_sort: bool) -> None:
            self.memory = kvcache.harli
            self.slots = self.memory.allocator.slots
            super().__init__(size, dtype, device, kvcache, need_sort)

        @property
        def lent_tokens(self) -> int:
            return int(self.slots.rows_withheld * self.slots.geometry.row_tokens)

        def clear(self) -> None:
            """Free every slot that a request holds; lent rows stay lent."""
            rows = self.slots.geometry.rows
            held = [row for row in range(rows) if not self.slots.is_withheld(row)]
            used = self.slots.used_slots(np.asarray(held, dtype=np.int64))
            if used.size:
                self.slots.free(used)
            self.free_pages = self.release_pages = None
            self.is_not_in_free_group = True
            self.free_group: list[Any] = []

        def available_size(self) -> int:
            return int(self.slots.free_tokens)

        def alloc(self, need_size: int) -> Any:
            import torch

            if not self.slots.can_allocate(need_size):
                return None
            taken = torch.from_numpy(self.slots.allocate(need_size).astype(np.int64))
            return taken.to(self.device, non_blocking=True)

        def free(self, free_index: Any) -> None:
            if free_index.numel() == 0:
                return
            if not self.is_not_in_free_group:
                self.free_group.append(free_index)
                return
            self.slots.free(free_index.cpu().numpy().astype(np.int32))

        def backup_state(self) -> Any:
            raise NotImplementedError("speculative decoding is not supported on the unified pool")

        def restore_state(self, state: Any) -> None:
            raise NotImplementedError("speculative decoding is not supported on the unified pool")

    return HarliTokenAllocator
