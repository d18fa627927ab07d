"""Policies, one file each, and how a policy is found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from harli_core.errors import ConfigError
from harli_core.policy import Policy

PolicyFactory = Callable[..., Policy]

POLICIES: dict[str, str] = {
    "harli": "policies.harli:Harli",
    "hybrid": "policies.hybrid:Hybrid",
    "separate": "policies.separate:Separate",
    "static_split": "policies.static_split:StaticSplit",
    "inference_only": "policies.inference_only:InferenceOnly",
    "pause_on_load": "policies.pause_on_load:PauseOnLoad",
}
"""Built-in policies: name to ``module:Class``."""


def find_policy(name: str) -> PolicyFactory:
    """The class behind a built-in name or ``package.module:Class``; `ConfigError` says what is known."""
    target = POLICIES.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon:
        raise ConfigError(
            f"unknown policy {name!r}: known are {', '.join(sorted(POLICIES))}, or give your own as package.module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        fault = f"{type(error).__name__}: {error}"
        raise ConfigError(f"policy {name!r}: cannot import {module_name!r} ({fault})") from error
    found = getattr(module, class_name, None)
    if not callable(found):
        raise ConfigError(f"policy {name!r}: module {module_name!r} has no class {class_name!r}")
    return cast("PolicyFactory", found)
