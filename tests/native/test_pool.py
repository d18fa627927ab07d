"""The pool contract on every driver, and the core's own provider contract on the native provider."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from backends.cuda._native import Driver, HostDriver, PagePool
from backends.cuda.memory.provider import Lending, NativeProvider
from harli_core.errors import ConfigError, DriverCallError, MemoryAccountingError
from harli_core.memory.geometry import GridGeometry
from harli_core.model import ModelShape
from tests.native.machines import cuda_driver
from tests.native.pool_contract import CONTRACT
from tests.native.programs import outcome

GRID = GridGeometry(row_tokens=4, columns=2, rows=3)
LENDINGS: tuple[Lending, ...] = ("alias", "remap")


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("lending", LENDINGS)
@pytest.mark.parametrize("make", [lambda: HostDriver(4096), cuda_driver], ids=["host", "cuda"])
def test_contract(make: Callable[[], Driver], lending: Lending, rule: Callable[[Driver, Lending], None]) -> None:
    """One rule of the contract; nothing is left of it afterwards."""
    driver = make()
    rule(driver, lending)
    if isinstance(driver, HostDriver):
        assert driver.use() == (0, 0, 0, 0)


@pytest.fixture(params=LENDINGS)
def provider(request: pytest.FixtureRequest) -> NativeProvider:
    """A provider with the grid committed, as in tests/memory/test_provider.py."""
    made = NativeProvider(HostDriver(), request.param)
    made.reserve(GRID)
    for row in range(GRID.rows):
        made.commit_row(row)
    return made


def test_rows_are_lent_and_returned_in_turn(provider: NativeProvider) -> None:
    """A row can be lent again once it is back."""
    for _ in range(2):
        provider.lend_row(1)
        provider.return_row(1)


def test_row_is_lent_once(provider: NativeProvider) -> None:
    """A lent row cannot be lent, a row at home cannot be returned, nor rows outside the grid."""
    provider.lend_row(1)
    for wrong, row in (
        (provider.lend_row, 1),
        (provider.return_row, 0),
        (provider.lend_row, 3),
        (provider.lend_row, -1),
    ):
        with pytest.raises(MemoryAccountingError, match=f"row {row}"):
            wrong(row)


def test_grid_is_reserved_and_committed_once(provider: NativeProvider) -> None:
    """A second reservation, a second commit and a row outside are refused."""
    with pytest.raises(MemoryAccountingError, match="reserved already"):
        provider.reserve(GRID)
    for row in (0, 3, -1):
        with pytest.raises(MemoryAccountingError, match=f"cannot commit row {row}"):
            provider.commit_row(row)


def test_release_in_any_state(provider: NativeProvider) -> None:
    """Release works with rows lent, and twice; nothing can be lent afterwards."""
    provider.lend_row(2)
    provider.release()
    provider.release()
    assert provider.driver.use() == (0, 0, 0, 0)  # type: ignore[attr-defined]
    for wrong in (
        lambda: provider.lend_row(0),
        lambda: provider.pool,
        lambda: provider.space,
        lambda: provider.geometry,
    ):
        with pytest.raises(MemoryAccountingError):
            wrong()


def test_row_comes_back_as_zeros(provider: NativeProvider) -> None:
    """By default no masked read of a returned row can meet a NaN."""
    import ctypes

    provider.lend_row(1)
    at = provider.space.allocate(5000, 0)
    ctypes.memset(at, 0xFF, 5000)
    provider.space.free(at, 0)
    provider.space.poll()
    provider.return_row(1)
    for column in range(GRID.columns):
        block = (ctypes.c_uint8 * GRID.block_bytes).from_address(provider.pool.kv_address(column, 1))
        assert bytes(block) == bytes(GRID.block_bytes)


def test_failed_return_keeps_the_row_closed(provider: NativeProvider) -> None:
    """A driver error while a closed row is returned leaves it lent and closed."""
    provider.lend_row(1)
    provider.space.close_row(1)
    provider.driver.fail("fill")
    with pytest.raises(DriverCallError):
        provider.return_row(1)
    assert (provider.space.rows(), provider.space.rows_open()) == ([1], [])
    provider.check_integrity()
    provider.return_row(1)


def test_a_scrubbed_row_that_is_used_again_is_scrubbed_again(provider: NativeProvider) -> None:
    """What was written after the fill, in a row opened again, is not shown to KV."""
    import ctypes

    provider.lend_row(1)
    provider.scrub(1, 0)
    provider.space.open_row(1)
    at = provider.space.allocate(5000, 0)
    ctypes.memset(at, 0x5A, 5000)
    provider.space.free(at, 0)
    provider.space.poll()
    provider.return_row(1)
    for column in range(GRID.columns):
        block = (ctypes.c_uint8 * GRID.block_bytes).from_address(provider.pool.kv_address(column, 1))
        assert bytes(block) == bytes(GRID.block_bytes)


def test_scrub_needs_an_empty_row_and_closes_it(provider: NativeProvider) -> None:
    """No tensor is overwritten by the fill, and none is allocated after it; a failing fill leaves the row open."""
    with pytest.raises(MemoryAccountingError, match="does not hold it"):
        provider.scrub(1, 0)
    provider.lend_row(1)
    at = provider.space.allocate(5000, 0)
    with pytest.raises(MemoryAccountingError, match="1 of its blocks are in use"):
        provider.scrub(1, 0)
    provider.space.free(at, 0)
    provider.space.poll()
    provider.driver.fail("fill")
    with pytest.raises(DriverCallError):
        provider.scrub(1, 0)
    assert provider.space.rows_open() == [1]
    provider.scrub(1, 0)
    assert provider.space.rows_open() == []
    provider.return_row(1)


def test_capabilities() -> None:
    """Alias costs nothing; remap reports the H200 figure first, and what lends took once there were some."""
    assert NativeProvider(HostDriver()).capabilities.aliasing
    remap = NativeProvider(HostDriver(), "remap")
    remap.reserve(GRID)
    assert (remap.capabilities.aliasing, remap.capabilities.remap_row_ms) == (False, 2 * 0.047)
    remap.commit_row(0)
    remap.lend_row(0)
    assert 0 < remap.capabilities.remap_row_ms != 2 * 0.047
    with pytest.raises(ConfigError, match="lending must be alias or remap"):
        NativeProvider(HostDriver(), "copy")  # type: ignore[arg-type]


def test_persistent_fault_strands_the_row_and_release_still_frees_it() -> None:
    """Where even the undoing fails, nobody gets the row, and everything is given back once the driver works again."""
    driver = HostDriver(4096)
    pool = PagePool(driver, 2, 2, 8192, alias=False)
    for row in range(2):
        pool.commit_row(row)
    driver.fail("unmap", nth=1, times=10**6)
    with pytest.raises(DriverCallError, match="row 1 is stranded"):
        pool.lend_row(1)
    assert pool.stats()["rows_stranded"] == 1
    pool.check_integrity()
    with pytest.raises(MemoryAccountingError, match="stranded by a driver error"):
        pool.lend_row(1)
    assert pool.release() > 0
    driver.clear_faults()
    assert pool.release() == 0
    assert driver.use() == (0, 0, 0, 0)


def test_fill_that_fails_midway_is_taken_up_again() -> None:
    """Under remap, fills may be under way when one fails: the KV view stays mapped, the next attempt comes after them."""
    driver = HostDriver(4096)
    provider = NativeProvider(driver, "remap", scrub="poison")
    provider.reserve(GridGeometry(row_tokens=4, columns=3, rows=2, block_bytes=8192))
    for row in range(2):
        provider.commit_row(row)
    provider.lend_row(1)
    driver.fail("fill", nth=1)
    driver.hold(0)
    with pytest.raises(DriverCallError):
        provider.return_row(1)
    provider.check_integrity()
    with pytest.raises(MemoryAccountingError, match="3 wait for a fence"):
        provider.return_row(1)
    driver.let_go(0)  # the first column's fill still lands, in memory that is still mapped
    provider.space.poll()
    driver.fail("unmap")
    with pytest.raises(DriverCallError):
        provider.return_row(1)
    provider.check_integrity()
    driver.fail("map")
    provider.return_row(1)
    provider.check_integrity()
    driver.clear_faults()
    provider.release()
    assert driver.use() == (0, 0, 0, 0)


def test_odd_kv_entries_are_refused_by_the_geometry() -> None:
    """A KV entry that does not divide a block never reaches the pool."""
    odd = ModelShape(name="odd", layers=2, hidden=240, heads=3, kv_heads=3, head_dim=80, intermediate=96, vocab=100)
    with pytest.raises(ConfigError, match="does not divide"):
        GridGeometry.of(odd, 2**30)


@pytest.mark.parametrize(
    ("touch", "how"),
    [
        ("kv_address(0, 1)", "read"),
        ("kv_address(1, 1)", "write"),
        ("general_address(0, 0)", "read"),
        ("kv_address(0, 0) + 2 * 8192", "read"),
    ],
)
def test_stray_access_faults_under_remap(touch: str, how: str) -> None:
    """Touching a lent row through KV, a KV row through the other view, or the guard block kills the process."""
    program = f"""
import ctypes
from backends.cuda._native import HostDriver, PagePool
pool = PagePool(HostDriver(4096), 2, 2, 8192, alias=False)
pool.commit_row(0), pool.commit_row(1), pool.lend_row(1)
ctypes.memset(pool.general_address(1, 0), 1, 16384), ctypes.memset(pool.kv_address(0, 0), 1, 8192)
print("alive", flush=True)
at = pool.{touch}
{"ctypes.string_at(at, 1)" if how == "read" else "ctypes.memset(at, 1, 1)"}
print("not reached", flush=True)
"""
    done = outcome(program)
    assert done.stdout == "alive\n"
    assert -done.returncode in (signal.SIGSEGV, signal.SIGBUS)
