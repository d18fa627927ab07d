"""What the CUDA backend needs from the machine, found out without importing any of it."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from harli_core.errors import BackendUnavailableError

INSTALL = "pip install '.[cuda]' in the checkout"


@dataclass(frozen=True, slots=True)
class Package:
    """What the extra ``cuda`` installs: its name in Python, the oldest version, the distributions that it may come from."""

    name: str
    first: tuple[int, ...]
    distributions: tuple[str, ...]

    @property
    def wanted(self) -> str:
        """The versions that will do."""
        return f"{'.'.join(map(str, self.first))} or newer"

    def here(self) -> bool:
        """Whether it can be imported."""
        return find_spec(self.name) is not None

    def installed(self) -> str | None:
        """The version that is installed, `None` without one, or where nobody says which it is."""
        for name in self.distributions:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def too_old(self) -> bool:
        """Whether it is known to be older than `first`."""
        version = self.installed()
        numbers = re.match(r"\d+(\.\d+)*", version) if version is not None else None
        return numbers is not None and tuple(map(int, numbers[0].split("."))) < self.first


PACKAGES = (
    Package("torch", (2, 11), ("torch",)),
    Package("transformers", (5,), ("transformers",)),
    Package("peft", (0, 21), ("peft",)),
    Package("cuda", (13,), ("cuda-python", "cuda-bindings")),
)
"""All of the extra but SGLang, which `sglang_version` knows."""


def missing() -> list[str]:
    """What is missing here, each with what to do about it."""
    lacking: list[str] = []
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        lacking.append("no NVIDIA driver (libcuda.so.1); run on a machine with an NVIDIA GPU")
    absent = [package.name for package in PACKAGES if not package.here()]
    if absent:
        lacking.append(f"no {', '.join(absent)}; install with: {INSTALL}")
    lacking += [
        f"{package.name} {package.installed()} is installed; {package.wanted} is needed: {INSTALL}"
        for package in PACKAGES
        if package.here() and package.too_old()
    ]
    from backends.cuda.memory import extension
    from backends.cuda.serving import sglang_version

    for fault in (sglang_version.fault(sglang_version.installed()), extension.missing()):
        if fault is not None:
            lacking.append(fault)
    return lacking


def require(what: str, instead: str) -> None:
    """Raise `BackendUnavailableError` with everything that is missing for ``what`` in one line, and what else to do."""
    lacking = missing()
    if lacking:
        raise BackendUnavailableError(f"{what} cannot run here: {'; '.join(lacking)}; or {instead}")


def require_serving(device: str) -> None:
    """What ``--backend cuda`` needs; for "cpu", where SGLang's CPU path serves a tiny model, the same but the driver.

    Raises `BackendUnavailableError`.
    """
    if device == "cuda":
        require("--backend cuda", "use --backend sim")
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
