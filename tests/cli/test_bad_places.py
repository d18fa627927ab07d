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


@pytest.mark.parametrize("out", ["three.csv", "three.csv/below/it"])
def test_a_file_is_no_folder(harli: Harli, trace: Path, out: str) -> None:
    """The file that is in the way is named."""
    assert f"({trace} is a file, not a folder)" in harli("run", "--trace", trace, "--out", out).error()


def test_dots_make_no_folders(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """`nowhere/../here` is `here`: only that is made."""
    assert harli("run", "--trace", trace, "--out", "nowhere/../here").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", trace.name]


def test_links_in_a_circle(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """A link that leads nowhere is refused in one line."""
    (tmp_path / "round").symlink_to("round")
    assert "--out round: cannot write results there" in harli("run", "--trace", trace, "--out", "round").error()


@pytest.mark.parametrize("log", ["nowhere/log", ".", "/proc/harli", "three.csv", "deep/out/steps.parquet"])
def test_unwritable_log(harli: Harli, trace: Path, tmp_path: Path, log: str) -> None:
    """No such folder, a folder, a file system that takes no files, or a file that the run needs itself."""
    before = trace.read_bytes()
    message = harli("run", "--trace", trace, "--out", "deep/out", "--log", log).error()
    assert "log" in message
    assert log in message
    assert trace.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [trace.name]
