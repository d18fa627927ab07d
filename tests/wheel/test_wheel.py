"""What the wheel holds: our packages with their data, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from zipfile import ZipFile

import pytest

PACKAGES = {"backends", "harli_cli", "harli_core", "policies", "traces"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names() -> list[str]:
    """The files in the wheel that tox built and installed."""
    built = os.environ.get("TOX_PACKAGE")
    if not built:
        pytest.skip("no wheel here; run under tox")
    with ZipFile(built) as wheel:
        return wheel.namelist()


def test_top_level(names: list[str]) -> None:
    """Five packages and the metadata: no tests, benchmarks or documents in site-packages."""
    top = {name.split("/")[0] for name in names}
    (metadata,) = top - PACKAGES
    assert metadata.startswith("harli-")
    assert metadata.endswith(".dist-info")
    assert top - {metadata} == PACKAGES


def test_every_source_and_data_file(names: list[str]) -> None:
    """All Python files and data of the packages in the checkout, and no others: no C++ sources, no caches."""
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and path.suffix in {".py", ".pyi", ".typed", ".json", ".jsonl", ".html", ".css", ".js", ".txt"}
        and "csrc" not in path.parts
    }
    found = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    assert found == expected
    assert "traces/azure_conv.json" in found
    assert {"harli_cli/data/operating_points_llama3-8b.jsonl", "harli_cli/data/prefill_llama3-8b.jsonl"} <= found


def test_pure(names: list[str]) -> None:
    """The default wheel needs no compiler where it is built and fits every platform where it is installed."""
    assert os.environ["TOX_PACKAGE"].endswith("-py3-none-any.whl")
    assert not [name for name in names if name.endswith((".so", ".pyd"))]


def test_licence(names: list[str]) -> None:
    """The licence travels with the wheel."""
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
