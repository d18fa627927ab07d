"""What page pool, tensor space, provider and reclaim must do on every driver; plain functions for run_on_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backends.cuda._native import Driver, HostDriver, PagePool, TensorSpace
from backends.cuda.memory.provider import Lending, NativeProvider
from backends.cuda.memory.reclaim import Reclaim
from harli_core.errors import DriverCallError, HarliError, MemoryAccountingError, OutOfMemoryError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator
from tests.native.device_bytes import DeviceBytes

if TYPE_CHECKING:
    from backends.cuda._native import Call

ROWS, COLUMNS = 4, 2
POISON = b"\xff\xff"


def raises(kind: type[HarliError], action: Callable[[], object], text: str = "") -> None:
    """Assert that ``action`` raises ``kind`` whose message contains ``text``."""
    try:
        action()
    except kind as error:
        assert text in str(error), error  # noqa: PT017 - runs without pytest
        return
    raise AssertionError(f"no {kind.__name__}: {text}")


def settle(driver: Driver) -> None:
    """Wait for the default stream, without calls that ``driver`` counts and lets fail. A host's work is done at once."""
    if driver.name == "cuda":
        from backends.cuda._native import CudaDriver

        DeviceBytes(CudaDriver()).wait(0)


def grid_for(driver: Driver) -> GridGeometry:
    """A small grid of blocks that the driver can map."""
    return GridGeometry(row_tokens=4, columns=COLUMNS, rows=ROWS, block_bytes=max(16384, driver.granularity))


def whole(driver: Driver, lending: Lending) -> tuple[NativeProvider, UnifiedAllocator, DeviceBytes]:
    """A provider with poison as its scrub, the core's allocator on it unchanged, and access to the bytes."""
    provider = NativeProvider(driver, lending, scrub="poison")
    memory = UnifiedAllocator(grid_for(driver), provider)
    settle(driver)  # under remap a row is not lent before its first fill has passed
    return provider, memory, DeviceBytes(driver)


