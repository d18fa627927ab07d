"""Small tensors of finetuning: power-of-two allocation of 2 KiB granules (paper section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

from harli_core.errors import ConfigError, MemoryAccountingError


@dataclass(frozen=True, slots=True)
class BuddyStats:
    """What a pool has given out; waste is what rounding up to a power of two costs."""

    allocated_bytes: int
    requested_bytes: int
    internal_waste_bytes: int
    free_bytes: int
    largest_allocatable_bytes: int


class BuddyPool:
    """A range of bytes cut into power-of-two blocks; a freed block merges with its buddy as far as that is free.

    ::

        order 3   [              64K              ]
        order 2   [      32K      ][      32K     ]     the buddy of a block of n granules at granule g is g XOR n
        order 0   [g0][g1][g2]...

    A size that is no power of two is a row of ever smaller blocks. Of equal blocks the last one freed is reused first.
    Allocation and free take O(log size).
    """

    def __init__(self, size_bytes: int, granule_bytes: int = 2048) -> None:
        """Start empty; raises `ConfigError` unless ``size_bytes`` is a positive multiple of ``granule_bytes``."""
        if granule_bytes < 1 or size_bytes < granule_bytes or size_bytes % granule_bytes:
            raise ConfigError(f"a buddy pool of {size_bytes} bytes is no positive multiple of {granule_bytes} bytes")
        self.size_bytes = size_bytes
        self.granule_bytes = granule_bytes
        granules = size_bytes // granule_bytes
        self._free: list[dict[int, None]] = [{} for _ in range(granules.bit_length())]
        self._live: dict[int, tuple[int, int]] = {}  # granule -> (order, requested bytes)
        self._free_granules = granules
        self._requested_bytes = 0
        start = 0
        for order in reversed(range(granules.bit_length())):
            if granules >> order & 1:
                self._free[order][start] = None
                start += 1 << order

    def can_allocate(self, size_bytes: int) -> bool:
        """Whether ``allocate(size_bytes)`` would succeed."""
        return size_bytes >= 1 and self._order_with_room(self._order(size_bytes)) is not None

    def allocate(self, size_bytes: int) -> int:
        """Return the offset in bytes of a block for ``size_bytes``; raises `MemoryAccountingError` if none fits."""
        if size_bytes < 1:
            raise MemoryAccountingError(f"cannot allocate {size_bytes} bytes: at least 1 is needed")
        order = self._order(size_bytes)
        found = self._order_with_room(order)
        if found is None:
            largest = self.stats().largest_allocatable_bytes
            raise MemoryAccountingError(f"cannot allocate {size_bytes} bytes: the largest free block has {largest}")
        granule, _ = self._free[found].popitem()
        while found > order:
            found -= 1
            self._free[found][granule + (1 << found)] = None
        self._live[granule] = (order, size_bytes)
        self._free_granules -= 1 << order
        self._requested_bytes += size_bytes
        return granule * self.granule_bytes

    def free(self, offset_bytes: int) -> None:
        """Give the block at ``offset_bytes`` back; raises `MemoryAccountingError` if none is allocated there."""
        granule, rest = divmod(offset_bytes, self.granule_bytes)
        if rest or granule not in self._live:
            raise MemoryAccountingError(f"cannot free offset {offset_bytes}: no block is live there (freed twice?)")
        order, requested_bytes = self._live.pop(granule)
        self._free_granules += 1 << order
        self._requested_bytes -= requested_bytes
        while (buddy := granule ^ (1 << order)) in self._free[order]:
            del self._free[order][buddy]
            granule = min(granule, buddy)
            order += 1
        self._free[order][granule] = None

    def stats(self) -> BuddyStats:
        """Return the pool's figures now."""
        free_bytes = self._free_granules * self.granule_bytes
        allocated_bytes = self.size_bytes - free_bytes
        largest = max((1 << order for order, blocks in enumerate(self._free) if blocks), default=0)
        return BuddyStats(
            allocated_bytes=allocated_bytes,
            requested_bytes=self._requested_bytes,
            internal_waste_bytes=allocated_bytes - self._requested_bytes,
            free_bytes=free_bytes,
            largest_allocatable_bytes=largest * self.granule_bytes,
        )

    def check_integrity(self) -> None:
        """Raise `MemoryAccountingError` unless free and live blocks tile the pool and no two free buddies are apart."""
        free = [(granule, order) for order, blocks in enumerate(self._free) for granule in blocks]
        end = 0
        for granule, order in sorted(free + [(granule, order) for granule, (order, _) in self._live.items()]):
            if granule != end or granule % (1 << order):
                raise MemoryAccountingError(f"buddy pool: gap, overlap or misaligned block at granule {granule}")
            end = granule + (1 << order)
        if end * self.granule_bytes != self.size_bytes:
            raise MemoryAccountingError(f"buddy pool: blocks end at granule {end}, not at byte {self.size_bytes}")
        for granule, order in free:
            if granule ^ (1 << order) in self._free[order]:
                raise MemoryAccountingError(f"buddy pool: free buddies at granule {granule}, order {order}, not merged")
        if self._free_granules != sum(1 << order for _, order in free):
            raise MemoryAccountingError("buddy pool: free granules are miscounted")
        if self._requested_bytes != sum(requested for _, requested in self._live.values()):
            raise MemoryAccountingError("buddy pool: requested bytes are miscounted")

    def _order(self, size_bytes: int) -> int:
        """Log2 of the granules of the smallest block that holds ``size_bytes``."""
        return (-(-size_bytes // self.granule_bytes) - 1).bit_length()

    def _order_with_room(self, order: int) -> int | None:
        """Smallest order from ``order`` up that has a free block."""
        return next((larger for larger in range(order, len(self._free)) if self._free[larger]), None)
