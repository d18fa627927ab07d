"""The buddy pool tiles its bytes with live and free blocks, and merges what can be merged."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harli_core.errors import ConfigError, MemoryAccountingError
from harli_core.memory.buddy import BuddyPool, BuddyStats

KIB = 1024


def test_sizes_round_up_to_powers_of_two_granules() -> None:
    """1 byte takes 2 KiB, 2 KiB + 1 takes 4 KiB, 9 KiB takes 16 KiB; the waste is counted."""
    pool = BuddyPool(64 * KIB)
    for size in (1, 2 * KIB + 1, 9 * KIB):
        pool.allocate(size)
    assert pool.stats() == BuddyStats(
        allocated_bytes=22 * KIB,
        requested_bytes=11 * KIB + 2,
        internal_waste_bytes=11 * KIB - 2,
        free_bytes=42 * KIB,
        largest_allocatable_bytes=32 * KIB,
    )


def test_buddies_merge_back_to_the_whole() -> None:
    """After every block is freed, in any order, the whole pool can be allocated at once."""
    pool = BuddyPool(32 * KIB)
    offsets = [pool.allocate(2 * KIB) for _ in range(16)]
    assert sorted(offsets) == [2 * KIB * i for i in range(16)]
    for offset in offsets[::2] + offsets[1::2]:
        pool.free(offset)
    assert pool.allocate(32 * KIB) == 0


def test_neighbours_that_are_no_buddies_do_not_merge() -> None:
    """Granules 1 and 2 are adjacent but belong to different pairs."""
    pool = BuddyPool(8 * KIB)
    for offset in [pool.allocate(1) for _ in range(4)]:
        if offset in (2 * KIB, 4 * KIB):
            pool.free(offset)
    assert pool.stats().largest_allocatable_bytes == 2 * KIB


def test_size_that_is_no_power_of_two() -> None:
    """Ten KiB are a block of 8 and one of 2; nothing lies beyond the end."""
    pool = BuddyPool(10 * KIB)
    assert pool.allocate(8 * KIB) == 0
    assert pool.allocate(1) == 8 * KIB
    assert not pool.can_allocate(1)
    pool.free(8 * KIB)
    pool.free(0)
    pool.check_integrity()


def test_exhaustion_names_the_largest_block() -> None:
    """A request that does not fit says what would."""
    pool = BuddyPool(8 * KIB)
    pool.allocate(1)
    with pytest.raises(MemoryAccountingError, match="cannot allocate 8192 bytes: the largest free block has 4096"):
        pool.allocate(8 * KIB)
    with pytest.raises(MemoryAccountingError, match="cannot allocate 0 bytes"):
        pool.allocate(0)


def test_only_live_offsets_can_be_freed() -> None:
    """A double free, an offset inside a block and one between granules are refused."""
    pool = BuddyPool(8 * KIB)
    offset = pool.allocate(4 * KIB)
    for bad in (offset + 2 * KIB, offset + 1, -1):
        with pytest.raises(MemoryAccountingError, match=f"cannot free offset {bad}"):
            pool.free(bad)
    pool.free(offset)
    with pytest.raises(MemoryAccountingError, match="freed twice"):
        pool.free(offset)


@pytest.mark.parametrize("size", [0, 2047, 3 * KIB])
def test_odd_pool_sizes_are_refused(size: int) -> None:
    """A pool is a positive multiple of its granule."""
    with pytest.raises(ConfigError):
        BuddyPool(size)


class BuddyMachine(RuleBasedStateMachine):
    """Random use against a dictionary from offset to size."""

    @initialize(granules=st.integers(1, 40))
    def start(self, granules: int) -> None:
        """Begin with an empty pool of 16-byte granules."""
        self.pool = BuddyPool(granules * 16, granule_bytes=16)
        self.live: dict[int, tuple[int, int]] = {}

    @staticmethod
    def rounded(size: int) -> int:
        """Bytes that a request takes."""
        taken = 16
        while taken < size:
            taken *= 2
        return taken

    def aligned_free(self, taken: int) -> bool:
        """Whether an aligned range of ``taken`` bytes is free."""
        used = {byte for start, (_, length) in self.live.items() for byte in range(start, start + length, 16)}
        starts = range(0, self.pool.size_bytes - taken + 1, taken)
        return any(used.isdisjoint(range(start, start + taken, 16)) for start in starts)

    @rule(size=st.integers(1, 300))
    def allocate(self, size: int) -> None:
        """A request succeeds exactly if an aligned power of two is free, and gets one that nobody has."""
        taken = self.rounded(size)
        fits = self.aligned_free(taken)
        assert self.pool.can_allocate(size) == fits
        if not fits:
            with pytest.raises(MemoryAccountingError):
                self.pool.allocate(size)
            return
        offset = self.pool.allocate(size)
        assert offset % taken == 0
        assert 0 <= offset <= self.pool.size_bytes - taken
        for start, (_, length) in self.live.items():
            assert start + length <= offset or offset + taken <= start
        self.live[offset] = (size, taken)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A live block is freed once."""
        offset = data.draw(st.sampled_from(sorted(self.live)))
        self.pool.free(offset)
        del self.live[offset]
        with pytest.raises(MemoryAccountingError):
            self.pool.free(offset)

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Bytes allocated, requested and wasted are those of the model."""
        self.pool.check_integrity()
        stats = self.pool.stats()
        assert stats.requested_bytes == sum(size for size, _ in self.live.values())
        assert stats.allocated_bytes == sum(taken for _, taken in self.live.values())
        assert stats.internal_waste_bytes == stats.allocated_bytes - stats.requested_bytes
        assert stats.allocated_bytes + stats.free_bytes == self.pool.size_bytes
        largest = stats.largest_allocatable_bytes
        assert (largest == 0) == (stats.free_bytes == 0)
        assert not self.aligned_free(max(16, 2 * largest))


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None, database=None)