def both_views_show_the_row(driver: Driver, lending: Lending) -> None:
    """What KV wrote is in the general-purpose view of the row, block for block, once it is lent."""
    provider, memory, data = whole(driver, lending)
    pool = provider.pool
    for column in range(COLUMNS):
        data.write(pool.kv_address(column, 2), b"column%d" % column)
    provider.lend_row(2)
    for column in range(COLUMNS):
        assert data.read(pool.general_address(2, column), 7) == b"column%d" % column
    provider.return_row(2)
    for column in range(COLUMNS):
        assert data.read(pool.kv_address(column, 2), pool.block_bytes) == POISON * (pool.block_bytes // 2)
    memory.release()


def committed_rows_are_filled(driver: Driver, lending: Lending) -> None:
    """A new row holds what a returned one would, whatever its memory held before: here poison over poison, then zeros."""
    provider, memory, data = whole(driver, lending)
    assert data.read(provider.pool.kv_address(1, 3), 4) == POISON * 2
    memory.release()
    provider = NativeProvider(driver, lending)
    memory = UnifiedAllocator(grid_for(driver), provider)
    for row in range(ROWS):
        for column in range(COLUMNS):
            size = provider.pool.block_bytes
            assert data.read(provider.pool.kv_address(column, row), size) == bytes(size)
    memory.release()


def adjacent_rows_are_contiguous(driver: Driver, lending: Lending) -> None:
    """One allocation runs through two lent rows."""
    provider, memory, data = whole(driver, lending)
    assert memory.lend_rows(2) == 2
    size = 2 * COLUMNS * provider.pool.block_bytes
    at = provider.space.allocate(size, 0)
    data.write(at + size // 2 - 3, b"across")
    assert data.read(at + size // 2 - 3, 6) == b"across"
    assert at == provider.pool.general_address(2, 0)
    raises(OutOfMemoryError, lambda: provider.space.allocate(1, 0), "no room for 1 bytes")
    provider.space.free(at, 0)
    provider.check_integrity()
    memory.release()


def lending_by_alias_makes_no_driver_call(driver: Driver, lending: Lending) -> None:
    """Under alias neither a lend nor the return of a scrubbed row calls the driver; under remap both do."""
    provider, memory, _ = whole(driver, lending)
    calls: tuple[Call, ...] = ("reserve", "create", "map", "set_access", "unmap", "release", "free", "fill", "copy")
    memory.lend_rows(1)
    provider.scrub(3, 0)
    settle(driver)  # under remap the scrub must have passed
    provider.return_row(3)
    before = {call: driver.calls(call) for call in calls}
    provider.lend_row(3)
    lend = {call: driver.calls(call) - before[call] for call in calls}
    provider.scrub(3, 0)
    settle(driver)
    provider.return_row(3)
    both = {call: driver.calls(call) - before[call] for call in calls}
    moved = 0 if lending == "alias" else COLUMNS
    assert lend == {**dict.fromkeys(calls, 0), "map": moved, "unmap": moved, "set_access": min(moved, 1)}
    expected: dict[Call, int] = {"map": 2 * moved, "unmap": 2 * moved, "set_access": moved + min(moved, 1), "fill": 1}
    assert both == {**dict.fromkeys(calls, 0), **expected}
    memory.release()


def faults_leave_everything_as_it_was(driver: Driver, lending: Lending) -> None:
    """Every driver call of commit, lend, scrub and return fails at every position: the call raises, nothing changed."""
    kinds: tuple[Call, ...] = (
        "reserve", "create", "map", "set_access", "unmap", "release", "free", "fill",
        "event_create", "event_record", "event_query", "event_destroy",
    )  # fmt: skip
    for kind in kinds:
        for nth in range(4 * ROWS * COLUMNS):
            if not _life_with_fault(driver, lending, kind, nth):
                break
        else:
            raise AssertionError(f"more calls of {kind} than were let fail")


def _life_with_fault(driver: Driver, lending: Lending, kind: Call, nth: int) -> bool:
    """One life of a provider in which the nth call of a kind fails; false if it made fewer calls."""
    provider = NativeProvider(driver, lending, scrub="poison")
    geometry = grid_for(driver)
    calls = driver.calls(kind)
    driver.fail(kind, nth)
    tensors: list[int] = []
    steps: list[Callable[[], object]] = [lambda: provider.reserve(geometry)]
    steps += [lambda row=row: provider.commit_row(row) for row in range(ROWS)]  # type: ignore[misc]
    steps += [lambda: provider.lend_row(1), lambda: provider.lend_row(2)]
    steps += [lambda: tensors.append(provider.space.allocate(5000, 0)), lambda: provider.space.free(tensors.pop(), 0)]
    for _ in range(2):
        steps.append(lambda: provider.space.poll())  # noqa: PLW0108 - there is no space yet
    steps += [lambda: provider.return_row(2), lambda: provider.scrub(1, 0), lambda: provider.return_row(1)]
    steps += [lambda: provider.lend_row(1), provider.release]
    failures = 0
    for step in steps:
        before = _state(provider)
        settle(driver)
        try:
            step()
        except DriverCallError:
            failures += 1
            if step == provider.release:
                assert _state(provider) is None
            elif before is not None and provider.pool.stats()["rows_stranded"]:
                assert (kind, lending, driver.name) == ("fill", "remap", "cuda")  # pieces of it were still to come
                settle(driver)
                provider.release()
                return True
            else:
                assert _state(provider) == before
            provider.check_integrity()
            settle(driver)
            if before is not None and step != provider.release:
                provider.space.poll()
            step()  # it works the second time
        provider.check_integrity()
    driver.clear_faults()
    fired = driver.calls(kind) > calls + nth
    # What only speeds things up, an event behind a fill, may fail without anyone having to know.
    assert failures == 1 or (failures == 0 and (not fired or kind.startswith("event"))), (kind, nth, failures)
    if isinstance(driver, HostDriver):
        assert driver.use() == (0, 0, 0, 0), (kind, nth)
    return fired


def _state(provider: NativeProvider) -> object:
    try:
        stats = provider.pool.stats()
    except MemoryAccountingError:
        return None
    rows = provider.space.rows(), provider.space.rows_open()
    return stats["rows_committed"], stats["rows_lent"], stats["physical_bytes"], rows


def small_and_large_share_the_rows(driver: Driver, lending: Lending) -> None:
    """Small tensors share blocks, a tail of a large one too; all come back whole after their fences."""
    provider, memory, data = whole(driver, lending)
    memory.lend_rows(2)
    space, block = provider.space, provider.pool.block_bytes
    sizes = [100, 2048, 2049, block + 5000, 3000, block // 2]
    live = [(space.allocate(size, 0), size) for size in sizes]
    for index, (at, size) in enumerate(live):
        driver.fill(at, index, size // 2 * 2)
    data.wait(0)
    for index, (at, size) in enumerate(live):
        assert data.read(at + size // 2 * 2 - 2, 2) == bytes([index, 0])
    stats = space.stats()
    assert stats["requested_bytes"] == sum(sizes)
    assert stats["used_bytes"] - stats["requested_bytes"] < 2048 * len(sizes)
    for at, _ in live:
        space.free(at, 0)
    data.wait(0)
    space.poll()
    space.poll()
    assert space.rows_empty() == [2, 3]
    provider.check_integrity()
    memory.release()


def rows_come_back_poisoned(driver: Driver, lending: Lending) -> None:
    """Reclaim: a layer is given up, its row is fenced, scrubbed and open to KV; no call waits."""
    provider, memory, data = whole(driver, lending)
    reclaim = Reclaim(memory, provider, scrub_stream=0)
    memory.lend_rows(2)
    layers = [provider.space.allocate(COLUMNS * provider.pool.block_bytes, 0) for _ in range(2)]
    for layer in layers:
        data.write(layer, b"weights")

    def give_up() -> bool:
        if layers:
            provider.space.free(layers.pop(), 0)
            return True
        return False

    rows = reclaim.request(1, give_up)
    assert len(rows) == 1
    reclaim.check_integrity()
    raises(OutOfMemoryError, lambda: provider.space.allocate(1, 0))  # not from a row on its way back
    data.wait(0)
    returned: tuple[int, ...] = ()
    for _ in range(1000):
        returned += reclaim.poll()
        data.wait(0)
        if returned:
            break
    assert returned == rows
    for column in range(COLUMNS):
        assert data.read(provider.pool.kv_address(column, rows[0]), 8) == POISON * 4
    memory.check_integrity()
    reclaim.close()
    memory.release()


def wrong_use_is_refused(driver: Driver, lending: Lending) -> None:
    """Double frees, rows in use, and sizes that cannot be are refused with the tables intact."""
    provider, memory, _ = whole(driver, lending)
    memory.lend_rows(1)
    space = provider.space
    at = space.allocate(5000, 0)
    raises(MemoryAccountingError, lambda: space.free(at + 2048, 0), "nothing is allocated there")
    raises(MemoryAccountingError, lambda: space.allocate(0, 0), "at least 1")
    raises(OutOfMemoryError, lambda: space.allocate(2**40, 0), "no room")
    raises(MemoryAccountingError, lambda: provider.return_row(3), "1 of its blocks are in use")
    raises(MemoryAccountingError, lambda: provider.lend_row(3), "it is lent")
    raises(MemoryAccountingError, lambda: provider.return_row(1), "it is with KV and must be lent")
    raises(MemoryAccountingError, lambda: provider.commit_row(1), "it is with KV and must be uncommitted")
    space.free(at, 0)
    raises(MemoryAccountingError, lambda: space.free(at, 0), "freed twice?")
    provider.check_integrity()
    memory.release()


def odd_blocks_are_refused(driver: Driver, lending: Lending) -> None:
    """Blocks that the driver cannot map, or granules cannot divide, are refused with the reason."""
    from harli_core.errors import ConfigError

    odd = driver.granularity + 512
    alias = lending == "alias"
    raises(ConfigError, lambda: PagePool(driver, 2, 2, odd, alias), "no multiple of the granularity")
    raises(ConfigError, lambda: PagePool(driver, 0, 2, driver.granularity, alias), "at least one row")
    pool = PagePool(driver, 2, 2, driver.granularity * 3, alias)
    raises(ConfigError, lambda: TensorSpace(pool, 2048), "power of two granules")
    raises(ConfigError, lambda: TensorSpace(pool, 5000), "do not divide a block")


CONTRACT: list[Callable[[Driver, Lending], None]] = [
    both_views_show_the_row,
    committed_rows_are_filled,
    adjacent_rows_are_contiguous,
    lending_by_alias_makes_no_driver_call,
    faults_leave_everything_as_it_was,
    small_and_large_share_the_rows,
    rows_come_back_poisoned,
    wrong_use_is_refused,
    odd_blocks_are_refused,
]
