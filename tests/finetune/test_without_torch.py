"""What is said, and what still works, where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

MISSING = [name for name in ("torch", "transformers", "peft", "safetensors") if find_spec(name) is None]


def test_the_tests_of_the_engine_have_what_they_need() -> None:
    """Without the packages of the extra ``finetune`` the tests of the engine are not run, and this says so."""
    if MISSING:
        pytest.skip(
            f"no {', '.join(MISSING)}: the tests of the finetuning engine are left out (tox -e finetune runs them)"
        )


def test_the_loops_view_of_a_job_needs_no_torch() -> None:
    """A serving loop, and whoever only reads settings, can import the interface without loading torch."""
    code = (
        "import sys, backends.cuda.finetune.work, backends.cuda.finetune.recipe, backends.cuda.finetune.feed;"
        "print([name for name in ('torch', 'transformers', 'peft', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
