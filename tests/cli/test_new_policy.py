"""`harli policy new`: what it writes runs and keeps the contract; and the guide's commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Harli

GUIDE = Path(__file__).parents[2] / "docs" / "write-a-policy.md"


@pytest.mark.parametrize("name", ["Mine", "class", "hybrid", "a-b", "_", "../x"])
def test_names_that_cannot_be(harli: Any, name: str) -> None:
    """Refused with the name, and nothing is written."""
    assert name in harli("policy", "new", name).error()
    assert list(Path().iterdir()) == []


def test_never_overwrites(harli: Any) -> None:
    """A second time is refused and changes nothing."""
    assert harli("policy", "new", "mine").code == 0
    Path("mine.py").write_text("kept")
    assert "mine.py exists already" in harli("policy", "new", "mine").error()
    assert Path("mine.py").read_text() == "kept"


def test_every_command_of_the_guide(tmp_path: Path) -> None:
    """Each line of its shell blocks, in order, on the trace that it names (or the bundled one where that is not here)."""
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text("utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line and not line.startswith("python3 -m venv")]
    assert len(lines) >= 5
    shared = os.environ.get("HARLI_SHARED")
    azure = Path(shared, "traces/azure/AzureLLMInferenceTrace_conv.csv").resolve() if shared else None
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    for line in lines:
        trace = str(azure) if azure is not None and azure.is_file() else "synthetic"
        command = line.replace("AzureLLMInferenceTrace_conv.csv", trace)
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", "Python has a module of that name"),
        ("numpy", "Python has a module of that name"),
        ("a" * 252, "100 at most"),
    ],
)
def test_names_that_cannot_be_used(name: str, text: str, harli: Harli, tmp_path: Path) -> None:
    """A module that would hide another, or a name that no file system takes."""
    assert text in harli("policy", "new", name).error()
    assert list(tmp_path.iterdir()) == []
