"""What all tests share: the folder of public data that some of them read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder named by HARLI_SHARED; without it the test is skipped, or fails where HARLI_REQUIRE_SHARED=1."""
    setting = os.environ.get("HARLI_SHARED")
    if setting and Path(setting).is_dir():
        return Path(setting)
    reason = f"HARLI_SHARED names no folder ({setting!r})" if setting else "HARLI_SHARED is not set"
    reason += ": public traces and measurements are not here"
    if os.environ.get("HARLI_REQUIRE_SHARED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
