"""Tests of the finetuning engine: skipped where torch, transformers or peft is missing, unless HARLI_REQUIRE_TORCH=1."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# For tests.finetune.tiny, which run_on_gpu.py uses too; last, so that the installed packages are the ones tested.
sys.path.append(str(Path(__file__).parents[2]))

MISSING = [name for name in ("torch", "transformers", "peft", "safetensors") if find_spec(name) is None]

if MISSING and os.environ.get("HARLI_REQUIRE_TORCH") == "1":
    raise pytest.UsageError(f"HARLI_REQUIRE_TORCH=1, but there is no {', '.join(MISSING)}: tox -e finetune has them")

# Modules that import torch are not even loaded without it; test_without_torch.py stands for them and says why.
NO_TORCH = Path(__file__).with_name("test_without_torch.py")
collect_ignore = [path.name for path in NO_TORCH.parent.glob("test_*.py") if MISSING and path != NO_TORCH]

if not MISSING:
    import torch

    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
