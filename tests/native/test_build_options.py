"""HARLI_NATIVE has one value; any other is refused, never taken for none."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def overrides_for(value: str) -> list[dict[str, object]]:
    """Overrides of the build whose pattern for HARLI_NATIVE matches, as scikit-build-core matches it."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    patterns = [(each["if"]["env"].get("HARLI_NATIVE"), each) for each in build["overrides"]]
    return [each for pattern, each in patterns if pattern is not None and re.search(pattern, value)]


@pytest.mark.parametrize("value", ["cuda", "1", "on", "hosts", "Host", "0"])
def test_unknown_value_is_refused_with_those_that_exist(tmp_path: Path, value: str) -> None:
    """The build runs CMake for it, and CMake stops with one message before it looks for a compiler."""
    (override,) = overrides_for(value)
    assert override["wheel"] == {"cmake": True}
    done = subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HARLI_NATIVE": value},
    )
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert f"HARLI_NATIVE={value} is not known. HARLI_NATIVE=host builds" in message
    assert "HARLI_CUDA=1 builds it with the CUDA driver" in message
    assert "compiler" not in done.stdout


def test_known_values() -> None:
    """``host`` builds the extension; an empty variable is as none."""
    (override,) = overrides_for("host")
    assert override["wheel"] == {"cmake": True}
    assert overrides_for("") == []
