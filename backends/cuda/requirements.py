"""What the CUDA backend needs from the machine, found out without importing any of it."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

from harli_core.errors import BackendUnavailableError

PACKAGES = ("torch", "sglang", "peft", "cuda")
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
    return lacking


def require() -> None:
    """Raise `BackendUnavailableError` with everything that is missing in one line."""
    lacking = [*missing(), "decoding on the GPU is not implemented in this version; use --backend sim"]
    raise BackendUnavailableError("--backend cuda cannot run here: " + "; ".join(lacking))
