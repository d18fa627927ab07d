"""In which order physical blocks are created, seen in the host driver's memory, which it hands out front to back."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.cuda._native import HostDriver, PagePool
from backends.cuda.memory.provider import Lending, NativeProvider
from harli_core.errors import DriverCallError, MemoryAccountingError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator

BLOCK = 8192
LENDINGS: tuple[Lending, ...] = ("alias", "remap")


def physical(address: int) -> int:
    """Where in the host driver's physical memory a mapped address lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_, name = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            assert "memfd:harli" in name, line
            return int(offset, 16) + address - begin
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("lending", LENDINGS)
@pytest.mark.parametrize(("rows", "columns"), [(5, 4), (6, 1)], ids=["per-layer", "page-major"])
def test_a_column_is_one_run_of_physical_memory(lending: Lending, rows: int, columns: int) -> None:
    """All blocks of a column are created before the next column's: a sweep over a layer's K goes through them in order."""
    provider = NativeProvider(HostDriver(4096), lending)
    memory = UnifiedAllocator(GridGeometry(4, columns, rows, BLOCK), provider)
    found = [physical(provider.pool.kv_address(column, row)) for column in range(columns) for row in range(rows)]
    assert found == [BLOCK * place for place in range(rows * columns)]
    memory.release()


@pytest.mark.parametrize("lending", LENDINGS)
def test_committing_creates_nothing_any_more(lending: Lending) -> None:
    """Every block is created once, when the grid is reserved."""
    driver = HostDriver(4096)
    provider = NativeProvider(driver, lending)
    provider.reserve(GridGeometry(4, 3, 4, BLOCK))
    assert (driver.calls("create"), provider.pool.stats()["physical_bytes"]) == (12, 12 * BLOCK)
    for row in range(4):
        provider.commit_row(row)
    provider.pool.create_blocks()
    assert driver.calls("create") == 12
    provider.check_integrity()
    provider.release()
    assert driver.use() == (0, 0, 0, 0)


def test_rows_committed_before_keep_their_blocks() -> None:
    """Only what is missing is created, in the same order."""
    driver = HostDriver(4096)
    pool = PagePool(driver, 3, 2, BLOCK, alias=True)
    pool.commit_row(1)
    pool.create_blocks()
    for row in (0, 2):
        pool.commit_row(row)
    found = [physical(pool.kv_address(column, row)) // BLOCK for row in (1, 0, 2) for column in range(2)]
    assert found == [0, 1, 2, 4, 3, 5]
    pool.check_integrity()
    assert pool.release() == 0


@pytest.mark.parametrize("nth", range(6))
def test_a_creation_that_fails_leaves_nothing_behind(nth: int) -> None:
    """Out of memory at any block: those before it go back, the provider can be used again."""
    driver = HostDriver(4096)
    provider = NativeProvider(driver)
    geometry = GridGeometry(4, 2, 3, BLOCK)
    driver.fail("create", nth)
    with pytest.raises(DriverCallError, match="driver call create failed"):
        provider.reserve(geometry)
    assert driver.use() == (0, 0, 0, 0)
    memory = UnifiedAllocator(geometry, provider)
    memory.check_integrity()
    memory.release()
    assert driver.use() == (0, 0, 0, 0)


def test_blocks_that_the_driver_keeps_wait_for_release() -> None:
    """Where undoing fails too, the provider refuses another grid until release has worked."""
    driver = HostDriver(4096)
    provider = NativeProvider(driver)
    geometry = GridGeometry(4, 2, 3, BLOCK)
    driver.fail("create", 4)
    driver.fail("release", 0, times=10**6)
    with pytest.raises(DriverCallError, match="driver call create failed"):
        provider.reserve(geometry)
    with pytest.raises(MemoryAccountingError, match="not wholly released yet"):
        provider.reserve(geometry)
    with pytest.raises(DriverCallError, match="kept 4 blocks"):
        provider.release()
    driver.clear_faults()
    provider.release()
    assert driver.use() == (0, 0, 0, 0)
    provider.reserve(geometry)
    provider.release()


@pytest.mark.parametrize("lending", LENDINGS)
@pytest.mark.parametrize("ahead", [True, False], ids=["created ahead", "created by commit"])
def test_a_commit_that_fails_keeps_what_was_there(lending: Lending, ahead: bool) -> None:
    """Blocks created ahead stay for the next attempt, blocks that the failed call created go back."""
    driver = HostDriver(4096)
    pool = PagePool(driver, 2, 3, BLOCK, lending == "alias")
    if ahead:
        pool.create_blocks()
    before = pool.stats()
    driver.fail("map", 2)
    with pytest.raises(DriverCallError):
        pool.commit_row(0)
    assert pool.stats() == before
    assert driver.use()[1:3] == (6 if ahead else 0, 0)
    pool.check_integrity()
    pool.commit_row(0)
    assert pool.release() == 0
    assert driver.use() == (0, 0, 0, 0)
