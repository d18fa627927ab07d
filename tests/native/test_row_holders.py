"""A row has one holder, and a fill of it that is still under way can harm nobody."""

from __future__ import annotations

import ctypes

import pytest

from backends.cuda._native import HostDriver, PagePool, TensorSpace
from backends.cuda.memory.provider import Lending, NativeProvider
from harli_core.errors import DriverCallError, MemoryAccountingError, OutOfMemoryError
from harli_core.memory.geometry import GridGeometry

BLOCK = 16384
KV_STREAM, OTHER, SCRUB_STREAM = 0, 1, 7


def lent_pool(alias: bool, row: int = 1) -> tuple[PagePool, HostDriver]:
    """A committed pool of two rows of two blocks, one of them lent."""
    driver = HostDriver(4096)
    pool = PagePool(driver, 2, 2, BLOCK, alias)
    for each in range(2):
        pool.commit_row(each)
    pool.lend_row(row)
    return pool, driver


def row_bytes(pool: PagePool, row: int) -> bytes:
    """What KV sees of a row."""
    return b"".join(ctypes.string_at(pool.kv_address(column, row), BLOCK) for column in range(pool.columns))


@pytest.mark.parametrize("alias", [True, False])
def test_held_row_is_neither_returned_nor_scrubbed(alias: bool) -> None:
    """The pool itself refuses a row that a tensor space holds, until the space lets go of it."""
    pool, _ = lent_pool(alias)
    space = TensorSpace(pool)
    space.add_row(1)
    at = space.allocate(5000, OTHER)
    ctypes.memset(at, 0x5A, 5000)
    with pytest.raises(MemoryAccountingError, match="cannot return row 1: a tensor space holds it"):
        pool.return_row(1, 0, KV_STREAM)
    with pytest.raises(MemoryAccountingError, match="cannot scrub row 1: a tensor space holds it"):
        pool.scrub_row(1, 0, KV_STREAM)
    assert ctypes.string_at(at, 5000) == b"Z" * 5000
    space.free(at, OTHER)
    space.poll()
    space.remove_row(1)
    pool.return_row(1, 0, KV_STREAM)
    assert row_bytes(pool, 1) == bytes(2 * BLOCK)


def test_row_has_one_holder() -> None:
    """A second tensor space over the pool does not get the row; when the first one is gone it does."""
    pool, _ = lent_pool(alias=True)
    first, second = TensorSpace(pool), TensorSpace(pool)
    first.add_row(1)
    for space in (first, second):
        with pytest.raises(MemoryAccountingError, match="holds it already"):
            space.add_row(1)
    with pytest.raises(MemoryAccountingError, match="it is with KV and must be lent"):
        second.add_row(0)
    del first
    second.add_row(1)
    second.check_integrity()


@pytest.mark.parametrize("alias", [True, False])
def test_return_waits_for_a_scrub_on_another_stream(alias: bool) -> None:
    """A row whose fill has not passed is not given to KV: it would overwrite what KV writes there."""
    pool, driver = lent_pool(alias)
    driver.hold(SCRUB_STREAM)
    pool.scrub_row(1, 0xFFFF, SCRUB_STREAM)
    with pytest.raises(MemoryAccountingError, match="cannot return row 1: its scrub has not passed"):
        pool.return_row(1, 0xFFFF, KV_STREAM)
    assert pool.is_lent(1)
    driver.let_go(SCRUB_STREAM)
    pool.return_row(1, 0xFFFF, KV_STREAM)
    ctypes.memset(pool.kv_address(0, 1), 1, BLOCK)
    assert row_bytes(pool, 1) == b"\x01" * BLOCK + b"\xff" * BLOCK


def test_return_on_the_scrubs_own_stream_is_in_order() -> None:
    """By alias, a scrub on the stream that KV runs on need not have passed: what KV does there comes after it."""
    pool, driver = lent_pool(alias=True)
    driver.hold(KV_STREAM)
    pool.scrub_row(1, 0xFFFF, KV_STREAM)
    pool.return_row(1, 0xFFFF, KV_STREAM)
    driver.fill(pool.kv_address(0, 1), 0x0101, BLOCK, KV_STREAM)
    driver.let_go(KV_STREAM)
    assert row_bytes(pool, 1) == b"\x01" * BLOCK + b"\xff" * BLOCK


def test_remapped_row_is_not_unmapped_under_its_fill() -> None:
    """Under remap not even the scrub's own stream will do: the view that is being filled would go away under it."""
    pool, driver = lent_pool(alias=False)
    driver.hold(KV_STREAM)
    pool.scrub_row(1, 0xFFFF, KV_STREAM)
    with pytest.raises(MemoryAccountingError, match="its scrub has not passed"):
        pool.return_row(1, 0xFFFF, KV_STREAM)
    driver.let_go(KV_STREAM)
    pool.return_row(1, 0xFFFF, KV_STREAM)
    ctypes.memset(pool.kv_address(0, 1), 0, BLOCK)
    pool.lend_row(1)
    driver.hold(KV_STREAM)
    pool.return_row(1, 0xFFFF, KV_STREAM)  # filled through the KV view
    with pytest.raises(MemoryAccountingError, match="still being filled through the KV view"):
        pool.lend_row(1)
    driver.let_go(KV_STREAM)
    pool.lend_row(1)
    assert ctypes.string_at(pool.general_address(1, 0), 2 * BLOCK) == b"\xff" * 2 * BLOCK


