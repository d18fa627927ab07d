"""Tests of the C++ extension: left out where it is not installed, unless HARLI_REQUIRE_NATIVE=1 says that it must be."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# For tests.native.*_contract, which run_on_gpu.py uses too; last, so that the installed packages are the ones tested.
sys.path.append(str(Path(__file__).parents[2]))

collect_ignore_glob = [] if find_spec("backends.cuda._native") else ["test_*.py"]

if collect_ignore_glob and os.environ.get("HARLI_REQUIRE_NATIVE") == "1":
    raise pytest.UsageError(
        "HARLI_REQUIRE_NATIVE=1, but there is no backends.cuda._native: HARLI_NATIVE=host pip install ."
    )
