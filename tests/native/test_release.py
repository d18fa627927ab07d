"""After release nothing answers as if there were memory, and what the driver kept is told and given back later."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backends.cuda._native import HostDriver, PagePool, TensorSpace
from backends.cuda.memory.provider import Lending, NativeProvider
from harli_core.errors import DriverCallError, MemoryAccountingError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator

GRID = GridGeometry(row_tokens=4, columns=2, rows=3, block_bytes=16384)


def released() -> tuple[PagePool, TensorSpace, int]:
    """A pool that was released while a tensor lived, its space, and the tensor's address."""
    pool = PagePool(HostDriver(4096), 2, 2, 16384, alias=True)
    for row in range(2):
        pool.commit_row(row)
    pool.lend_row(1)
    space = TensorSpace(pool)
    space.add_row(1)
    at = space.allocate(5000, 1)
    assert pool.release() == 0
    return pool, space, at


@pytest.mark.parametrize(
    "use",
    [
        lambda pool, space: pool.kv_address(0, 0),
        lambda pool, space: pool.general_address(1, 0),
        lambda pool, space: pool.create_blocks(),
        lambda pool, space: pool.commit_row(0),
        lambda pool, space: pool.lend_row(0),
        lambda pool, space: pool.scrub_row(1, 0, 0),
        lambda pool, space: pool.return_row(1, None, 0),
        lambda pool, space: TensorSpace(pool),
        lambda pool, space: space.allocate(100, 0),
        lambda pool, space: space.add_row(0),
    ],
)
def test_released_pool_is_refused(use: Callable[[PagePool, TensorSpace], object]) -> None:
    """Whatever gives out memory, an address or a row says that the pool is released."""
    pool, space, _ = released()
    with pytest.raises(MemoryAccountingError, match="the page pool is released"):
        use(pool, space)
    assert not pool.is_lent(1)
    pool.check_integrity()
    space.check_integrity()


def test_tensors_can_go_after_the_pool() -> None:
    """A tensor that outlives the pool is freed without an error; the tables stay right."""
    pool, space, at = released()
    space.free(at, 2)
    space.poll()
    assert space.stats()["live"] == 0
    space.check_integrity()
    assert pool.release() == 0


def test_events_go_with_the_pool() -> None:
    """A pool that filled rows leaves no event behind, though the object is still there."""
    driver = HostDriver(4096)
    pool = PagePool(driver, 1, 1, 4096, alias=True)
    pool.commit_row(0, 0xFFFF)
    assert pool.release() == 0
    assert driver.use() == (0, 0, 0, 0)


@pytest.mark.parametrize("lending", ["alias", "remap"])
@pytest.mark.parametrize("call", ["unmap", "release", "free", "event_destroy"])
def test_what_the_driver_keeps_is_told(lending: Lending, call: str) -> None:
    """A release that is not whole raises and says how much is left; nothing can be used; the next one finishes it."""
    driver = HostDriver(4096)
    provider = NativeProvider(driver, lending, scrub="poison")
    memory = UnifiedAllocator(GRID, provider)
    memory.lend_rows(1)
    driver.fail(call)  # type: ignore[arg-type]
    with pytest.raises(DriverCallError, match=r"driver host kept [1-9][0-9]* blocks, ranges or events"):
        memory.release()
    for use in (lambda: provider.pool, lambda: provider.space, lambda: provider.lend_row(0)):
        with pytest.raises(MemoryAccountingError, match="reserve"):
            use()
    with pytest.raises(MemoryAccountingError, match="not wholly released"):
        provider.reserve(GRID)
    provider.check_integrity()
    memory.release()
    assert driver.use() == (0, 0, 0, 0)
    provider.reserve(GRID)
    provider.release()
