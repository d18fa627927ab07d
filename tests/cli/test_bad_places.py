"""Places where results or logs cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Harli


@pytest.mark.parametrize("out", ["three.csv", "three.csv/below", "/proc/harli", "/dev/null"])
def test_unwritable_out(harli: Harli, trace: Path, tmp_path: Path, out: str) -> None:
    """Found before the run: a file in the way, a file as a parent, a file system that takes no files."""
    before = trace.read_bytes()
    message = harli("run", "--trace", trace, "--out", out).error()
    assert f"--out {out}: cannot write results there" in message
    assert trace.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]


@pytest.mark.parametrize("log", ["nowhere/log", ".", "/proc/harli", "three.csv", "deep/out/steps.parquet"])
def test_unwritable_log(harli: Harli, trace: Path, tmp_path: Path, log: str) -> None:
    """No such folder, a folder, a file system that takes no files, or a file that the run needs itself."""
    before = trace.read_bytes()
    message = harli("run", "--trace", trace, "--out", "deep/out", "--log", log).error()
    assert "log" in message
    assert log in message
    assert trace.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]
