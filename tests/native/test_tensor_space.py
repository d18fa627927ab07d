"""The tensor space by itself: stream order, which rows it fills, its figures, and threads."""

from __future__ import annotations

import ctypes
import threading

import pytest

from backends.cuda._native import HostDriver, PagePool, TensorSpace
from harli_core.errors import DriverCallError, MemoryAccountingError, OutOfMemoryError

BLOCK = 32768  # 16 granules of 2 KiB


def space_of(rows: int = 4, columns: int = 4, lent: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[TensorSpace, HostDriver]:
    """A tensor space over lent rows, and its driver."""
    driver = HostDriver(4096)
    pool = PagePool(driver, rows, columns, BLOCK, alias=True)
    space = TensorSpace(pool)
    for row in range(rows):
        pool.commit_row(row)
    for row in lent:
        pool.lend_row(row)
        space.add_row(row)
    return space, driver


def test_same_stream_reuses_at_once() -> None:
    """What a stream freed it gets again while its work is still running; no driver call is made for that."""
    space, driver = space_of()
    driver.hold(1)
    for size in (5000, 3 * BLOCK):
        at = space.allocate(size, 1)
        driver.submit(1)
        space.free(at, 1)
        assert space.allocate(size, 1) == at
    assert driver.calls("event_record") == 0


def test_other_stream_waits_for_the_fence() -> None:
    """With everything freed on a stream that is not done, another stream finds no room; when it is done it does."""
    space, driver = space_of(lent=(2,))
    driver.hold(1)
    at = space.allocate(4 * BLOCK, 1)
    driver.submit(1)
    space.free(at, 1)
    with pytest.raises(OutOfMemoryError):
        space.allocate(4 * BLOCK, 2)
    assert (space.rows_empty(), space.rows_idle(), space.lowest_idle_rows(1)) == ([], [2], [2])
    assert not space.row_empty(2)
    driver.complete(1, 1)
    assert space.allocate(4 * BLOCK, 2) == at


def test_recorded_use_holds_memory_back_from_its_own_stream() -> None:
    """A tensor read on a second stream is reused nowhere before that stream has passed."""
    space, driver = space_of(lent=(2,))
    driver.hold(2)
    at = space.allocate(4 * BLOCK, 1)
    space.record_use(at, 2)
    driver.submit(2)
    space.free(at, 1)
    for stream in (1, 2, 3):
        with pytest.raises(OutOfMemoryError):
            space.allocate(BLOCK, stream)
    assert space.stats()["pending_bytes"] == 4 * BLOCK
    driver.let_go(2)
    space.poll()
    space.poll()
    assert space.rows_empty() == [2]
    with pytest.raises(MemoryAccountingError, match="nothing is allocated there"):
        space.record_use(at, 2)


def test_free_on_another_stream_waits_for_the_first() -> None:
    """Memory that was allocated on one stream and freed on another waits for both."""
    space, driver = space_of(lent=(2,))
    driver.hold(1)
    at = space.allocate(4 * BLOCK, 1)
    driver.submit(1)
    space.free(at, 2)
    with pytest.raises(OutOfMemoryError):
        space.allocate(BLOCK, 2)
    driver.let_go(1)
    assert space.allocate(4 * BLOCK, 2) == at


@pytest.mark.parametrize(("size", "held_back"), [(4 * BLOCK, 4 * BLOCK), (3 * BLOCK + 100, 4 * BLOCK), (2000, 4096)])
def test_later_free_waits_for_the_later_fence(size: int, held_back: int) -> None:
    """Of two frees on one stream, with a poll between them, only the first is open to others once its event has passed.

    What waits with it: the rest of a block that was cut up, or the free buddy of a granule.
    """
    space, driver = space_of(lent=(0, 2))
    space.allocate(2000, 1)  # in one row with the small ones, so that the first of them has no free buddy
    space.allocate(BLOCK // 2, 1)
    if size > BLOCK:
        space, driver = space_of(lent=(0, 2))
    early, late = space.allocate(size, 1), space.allocate(size, 1)
    driver.hold(1)
    for address in (early, late):
        driver.submit(1)
        space.free(address, 1)
        space.poll()
    driver.complete(1, 1)
    space.poll()
    assert space.stats()["pending_bytes"] == held_back
    driver.complete(1, 1)
    space.poll()
    assert space.stats()["pending_bytes"] == 0
    space.check_integrity()


def test_rows_are_kept_empty() -> None:
    """High rows fill first; a partly used one before an empty one, for blocks and for granules."""
    space, _ = space_of()
    blocks = [space.allocate(BLOCK, 0) for _ in range(2)]
    assert space.rows_empty() == [0, 1, 2]
    space.allocate(100, 0)
    space.allocate(BLOCK, 0)
    assert space.rows_empty() == [0, 1, 2]
    space.allocate(2 * BLOCK, 0)
    assert space.rows_empty() == [0, 1]
    space.free(blocks[0], 0)
    assert space.allocate(BLOCK, 0) == blocks[0]


def test_closed_row_drains() -> None:
    """Nothing is allocated in a closed row, in its half-used blocks neither; opening it again undoes that."""
    space, _ = space_of(lent=(2, 3))
    small = space.allocate(100, 0)
    assert space.size_of(small) == 100
    space.close_row(3)
    assert (space.lowest_idle_rows(5), space.rows_open()) == ([2], [2])
    other = space.allocate(100, 0)
    assert abs(other - small) > BLOCK
    space.free(other, 0)
    space.open_row(3)
    space.poll()
    assert abs(space.allocate(100, 0) - small) < BLOCK
    with pytest.raises(MemoryAccountingError, match="1 of its blocks are in use"):
        space.remove_row(3)
    assert (space.row_empty(2), space.row_empty(0), space.row_empty(99)) == (True, False, False)
    for wrong in (space.close_row, space.open_row, space.remove_row):
        with pytest.raises(MemoryAccountingError, match="does not hold it"):
            wrong(0)


@pytest.mark.parametrize("taken", [0, 1, 4, 6])
def test_largest_allocatable_is_exact(taken: int) -> None:
    """The largest size that is reported can be allocated, and not a byte more."""
    space, _ = space_of(lent=(0, 1, 3))
    for index in range(taken):
        space.allocate((index % 3 + 1) * 20000, 0)
    largest = space.stats()["largest_allocatable_bytes"]
    with pytest.raises(OutOfMemoryError, match=f"at most {largest} bytes"):
        space.allocate(largest + 1, 0)
    space.check_integrity()
    space.allocate(largest, 0)
    space.check_integrity()


def test_figures() -> None:
    """Bytes asked for, in use, free, pending, cut up; counts and latencies."""
    space, driver = space_of(lent=(0,))
    at = space.allocate(3000, 1)
    stats = space.stats()
    assert (stats["requested_bytes"], stats["used_bytes"], stats["live"], stats["rows"]) == (3000, 4096, 1, 1)
    assert stats["free_bytes"] == 4 * BLOCK - 4096
    assert stats["fragmentation_bytes"] == (BLOCK - 4096) + (4096 - 3000)
    driver.hold(1)
    driver.submit(1)
    space.free(at, 1)
    stats = space.stats()
    assert (stats["pending_bytes"], stats["free_bytes"], stats["live"]) == (
        BLOCK,
        3 * BLOCK,
        0,
    )  # the block has merged behind the fence
    with pytest.raises(OutOfMemoryError):
        space.allocate(5 * BLOCK, 1)
    stats = space.stats()
    assert (stats["refused"], stats["allocate"]["count"], stats["free"]["count"]) == (1, 1, 1)
    spent = stats["allocate"]
    assert (spent["min_ns"] or 0) <= (spent["mean_ns"] or 0) <= (spent["max_ns"] or 0) != 0
    space.reset_latencies()
    assert space.stats()["allocate"] == {"count": 0, "min_ns": None, "mean_ns": None, "max_ns": None}


@pytest.mark.parametrize("call", ["event_create", "event_record", "event_query"])
def test_driver_error_while_polling_changes_nothing(call: str) -> None:
    """A failing event leaves memory pending; the next poll succeeds."""
    space, driver = space_of(lent=(0,))
    space.free(space.allocate(5000, 1), 1)
    driver.fail(call)  # type: ignore[arg-type]
    with pytest.raises(DriverCallError):
        space.poll()
    space.check_integrity()
    assert space.rows_empty() == []
    space.poll()
    assert space.rows_empty() == [0]


@pytest.mark.parametrize("call", ["event_record", "event_query"])
def test_a_poll_that_fails_midway_forgets_no_fence_that_has_passed(call: str) -> None:
    """What was found out before the error counts in the next poll, for free memory and for memory held for a stream."""
    space, driver = space_of(lent=(0, 1))
    for stream in (1, 2):
        driver.hold(stream)
        driver.submit(stream)
    whole, other = space.allocate(4 * BLOCK, 1), space.allocate(3 * BLOCK, 1)
    space.free(whole, 1)
    space.poll()
    driver.submit(1)
    space.free(other, 2)  # waits for stream 1, then for stream 2
    if call == "event_query":
        space.poll()
    driver.let_go(1)
    driver.let_go(2)
    driver.fail(call, 1)  # type: ignore[arg-type]
    with pytest.raises(DriverCallError):
        space.poll()
    space.check_integrity()
    for _ in range(3):
        space.poll()
    assert space.rows_empty() == [0, 1]
    assert space.stats()["pending_bytes"] == 0


def test_a_fence_found_passed_before_an_error_counts_in_the_next_poll() -> None:
    """Of two events of one stream the first has passed, and asking for the second fails: the first is not forgotten."""
    space, driver = space_of(lent=(0, 1))
    rows = [space.allocate(4 * BLOCK, 1) for _ in range(2)]
    driver.hold(1)
    for at in rows:
        driver.submit(1)
        space.free(at, 1)
        space.poll()
    driver.complete(1, 1)
    driver.fail("event_query", 1)
    with pytest.raises(DriverCallError):
        space.poll()
    space.poll()
    assert space.stats()["free_bytes"] == 4 * BLOCK
    space.check_integrity()


def test_threads_share_the_space() -> None:
    """Backward threads allocate, write, check and free at the same time; every tensor keeps its bytes."""
    space, _ = space_of(rows=6, columns=4, lent=(0, 1, 2, 3, 4, 5))
    problems: list[str] = []

    def work(seed: int) -> None:
        live: list[tuple[int, int, int]] = []
        for step in range(400):
            size = (seed * 7919 + step * 104729) % 20000 + 1
            try:
                at = space.allocate(size, seed % 2)
            except OutOfMemoryError:
                at = 0
            if at:
                ctypes.memset(at, step % 251, size)
                live.append((at, size, step % 251))
            if len(live) > 5 or (live and not at):
                at, size, pattern = live.pop(0)
                if ctypes.string_at(at, size) != bytes([pattern]) * size:
                    problems.append(f"thread {seed} step {step}")
                space.free(at, seed % 2)
        for at, _, _ in live:
            space.free(at, seed % 2)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    space.poll()
    space.check_integrity()
    assert space.rows_empty() == [0, 1, 2, 3, 4, 5]
