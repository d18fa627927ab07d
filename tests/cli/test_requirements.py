"""Which packages `--backend cuda` needs, and what is said of those that are not there or too old."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from backends.cuda import doctor, requirements
from backends.cuda.doctor import Finding, diagnose
from backends.cuda.requirements import PACKAGES
from backends.cuda.serving import sglang_version

NEW_ENOUGH = {
    "torch": "2.11.0+cu130",
    "transformers": "5.17.0",
    "peft": "0.21.0",
    "cuda-python": "13.1",
    "sglang": "0.5.16",
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, as far as anybody can see: everything, until a test changes it."""
    versions = dict(NEW_ENOUGH)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    def found(name: str) -> object | None:
        return True if {"cuda": "cuda-python"}.get(name, name) in versions or name in versions else None

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(requirements, "find_spec", found)
    monkeypatch.setattr(doctor, "_driver_library", lambda: Finding("NVIDIA driver", None, "", "install it"))
    return versions


def packages() -> dict[str, Finding]:
    """What the doctor says of packages, by name."""
    return {one.name.removeprefix("package "): one for one in diagnose().findings if one.name.startswith("package ")}


def test_versions_are_those_of_the_extra() -> None:
    """pyproject.toml says the same, package by package."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = dict(re.findall(r"^([a-z-]+)(.*)$", "\n".join(project["optional-dependencies"]["cuda"]), re.MULTILINE))
    first, below = (".".join(map(str, part)) for part in (sglang_version.FIRST, sglang_version.BELOW))
    assert extra.pop("sglang") == f">={first},<{below}"
    assert extra == {one.distributions[0]: f">={'.'.join(map(str, one.first))}" for one in PACKAGES}


def test_versions_that_will_do_are_named(installed: dict[str, str]) -> None:
    """Each package with the version that is installed."""
    found = packages()
    assert list(found) == ["torch", "transformers", "peft", "cuda", "sglang"]
    assert [one.value for one in found.values()] == list(NEW_ENOUGH.values())
    assert all(one.ok for one in found.values())


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("torch", "2.9.1", "2.11 or newer is needed"),
        ("transformers", "4.57.1", "5 or newer is needed"),
        ("peft", "0.20.9", "0.21 or newer is needed"),
        ("sglang", "0.5.15", "SGLang 0.5.15 is installed; 0.5.16 or newer, below 0.5.17 is needed"),
    ],
)
def test_too_old_a_package_is_named_with_what_is_needed(
    installed: dict[str, str], name: str, version: str, said: str
) -> None:
    """By the doctor, and in the line with which a run ends."""
    installed[name] = version
    found = packages()
    assert found[name].value == version
    assert said in (found[name].remedy or "")
    assert [one for one in found if not found[one].ok] == [name]
    (line,) = [one for one in requirements.missing() if version in one]
    assert said in line


@pytest.mark.parametrize("name", ["torch", "peft", "sglang"])
def test_a_package_that_is_not_there_says_how_to_get_it(installed: dict[str, str], name: str) -> None:
    """And which version it has to be."""
    del installed[name]
    found = packages()[name]
    assert found.value is False
    assert "is needed" in (found.remedy or "")
    assert "pip install '.[cuda]'" in (found.remedy or "")


def test_a_package_whose_version_nobody_knows_is_taken_as_it_is(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be imported, which is what is needed."""
    del installed["cuda-python"]
    monkeypatch.setattr(requirements, "find_spec", lambda _name: True)
    assert packages()["cuda"] == Finding("package cuda", True)
    installed["cuda-bindings"] = "12.9.0"
    assert not packages()["cuda"].ok
