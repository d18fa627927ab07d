"""Sizes that no machine has, or that would wrap round, are refused before anything is built or reserved."""

from __future__ import annotations

import pytest

from backends.cuda._native import HostDriver, PagePool, TensorSpace
from harli_core.errors import ConfigError, DriverCallError, OutOfMemoryError
from tests.native.driver_contract import backed, give_back
from tests.native.programs import passes

MIB = 2**20


@pytest.mark.parametrize(
    ("rows", "columns", "block_bytes", "why"),
    [
        (2**31, 2**31, 2 * MIB, "too many blocks"),
        (2**20, 2**10, 2 * MIB, "too many blocks"),
        (2**32, 1, 4096, "too many blocks"),
        (2**63, 2**63, 2**63, "too many blocks"),
        (3, 4, 2**62 + 2 * MIB, "too large"),
        (2**20, 1, 2**44, "too large"),
        (1, 1, 2**63, "too large"),
        (1, 0, 4096, "at least one row, one column"),
        (2, 2, 6144, "no multiple of the granularity"),
    ],
)
def test_impossible_grid(rows: int, columns: int, block_bytes: int, why: str) -> None:
    """A grid too large to count, to address or to keep tables of is a `ConfigError`, and nothing was reserved."""
    driver = HostDriver(4096)
    with pytest.raises(ConfigError, match=why):
        PagePool(driver, rows, columns, block_bytes, True)
    assert driver.use() == (0, 0, 0, 0)
    assert driver.calls("reserve") == 0


def test_largest_grid_needs_little_memory() -> None:
    """The largest grid that is accepted has tables that fit in a small machine; so has the tensor space over it."""
    passes(
        """
        import resource
        from backends.cuda._native import HostDriver, PagePool, TensorSpace
        pool = PagePool(HostDriver(4096), 2**20, 2, 4096, True)
        space = TensorSpace(pool, 4)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1024 * 1024
        """
    )


@pytest.mark.parametrize("size", [2**64 - 2 * MIB, 2**63, 2**47])
def test_driver_does_not_wrap_round(size: int) -> None:
    """Reserving or creating nearly all of 64 bits fails, and what was there before keeps its bytes."""
    driver = HostDriver()
    at, handles = backed(driver)
    driver.fill(at, 0x7777, 2 * MIB)
    for wrong in (driver.reserve, driver.create, lambda size: driver.map(at, size, handles[0])):
        with pytest.raises(DriverCallError, match="more than any address space has"):
            wrong(size)
    with pytest.raises(DriverCallError, match=r"not within one reservation|not a reserved"):
        driver.map(2**64 - 2 * MIB, 2 * MIB, handles[0])
    driver.unmap(at, 2 * MIB)
    driver.map(at, 2 * MIB, handles[0])
    driver.set_access(at, 2 * MIB)
    import ctypes

    assert ctypes.string_at(at + 2 * MIB - 2, 2) == b"\x77\x77"
    give_back(driver, at, handles)
    assert driver.use() == (0, 0, 0, 0)


def test_created_memory_is_bounded_together() -> None:
    """Many large handles cannot push the file behind them past its largest size."""
    driver = HostDriver()
    handles = [driver.create(2**45)]
    with pytest.raises(DriverCallError, match="out of memory"):
        handles += [driver.create(2**45) for _ in range(3)]
    for handle in handles:
        driver.release(handle)


@pytest.mark.parametrize(
    ("rows", "columns", "block_bytes", "granule_bytes", "why"),
    [
        (2, 2, 2**31, 1, "take larger granules"),
        (2, 2, 4096, 0, "do not divide"),
        (2, 2, 3 * 4096, 4096, "power of two granules"),
        (2, 2, 2**33, 2**32, "4 GiB or more"),
    ],
)
def test_impossible_granules(rows: int, columns: int, block_bytes: int, granule_bytes: int, why: str) -> None:
    """Granules that do not divide a block evenly, or of which there are too many to count, are refused."""
    pool = PagePool(HostDriver(4096), rows, columns, block_bytes, True)
    with pytest.raises(ConfigError, match=why):
        TensorSpace(pool, granule_bytes)


def test_request_larger_than_32_bits_is_counted_whole() -> None:
    """With granules of one byte, 4 GiB and a byte are not taken for a byte."""
    pool = PagePool(HostDriver(4096), 2, 1, 2**30, True)
    space = TensorSpace(pool, 1)
    for row in range(2):
        pool.commit_row(row)
        pool.lend_row(row)
        space.add_row(row)
    for size in (2**32 + 1, 2**31 + 1, 2**63, 2**64 - 1):
        with pytest.raises(OutOfMemoryError, match=f"no room for {size} bytes"):
            space.allocate(size, 0)
    assert space.size_of(space.allocate(2**31, 0)) == 2**31
    space.check_integrity()
