"""A forked child shares the parent's pages: there nothing is given back, and nothing can be used."""

from __future__ import annotations

import pytest

from tests.native.programs import passes

PARENT = """
import ctypes, os, sys, threading
from backends.cuda._native import HostDriver, PagePool, TensorSpace
from backends.cuda.memory.views import OwnedBytes
from harli_core.errors import HarliError

driver = HostDriver(4096)
pool = PagePool(driver, 3, 2, 8192, {alias})
for row in range(3):
    pool.commit_row(row, 0x5A5A)
pool.lend_row(1)
space = TensorSpace(pool)
space.add_row(1)
owned = OwnedBytes(space, 5000, 1)
ctypes.memset(owned.address, 0x5A, 5000)

def intact():
    content = ctypes.string_at(pool.kv_address(1, 0), 8192) + ctypes.string_at(owned.address, 5000)
    return content == b"Z" * len(content)

def child(work):
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException as error:
            print(type(error), error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
"""


@pytest.mark.parametrize("alias", [True, False])
def test_child_that_ends_leaves_the_parents_bytes(alias: bool) -> None:
    """Every destructor runs in the child, and what the parent wrote is still there; the parent works on."""
    passes(
        PARENT.format(alias=alias)
        + """
def end():
    global owned, space, pool, driver
    assert pool.release() == 0
    del owned, space, pool, driver

child(end)
child(lambda: sys.stderr.flush())
assert intact()
pool.check_integrity(), space.check_integrity()
space.free(space.allocate(100, 1), 1)
assert intact()
"""
    )


def test_child_that_exits_as_usual_leaves_the_parents_bytes() -> None:
    """The same at the end of the interpreter, as multiprocessing with fork does it."""
    passes(
        PARENT.format(alias=True)
        + """
process = os.fork()
if process == 0:
    sys.exit(0)
assert os.waitpid(process, 0)[1] == 0
assert intact()
"""
    )


def test_child_is_refused() -> None:
    """Each call of driver, pool, space and streams that would change or show the shared memory raises in the child."""
    passes(
        PARENT.format(alias=True)
        + """
calls = [
    lambda: driver.create(4096), lambda: driver.release(1), lambda: driver.reserve(4096), lambda: driver.fill(0, 0, 2),
    lambda: driver.let_go(0), lambda: driver.complete(0, 1), lambda: pool.commit_row(2), lambda: pool.lend_row(2),
    lambda: pool.return_row(1, 0, 0), lambda: pool.is_lent(1), lambda: pool.stats(), lambda: space.allocate(10, 1),
    lambda: space.poll(), lambda: space.rows(), lambda: space.remove_row(1), lambda: space.check_integrity(),
    lambda: pool.create_blocks(),
]

def refused():
    for index, call in enumerate(calls):
        try:
            call()
        except HarliError as error:
            assert "forked child" in str(error), error
        else:
            raise AssertionError(index)

child(refused)
assert intact()
"""
    )


def test_child_does_not_wait_for_a_thread_that_it_has_not() -> None:
    """Forked while another thread is in a driver call, with the pool locked: the child still ends."""
    passes(
        PARENT.format(alias=True)
        + """
driver.stall("fill")
pool2 = PagePool(driver, 1, 1, 4096, True)
busy = threading.Thread(target=pool2.commit_row, args=(0, 1))
busy.start()
while not driver.stalled:
    pass

def end():
    global owned, space, pool, pool2
    pool2.release()
    del owned, space, pool, pool2

child(end)
driver.go_on()
busy.join()
assert intact()
"""
    )


def test_a_driver_made_in_the_child_works_there() -> None:
    """A child may have memory of its own."""
    passes(
        PARENT.format(alias=True)
        + """
def own():
    pool = PagePool(HostDriver(4096), 1, 1, 4096, True)
    pool.commit_row(0, 0x1111)
    assert ctypes.string_at(pool.kv_address(0, 0), 4096) == bytes([0x11]) * 4096
    assert pool.release() == 0

child(own)
assert intact()
"""
    )