def test_scrubs_on_two_streams_do_not_overlap() -> None:
    """A second scrub elsewhere is refused while the first is under way; on the same stream it may follow."""
    pool, driver = lent_pool(alias=True)
    driver.hold(SCRUB_STREAM)
    pool.scrub_row(1, 0, SCRUB_STREAM)
    pool.scrub_row(1, 0, SCRUB_STREAM)
    with pytest.raises(MemoryAccountingError, match="still being filled on another stream"):
        pool.scrub_row(1, 0, OTHER)
    driver.let_go(SCRUB_STREAM)
    pool.scrub_row(1, 0, OTHER)


@pytest.mark.parametrize("call", ["event_create", "event_record", "event_query"])
def test_return_finds_out_about_a_scrub_without_an_event(call: str) -> None:
    """If the scrub's event could not be had, the return asks for one: never too early, and without another fault."""
    pool, driver = lent_pool(alias=True)
    driver.hold(SCRUB_STREAM)
    driver.fail(call)  # type: ignore[arg-type]
    pool.scrub_row(1, 0xFFFF, SCRUB_STREAM)
    with pytest.raises(MemoryAccountingError, match="its scrub has not passed"):
        pool.return_row(1, 0xFFFF, KV_STREAM)
    driver.let_go(SCRUB_STREAM)
    driver.fail("event_query")
    with pytest.raises(DriverCallError):
        pool.return_row(1, 0xFFFF, KV_STREAM)
    assert pool.is_lent(1)
    pool.return_row(1, 0xFFFF, KV_STREAM)
    assert row_bytes(pool, 1) == b"\xff" * 2 * BLOCK


def provider_with_fill_under_way(fill: str) -> tuple[NativeProvider, HostDriver, int]:
    """A lent row that the stream returned is still to fill, because it was just committed, returned or scrubbed."""
    driver = HostDriver(4096)
    provider = NativeProvider(driver, scrub="poison", kv_stream=KV_STREAM)
    provider.reserve(GridGeometry(row_tokens=4, columns=2, rows=2, block_bytes=BLOCK))
    stream = SCRUB_STREAM if fill == "scrub" else KV_STREAM
    if fill != "commit":
        for row in range(2):
            provider.commit_row(row)
        provider.lend_row(1)
    driver.hold(stream)
    if fill == "commit":
        for row in range(2):
            provider.commit_row(row)
        provider.lend_row(1)
    elif fill == "return":
        provider.return_row(1)
        provider.lend_row(1)
    else:
        provider.scrub(1, SCRUB_STREAM)
        provider.space.open_row(1)
    return provider, driver, stream


@pytest.mark.parametrize("fill", ["commit", "return", "scrub"])
def test_tensors_come_after_the_fill_of_their_row(fill: str) -> None:
    """In a row that is still being filled, other streams get nothing; the fill's own stream does, behind it."""
    provider, driver, stream = provider_with_fill_under_way(fill)
    space = provider.space
    with pytest.raises(OutOfMemoryError):
        space.allocate(BLOCK, OTHER)
    provider.check_integrity()
    own = space.allocate(BLOCK, stream)
    driver.fill(own, 0x0101, BLOCK, stream)
    driver.let_go(stream)
    other = space.allocate(BLOCK, OTHER)
    ctypes.memset(other, 2, BLOCK)
    assert ctypes.string_at(own, BLOCK) == b"\x01" * BLOCK
    assert ctypes.string_at(other, BLOCK) == b"\x02" * BLOCK
    space.check_integrity()


@pytest.mark.parametrize("lending", ["alias", "remap"])
def test_failed_fill_of_a_new_row_does_not_land_in_freed_memory(lending: Lending) -> None:
    """A commit whose fill fails midway, with some of it still to come, keeps the row mapped until release."""
    driver = HostDriver(4096)
    pool = PagePool(driver, 2, 2, BLOCK, lending == "alias")
    pool.commit_row(0)
    driver.hold(KV_STREAM)
    nth = 1 if lending == "remap" else 0
    driver.fail("fill", nth)
    with pytest.raises(DriverCallError):
        pool.commit_row(1, 0xFFFF, KV_STREAM)
    pool.check_integrity()
    assert pool.stats()["rows_stranded"] == nth  # by alias a row is filled at once or not at all
    driver.let_go(KV_STREAM)  # what was launched lands in memory that is still mapped, or nothing was
    assert pool.release() == 0
    assert driver.use() == (0, 0, 0, 0)
