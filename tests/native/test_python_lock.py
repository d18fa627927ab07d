"""Python's lock is given up by whoever waits for a pool that is busy with the driver."""

from __future__ import annotations

import pytest

from tests.native.programs import passes


@pytest.mark.parametrize(
    "call",
    [
        "pool.is_lent(0)",
        "pool.stats()",
        "pool.check_integrity()",
        "pool.lend_row(0)",
        "space.add_row(0)",
        "space.open_row(1)",
        "space.scrub_row(1, 0, 0)",
        "space.remove_row(1)",
        "space.check_integrity()",
    ],
)
def test_waiting_for_the_pool_lets_others_run(call: str) -> None:
    """While one thread is in a driver call and another waits for the pool, a third goes on; otherwise this hangs."""
    passes(
        f"""
        import threading, time
        from backends.cuda._native import HostDriver, PagePool, TensorSpace
        driver = HostDriver(4096)
        pool = PagePool(driver, 3, 2, 8192, True)
        pool.commit_row(0), pool.commit_row(1)
        pool.lend_row(1)
        space = TensorSpace(pool)
        space.add_row(1), space.close_row(1)
        if "add_row" in {call!r}:
            pool.lend_row(0)
        driver.stall("create")
        busy = threading.Thread(target=lambda: pool.commit_row(2))
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
    )


@pytest.mark.parametrize(
    "call", ["_native.bound_torch_space()", "_native.last_torch_error()", "_native.bind_torch_space(None)"]
)
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "bound before"])
def test_last_reference_to_a_space_goes_without_the_torch_mutex(call: str, bound: bool) -> None:
    """A thread of torch's waits for Python's lock to let a space go; who has that lock may take the mutex meanwhile.

    The lock changes hands here only where a thread gives it up, so the order is always the same: torch's free begins
    and gives the lock up, the other thread takes it and keeps it until the free can only be waiting for it, then calls.
    Were the mutex held by then, this would hang.
    """
    passes(
        f"""
        import ctypes, sys, threading, time
        from backends.cuda import _native
        from backends.cuda._native import HostDriver, PagePool, TensorSpace
        library = ctypes.CDLL(_native.library_path())  # its calls give Python's lock up
        malloc, free = library.harli_torch_malloc, library.harli_torch_free
        malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        free.restype, free.argtypes = None, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        pool, other = (PagePool(HostDriver(4096), 1, 1, 4096, True) for _ in range(2))
        pool.commit_row(0), pool.lend_row(0)
        space = TensorSpace(pool)
        space.add_row(0)
        _native.bind_torch_space(space)
        at = malloc(100, 0, None)
        _native.bind_torch_space(TensorSpace(other) if {bound} else None)
        del space  # torch's free of its last tensor is the last reference now
        sys.setswitchinterval(1e6)
        holding = threading.Event()

        def hold_and_call():
            holding.wait()  # until the free gives the lock up
            until = time.perf_counter() + 0.3
            while time.perf_counter() < until:
                pass
            {call}

        caller = threading.Thread(target=hold_and_call)
        caller.start()
        holding.set()
        free(at, 100, 0, None)
        caller.join()
        assert not _native.last_torch_error()
        """,
        timeout_s=20,
    )


def test_space_goes_while_torch_and_python_call() -> None:
    """The last reference to a space goes with torch's last free, on a thread without Python's lock, while others bind."""
    passes(
        """
        import ctypes, threading
        from backends.cuda import _native
        from backends.cuda._native import HostDriver, PagePool, TensorSpace
        library = ctypes.CDLL(_native.library_path())  # its calls give Python's lock up
        malloc, free = library.harli_torch_malloc, library.harli_torch_free
        malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        free.restype, free.argtypes = None, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        pool = PagePool(HostDriver(4096), 60, 1, 4096, True)
        for row in range(60):
            pool.commit_row(row)
            pool.lend_row(row)
        done = threading.Event()

        def ask():
            while not done.is_set():
                _native.bound_torch_space()
                _native.last_torch_error()

        askers = [threading.Thread(target=ask) for _ in range(2)]
        for asker in askers:
            asker.start()
        for row in range(60):
            space = TensorSpace(pool)
            space.add_row(row)
            _native.bind_torch_space(space)
            at = malloc(100, 0, None)
            _native.bind_torch_space(None)
            del space
            free(at, 100, 0, None)
        done.set()
        for asker in askers:
            asker.join()
        assert not _native.last_torch_error()
        """
    )
