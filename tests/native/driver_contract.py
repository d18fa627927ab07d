"""What every driver must do. Plain functions, so that a GPU machine without pytest can run them (run_on_gpu.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backends.cuda._native import Driver
from harli_core.errors import DriverCallError
from tests.native.device_bytes import DeviceBytes

if TYPE_CHECKING:
    from backends.cuda._native import Call


def refuses(action: Callable[[], object], text: str = "driver call") -> None:
    """Assert that ``action`` raises `DriverCallError` whose message contains ``text``."""
    try:
        action()
    except DriverCallError as error:
        assert text in str(error), error  # noqa: PT017 - runs without pytest
        return
    raise AssertionError(f"no DriverCallError: {text}")


def backed(driver: Driver, blocks: int = 1) -> tuple[int, list[int]]:
    """Reserve, create and map ``blocks`` blocks with access; return the address and the handles."""
    size = driver.granularity
    at = driver.reserve(blocks * size)
    handles = [driver.create(size) for _ in range(blocks)]
    for index, handle in enumerate(handles):
        driver.map(at + index * size, size, handle)
    driver.set_access(at, blocks * size)
    return at, handles


def give_back(driver: Driver, at: int, handles: list[int]) -> None:
    """Undo `backed`."""
    size = driver.granularity
    for index, handle in enumerate(handles):
        driver.unmap(at + index * size, size)
        driver.release(handle)
    driver.free(at, len(handles) * size)


def memory_holds_what_is_written(driver: Driver) -> None:
    """Bytes come back as written; a fill covers exactly its range."""
    memory = DeviceBytes(driver)
    at, handles = backed(driver, 2)
    end = 2 * driver.granularity
    memory.write(at, b"first")
    memory.write(at + end - 4, b"last")
    driver.fill(at + 8, 0xABCD, 6)
    assert memory.read(at, 5) == b"first"
    assert memory.read(at + 8, 6) == b"\xcd\xab" * 3
    assert memory.read(at + end - 4, 4) == b"last"
    give_back(driver, at, handles)


def one_block_at_two_addresses(driver: Driver) -> None:
    """A handle mapped twice shows the same bytes; releasing it early keeps them while a mapping is left."""
    memory = DeviceBytes(driver)
    size = driver.granularity
    at, handles = backed(driver)
    other = driver.reserve(size)
    driver.map(other, size, handles[0])
    driver.set_access(other, size)
    memory.write(at, b"shared")
    assert memory.read(other, 6) == b"shared"
    driver.release(handles[0])
    driver.unmap(at, size)
    assert memory.read(other, 6) == b"shared"
    driver.unmap(other, size)
    driver.free(at, size)
    driver.free(other, size)


def bytes_follow_the_handle(driver: Driver) -> None:
    """After a remap the new address shows the block's bytes, and the old address another block's."""
    memory = DeviceBytes(driver)
    size = driver.granularity
    at, handles = backed(driver, 2)
    memory.write(at, b"one")
    memory.write(at + size, b"two")
    for index in (0, 1):
        driver.unmap(at + index * size, size)
    for index in (0, 1):
        driver.map(at + index * size, size, handles[1 - index])
    driver.set_access(at, 2 * size)
    assert memory.read(at, 3) == b"two"
    assert memory.read(at + size, 3) == b"one"
    give_back(driver, at, [handles[1], handles[0]])


def reservations_are_aligned(driver: Driver) -> None:
    """An address is a multiple of the alignment asked for."""
    size = driver.granularity
    at = driver.reserve(size, 16 * size)
    assert at % (16 * size) == 0
    driver.free(at, size)


def wrong_use_is_refused(driver: Driver) -> None:
    """Mapping twice, access without a mapping, unmapping nothing, and sizes that are no multiple of the granularity."""
    size = driver.granularity
    at, handles = backed(driver)
    other = driver.reserve(size)
    refuses(lambda: driver.map(at, size, handles[0]))
    refuses(lambda: driver.set_access(other, size))
    refuses(lambda: driver.unmap(other, size))
    refuses(lambda: driver.create(size - 1))
    driver.free(other, size)
    give_back(driver, at, handles)


def events_pass_in_stream_order(driver: Driver) -> None:
    """An event has passed once the work before it is done, and then that work can be seen."""
    memory = DeviceBytes(driver)
    at, handles = backed(driver)
    driver.fill(at, 0x1111, driver.granularity)
    driver.fill(at, 0x2222, driver.granularity)
    memory.wait(0)
    assert memory.read(at, 2) == b"\x22\x22"
    event = driver.create_event()
    driver.record(event, 0)
    driver.record(event, 0)  # an event may be used again
    while not driver.query(event):
        pass
    driver.destroy(event)
    give_back(driver, at, handles)


def every_call_is_counted_and_can_fail(driver: Driver) -> None:
    """Each kind of call counts one, and fails where it is told to, once."""
    size = driver.granularity
    at, handles = backed(driver)
    event = driver.create_event()
    spare = driver.reserve(size)
    actions: dict[Call, Callable[[], object]] = {
        "reserve": lambda: driver.reserve(size),
        "create": lambda: driver.create(size),
        "map": lambda: driver.map(spare, size, handles[0]),
        "set_access": lambda: driver.set_access(at, size),
        "unmap": lambda: driver.unmap(at, size),
        "release": lambda: driver.release(handles[0]),
        "free": lambda: driver.free(spare, size),
        "event_create": driver.create_event,
        "event_record": lambda: driver.record(event, 0),
        "event_query": lambda: driver.query(event),
        "event_destroy": lambda: driver.destroy(event),
        "fill": lambda: driver.fill(at, 0, size),
        "copy": lambda: driver.copy(at, at, 2),
    }
    for call, action in actions.items():
        before = driver.calls(call)
        driver.fail(call)
        refuses(action, f"driver call {call} failed: a fault was injected")
        assert driver.calls(call) == before + 1
    driver.clear_faults()
    driver.fail("fill", nth=1, times=1)
    driver.fill(at, 0, size)
    refuses(lambda: driver.fill(at, 0, size), "fault")
    driver.fill(at, 0, size)
    driver.clear_faults()
    driver.destroy(event)
    driver.free(spare, size)
    give_back(driver, at, handles)


CONTRACT: list[Callable[[Driver], None]] = [
    memory_holds_what_is_written,
    one_block_at_two_addresses,
    bytes_follow_the_handle,
    reservations_are_aligned,
    wrong_use_is_refused,
    events_pass_in_stream_order,
    every_call_is_counted_and_can_fail,
]
