"""A file is replaced whole or not at all, and others may read it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from harli_core.errors import ConfigError
from traces.whole_file import replace_file, replace_text


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """What new files of this process may not be, for a while."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_are_those_of_any_new_file(tmp_path: Path, mask: int, mode: int) -> None:
    """As the umask has it, whatever they were before."""
    path = tmp_path / "result.json"
    path.touch(0o600)
    with umask(mask):
        replace_text(path, "läuft\n")
    assert path.stat().st_mode & 0o777 == mode
    assert path.read_text("utf-8") == "läuft\n"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    """The disk is full in the middle: one line that names the file, the old content, and nothing beside it."""
    path = tmp_path / "result.json"
    path.write_text("old")

    def fill_up(file: BinaryIO) -> None:
        file.write(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"^cannot write .*result\.json: No space left on device$"):
        replace_file(path, fill_up)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    """The link stays one."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_folder_is_never_replaced(tmp_path: Path) -> None:
    """It says what was expected."""
    with pytest.raises(ConfigError, match="it is a folder; expected the name of a file"):
        replace_text(tmp_path, "new")


def test_nothing_that_lies_beside_it_is_touched(tmp_path: Path) -> None:
    """Not a file that somebody called partial, nor what such a link leads to."""
    (tmp_path / "trace.csv.partial").write_text("somebody's")
    (tmp_path / "other").write_text("somebody's")
    (tmp_path / "result.json.partial").symlink_to(tmp_path / "other")
    for name in ("trace.csv", "result.json"):
        replace_text(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "trace.csv.partial").read_text() == "somebody's"
    assert (tmp_path / "other").read_text() == "somebody's"


def test_a_writer_does_not_take_another_ones_half(tmp_path: Path) -> None:
    """Two at a time: each file that stands there is whole, the last one in the end."""
    path = tmp_path / "result.json"

    def interrupted(file: BinaryIO) -> None:
        file.write(b"first, ")
        file.flush()
        replace_text(path, "second, whole")
        assert path.read_text() == "second, whole"
        file.write(b"whole")

    replace_file(path, interrupted)
    assert path.read_text() == "first, whole"
    assert list(tmp_path.iterdir()) == [path]


def test_a_long_name_is_no_fault(tmp_path: Path) -> None:
    """All that the file system takes, in two bytes a character too."""
    for name in ("n" * 255, "ü" * 127):
        replace_text(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
