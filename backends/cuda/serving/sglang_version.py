"""Which SGLang this works with, checked before anything of it is imported."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

from harli_core.errors import BackendUnavailableError

FIRST, BELOW = (0, 5, 16), (0, 5, 17)
"""The range that the adapters were written and tested against; they use SGLang's internals, which change."""


def installed() -> str | None:
    """The version of SGLang that is installed, `None` without one."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def fault(version: str | None) -> str | None:
    """What is wrong with ``version``, `None` if nothing is."""
    wanted = f"{'.'.join(map(str, FIRST))} or newer, below {'.'.join(map(str, BELOW))}"
    if version is None:
        return f"SGLang is not installed; {wanted} is needed: pip install '.[cuda]' in the checkout"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not FIRST <= numbers < BELOW:
        return f"SGLang {version} is installed; {wanted} is needed"
    return None


def require() -> None:
    """Raise `BackendUnavailableError` unless a tested SGLang is there."""
    found = fault(installed())
    if found is not None:
        raise BackendUnavailableError(found)


def prepare(device: str) -> None:
    """Make SGLang importable for ``device`` ("cuda" or "cpu"); call once before the first import of it."""
    require()
    # Eager launches of finetuning must not queue in front of the decode graph's (the driver has 8 connections by default).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # The pool is sized beforehand, never after the graphs: its rows are ours.
    os.environ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] = "0"
    if device == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    _accept_known_configs()


def _accept_known_configs() -> None:
    """SGLang registers model configs that newer versions of transformers already have; let it."""
    from transformers.models.auto import configuration_auto

    mapping: Any = configuration_auto._LazyConfigMapping
    if getattr(mapping.register, "accepts_known", False):
        return
    original = mapping.register

    def register(self: Any, key: Any, value: Any, exist_ok: bool = False) -> None:  # noqa: ARG001
        original(self, key, value, exist_ok=True)

    register.accepts_known = True  # type: ignore[attr-defined]
    mapping.register = register
