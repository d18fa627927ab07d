"""Drivers of the machine that tests run on."""

from __future__ import annotations

import pytest

from backends.cuda import _native
from backends.cuda._native import Driver
from harli_core.errors import DriverCallError


def cuda_driver() -> Driver:
    """The GPU's driver, or a skip that says why not."""
    if not _native.with_cuda:
        pytest.skip("the extension was built without CUDA")
    try:
        return _native.CudaDriver()
    except DriverCallError as error:
        pytest.skip(str(error))
