"""A file that is written as a run goes takes its name when it is complete, and touches nothing else."""

from __future__ import annotations

from pathlib import Path

from harli_cli.unfinished_file import UnfinishedFile
from harli_core.errors import ConfigError, HarliError


def fault(error: OSError) -> HarliError:
    """As a user would see it."""
    return ConfigError(str(error))


def test_it_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    """Before that the old one stands there, and nothing is left beside it."""
    path = tmp_path / "log.jsonl"
    path.write_text("old")
    file = UnfinishedFile(path, fault)
    file.write("new, ")
    assert path.read_text() == "old"
    file.close("whole", complete=True)
    assert path.read_text() == "new, whole"
    assert list(tmp_path.iterdir()) == [path]


def test_one_that_is_not_complete_leaves_the_old_one(tmp_path: Path) -> None:
    """And nothing beside it."""
    path = tmp_path / "log.jsonl"
    path.write_text("old")
    UnfinishedFile(path, fault).close("", complete=False)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_at_a_time_have_their_own(tmp_path: Path) -> None:
    """The last one that is complete stands there whole; what somebody called partial is not touched."""
    path, theirs = tmp_path / "trace.json", tmp_path / "trace.json.partial"
    theirs.write_text("somebody's")
    first, second = UnfinishedFile(path, fault), UnfinishedFile(path, fault)
    first.write("first")
    second.write("second")
    first.close("!", complete=True)
    second.close("!", complete=True)
    assert path.read_text() == "second!"
    assert theirs.read_text() == "somebody's"
    assert {found.name for found in tmp_path.iterdir()} == {"trace.json", "trace.json.partial"}
