"""Where a result says that it comes from."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from harli_cli import provenance


def test_only_the_name_of_the_trace_is_told() -> None:
    """Alone or behind its option; other words stay as they were typed, quoted where a shell asks for it."""
    words = ["run", "--trace", "/a/b/t.csv", "--trace=/a/b/t.csv", "--check", "a.b > 1", "/a/b/t.csv.gz"]
    assert provenance.typed_command(words, "/a/b/t.csv") == (
        "harli run --trace t.csv --trace=t.csv --check 'a.b > 1' /a/b/t.csv.gz"
    )


@pytest.fixture
def copy(tmp_path: Path) -> ModuleType:
    """The module as a package of a work tree has it, tracked by nobody yet."""
    path = tmp_path / "harli_cli" / "provenance.py"
    path.parent.mkdir()
    path.write_bytes(Path(provenance.__file__).read_bytes())
    spec = importlib.util.spec_from_file_location("copied_provenance", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_code_outside_of_a_checkout_has_no_commit(copy: ModuleType, tmp_path: Path) -> None:
    """Nor has code that merely lies in somebody else's work tree, as an installed package may."""
    assert copy.commit() is None
    (tmp_path / "README").write_text("somebody else's")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "README")
    _git(tmp_path, "commit", "-q", "-m", "theirs")
    assert copy.commit() is None


def test_changed_code_is_told_from_its_commit(copy: ModuleType, tmp_path: Path) -> None:
    """A plus stands behind the commit where the code is not as committed; results beside it do not count."""
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "harli_cli")
    _git(tmp_path, "commit", "-q", "-m", "ours")
    head = _git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "compare.json").write_text("{}")
    assert copy.commit() == head
    (tmp_path / "harli_cli" / "new.py").write_text("")
    assert copy.commit() == head + "+"
