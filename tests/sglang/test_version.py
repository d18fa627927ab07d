"""Which versions of SGLang are accepted."""

from __future__ import annotations

import pytest

from backends.cuda.serving import sglang_version


@pytest.mark.parametrize("version", ["0.5.16", "0.5.16.post1", "0.5.16+cpu"])
def test_the_tested_version_is_accepted(version: str) -> None:
    """Post releases and local builds of it too."""
    assert sglang_version.fault(version) is None


@pytest.mark.parametrize("version", ["0.5.15", "0.5.17", "0.6.0", "1.0"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    """What is installed and what is needed."""
    fault = sglang_version.fault(version)
    assert fault is not None
    assert version in fault
    assert "0.5.16 or newer, below 0.5.17" in fault


def test_a_missing_sglang_says_how_to_get_it() -> None:
    """The extra that installs it."""
    fault = sglang_version.fault(None)
    assert fault is not None
    assert "pip install" in fault
