"""Python's lock is given up by whoever waits for a pool or a tensor space that is busy with the driver."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.native.programs import passes

PROGRAM = """
import threading, time
from backends.cuda._native import HostDriver, PagePool, TensorSpace
driver = HostDriver(4096)
{setup}
driver.stall("{stalled}")
busy = threading.Thread(target=lambda: {busy})
busy.start()
while not driver.stalled:
    time.sleep(0.001)
waiting = threading.Thread(target=lambda: {call})
waiting.start()
for _ in range(20):
    time.sleep(0.005)
assert waiting.is_alive()  # it does wait
driver.go_on()
busy.join()
waiting.join()
"""


def waits_and_lets_go_on(setup: str, stalled: str, busy: str, call: str, timeout_s: float = 60) -> None:
    """While ``busy`` is in the ``stalled`` driver call, ``call`` waits for it and this thread goes on, or it hangs."""
    passes(PROGRAM.format(setup=dedent(setup), stalled=stalled, busy=busy, call=call), timeout_s)


@pytest.mark.parametrize(
    "call",
    [
        "pool.is_lent(0)",
        "pool.stats()",
        "pool.check_integrity()",
        "pool.create_blocks()",
        "pool.commit_row(4)",
        "pool.lend_row(0)",
        "pool.scrub_row(3, 0, 0)",
        "pool.return_row(3, 0, 0)",
        "space.add_row(0)",
        "space.open_row(1)",
        "space.scrub_row(1, 0, 0)",
        "space.remove_row(1)",
        "space.check_integrity()",
    ],
)
def test_waiting_for_the_pool_lets_others_run(call: str) -> None:
    """While one thread is in a driver call and another waits for the pool, a third goes on; otherwise this hangs."""
    waits_and_lets_go_on(
        f"""
        pool = PagePool(driver, 5, 2, 8192, True)
        pool.commit_row(0), pool.commit_row(1), pool.commit_row(3)
        pool.lend_row(1), pool.lend_row(3)
        space = TensorSpace(pool)
        space.add_row(1), space.close_row(1)
        if "add_row" in {call!r}:
            pool.lend_row(0)
        """,
        "create",
        "pool.commit_row(2)",
        call,
    )


@pytest.mark.parametrize(
    "call",
    [
        "space.allocate(10)",
        "space.free(at)",
        "space.record_use(at, 2)",
        "space.poll()",
        "space.close_row(0)",
        "space.holds_row(0)",
        "space.rows()",
        "space.rows_open()",
        "space.rows_empty()",
        "space.rows_idle()",
        "space.lowest_idle_rows(1)",
        "space.row_empty(0)",
        "space.row_open(0)",
        "space.size_of(at)",
        "space.stats()",
        "space.reset_latencies()",
    ],
)
def test_waiting_for_the_space_lets_others_run(call: str) -> None:
    """The same while a scrub, with the space's own mutex, is in a driver call: not even the short calls keep the lock."""
    waits_and_lets_go_on(
        """
        pool = PagePool(driver, 2, 1, 8192, True)
        space = TensorSpace(pool)
        for row in range(2):
            pool.commit_row(row), pool.lend_row(row), space.add_row(row)
        at = space.allocate(100)
        empty = space.rows_empty()[0]
        """,
        "fill",
        "space.scrub_row(empty, 0, 0)",
        call,
        timeout_s=20,
    )


@pytest.mark.parametrize(
    "call", ["_native.bound_torch_space()", "_native.last_torch_error()", "_native.bind_torch_space(None)"]
)
@pytest.mark.parametrize("bound", [True, False], ids=["another is bound", "none is bound"])
def test_last_reference_to_a_space_goes_without_the_torch_mutex(call: str, bound: bool) -> None:
    """A thread of torch's waits for Python's lock to let a space go; who has that lock may take the mutex meanwhile.

    Three threads in one order: a scrub, stuck in the driver, holds up torch's free at the space's own mutex; the main
    thread lets the driver go on and keeps Python's lock (no thread takes it from another here) until the free can only
    be waiting for it, then calls. Had the free taken the mutex along into its wait, this would hang.
    """
    passes(
        f"""
        import ctypes, sys, threading, time
        from backends.cuda import _native
        from backends.cuda._native import HostDriver, PagePool, TensorSpace
        library = ctypes.CDLL(_native.extension_file())  # its calls give Python's lock up
        malloc, free = library.harli_torch_malloc, library.harli_torch_free
        malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        free.restype, free.argtypes = None, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        sys.setswitchinterval(1e6)
        driver = HostDriver(4096)
        pool, other = PagePool(driver, 2, 1, 4096, True), PagePool(driver, 1, 1, 4096, True)
        space = TensorSpace(pool)
        for row in range(2):
            pool.commit_row(row), pool.lend_row(row), space.add_row(row)
        _native.bind_torch_space(space)
        at = malloc(100, 0, None)
        empty = space.rows_empty()[0]
        _native.bind_torch_space(TensorSpace(other) if {bound} else None)
        driver.stall("fill")
        scrubbing = threading.Thread(target=lambda: space.scrub_row(empty, 0, 0))
        scrubbing.start()
        while not driver.stalled:
            time.sleep(0.001)
        freeing = threading.Thread(target=lambda: free(at, 100, 0, None))
        freeing.start()
        for _ in range(40):
            time.sleep(0.005)
        assert freeing.is_alive()
        driver.go_on()
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            pass
        {call}
        scrubbing.join(), freeing.join()
        assert not _native.last_torch_error()
        """,
        timeout_s=20,
    )
