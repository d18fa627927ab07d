"""Kernels of SGLang; on a CPU its own Torch code computes, so each name is there and none may be called."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: object, **options: object) -> object:
        raise NotImplementedError(name)

    return missing
