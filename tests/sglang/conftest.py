"""A serving instance on the CPU: SGLang's real scheduler, our pool on the host driver, a tiny random Llama."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # for tests.*; last, so that the installed packages are the ones tested

STUBS = Path(__file__).parent / "stubs"
os.environ.setdefault("OMP_NUM_THREADS", "1")
if find_spec("sglang") is None or find_spec("backends.cuda._native") is None:
    if os.environ.get("HARLI_REQUIRE_SGLANG"):
        raise RuntimeError("HARLI_REQUIRE_SGLANG is set, but sglang or the extension backends.cuda._native is missing")
    collect_ignore_glob = ["test_*.py"]
elif find_spec("torchvision") is None:
    sys.path.insert(0, str(STUBS))


@pytest.fixture(scope="session")
def predictor() -> Any:
    """The splits of an H200; its predictions mean nothing here."""
    from harli_cli.package_data import shipped_profile
    from harli_core.predict.predictor import StepPredictor

    return StepPredictor(shipped_profile("h200", "llama3-8b", "llama3-8b"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a tiny random Llama, and its configuration."""
    from tests.sglang import scenes

    folder = tmp_path_factory.mktemp("model")
    return folder, scenes.random_folder(folder, scenes.Shape(), "float32")


@pytest.fixture(scope="session")
def expected(model: tuple[Path, dict[str, Any]]) -> Any:
    """Greedy tokens of plain transformers."""
    import torch
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.from_pretrained(model[0], dtype=torch.float32)

    def tokens(prompt: list[int], count: int) -> list[int]:
        ids = plain.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        found: list[int] = ids[0, len(prompt) :].tolist()
        return found

    return tokens


@pytest.fixture(scope="session")
def instance(predictor: Any, model: tuple[Path, dict[str, Any]]) -> Any:
    """One decoder for all tests (SGLang sets process-wide state); what comes back from finetuning is poisoned."""
    from backends.cuda.serving.instance import Instance
    from backends.cuda.serving.kv_pool import KvSettings
    from backends.cuda.serving.scheduler_factory import ServingSettings

    settings = ServingSettings(
        model[0], 2048, 8, 512, device="cpu", dtype="float32", kv=KvSettings(scrub="poison", block_bytes=4096)
    )
    return Instance(settings, predictor, "local", report=lambda _text: None)
