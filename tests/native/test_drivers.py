"""The driver contract, on the host and on a GPU where there is one; and what only the host's streams can do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from backends.cuda import _native
from backends.cuda._native import Driver, HostDriver
from harli_core.errors import ConfigError, DriverCallError
from tests.native.driver_contract import CONTRACT, backed, give_back
from tests.native.machines import cuda_driver


@pytest.fixture(params=[lambda: HostDriver(4096), HostDriver, cuda_driver], ids=["host-4k", "host-2m", "cuda"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A driver that must have nothing left at the end."""
    made: Driver = request.param()
    yield made
    if isinstance(made, HostDriver):
        assert made.use() == (0, 0, 0, 0)


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_contract(driver: Driver, rule: Callable[[Driver], None]) -> None:
    """One rule of the contract."""
    rule(driver)


def test_held_stream_keeps_its_work() -> None:
    """Work on a held stream happens when it is completed, piece by piece; an event passes with the last piece before it."""
    driver = HostDriver(4096)
    at, handles = backed(driver)
    array = memoryview((ctypes.c_uint8 * 4096).from_address(at)).cast("B")
    driver.hold(5)
    driver.fill(at, 0x0101, 4096, 5)
    event = driver.create_event()
    driver.record(event, 5)
    driver.submit(5)
    assert (array[0], driver.query(event), driver.outstanding(5)) == (0, False, 2)
    driver.complete(5, 1)
    assert (array[0], driver.query(event), driver.outstanding(5)) == (1, True, 1)
    driver.let_go(5)
    driver.submit(5)
    assert driver.outstanding(5) == 0
    driver.destroy(event)
    give_back(driver, at, handles)


def test_new_memory_is_zero_again() -> None:
    """A handle that gets the place of a released one does not show its bytes."""
    driver = HostDriver(4096)
    at, handles = backed(driver)
    driver.fill(at, 0xFFFF, 4096)
    give_back(driver, at, handles)
    at, handles = backed(driver)
    assert bytes((ctypes.c_uint8 * 8).from_address(at)) == bytes(8)
    give_back(driver, at, handles)


@pytest.mark.parametrize("granularity", [0, 1000, 2048, 12288, 2**63])
def test_granularity_is_a_power_of_two_of_pages(granularity: int) -> None:
    """Anything else could not be mapped, or not reserved with alignment."""
    with pytest.raises(ConfigError, match="no power of two of at least a page"):
        HostDriver(granularity)


def test_unknown_call_is_refused() -> None:
    """The fault injector knows the calls by name."""
    with pytest.raises(ConfigError, match="no driver call is named mmap"):
        HostDriver(4096).calls("mmap")  # type: ignore[arg-type]


def test_missing_gpu_is_an_error_that_says_so() -> None:
    """Without a GPU the CUDA driver raises one line; nothing aborts."""
    if not _native.with_cuda:
        pytest.skip("the extension was built without CUDA")
    try:
        _native.CudaDriver()
    except DriverCallError as error:
        assert "libcuda.so.1" in str(error) or "CUresult" in str(error)  # noqa: PT017
