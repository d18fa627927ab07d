"""Torch, for what needs it; the rest of the memory works without."""

from __future__ import annotations

from typing import Any

from harli_core.errors import BackendUnavailableError

HOW_TO_INSTALL = "install it with: pip install '.[cuda]' in the checkout"


def torch_for(purpose: str) -> Any:
    """Return the module; raises `BackendUnavailableError` that says for what it is needed."""
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailableError(f"{purpose} needs torch, which is not installed; {HOW_TO_INSTALL}") from error
    return torch


def torch_on_gpu(purpose: str) -> Any:
    """Return the module; raises `BackendUnavailableError` where it is missing or finds no GPU."""
    torch = torch_for(purpose)
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"{purpose} needs a GPU, and torch {torch.__version__} finds none: a CUDA build of torch that the driver "
            "supports is needed, on a machine with an NVIDIA GPU"
        )
    return torch
