"""Small Azure files written for the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

AzureFile = Callable[[bytes], Path]


@pytest.fixture
def azure_file(tmp_path: Path) -> AzureFile:
    """Write bytes to a file whose name says nothing about its format."""

    def write(content: bytes) -> Path:
        path = tmp_path / "requests.dat"
        path.write_bytes(content)
        return path

    return write
