"""What the CUDA backend needs from the machine, found out without importing any of it."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

from harli_core.errors import BackendUnavailableError

PACKAGES = ("torch", "transformers", "peft", "cuda")
"""Importable names that the extra ``cuda`` installs."""


def missing() -> list[str]:
    """What is missing here, each with what to do about it."""
    lacking: list[str] = []
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        lacking.append("no NVIDIA driver (libcuda.so.1); run on a machine with an NVIDIA GPU")
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if absent:
        lacking.append(f"no {', '.join(absent)}; install with: pip install '.[cuda]' in the checkout")
    from backends.cuda.memory import extension
    from backends.cuda.serving import sglang_version

    for fault in (sglang_version.fault(sglang_version.installed()), extension.missing()):
        if fault is not None:
            lacking.append(fault)
    return lacking


def require() -> None:
    """Raise `BackendUnavailableError` with everything that is missing in one line."""
    lacking = missing()
    if lacking:
        raise BackendUnavailableError(
            "--backend cuda cannot run here: " + "; ".join(lacking) + "; or use --backend sim"
        )


def require_serving(device: str) -> None:
    """`require` for "cuda"; for "cpu", where SGLang's CPU path serves a tiny model, the same without a driver."""
    if device == "cuda":
        require()
        return
    from backends.cuda.memory import extension
    from backends.cuda.serving import sglang_version

    require_finetuning(device)
    sglang_version.require()
    extension.require()


FINETUNING = ("torch", "transformers", "peft", "safetensors")
"""Importable names that the extra ``finetune`` installs."""


def require_finetuning(device: str) -> None:
    """Raise `BackendUnavailableError` where a job cannot run on ``device`` (cpu or cuda), with what to do about it."""
    absent = [name for name in FINETUNING if find_spec(name) is None]
    if absent:
        raise BackendUnavailableError(
            f"finetuning needs {', '.join(absent)}; install with: pip install '.[finetune]' in the checkout"
        )
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise BackendUnavailableError("--device cuda: torch sees no GPU here; use --device cpu")
