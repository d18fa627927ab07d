"""Data sheet figures of GPUs, for what is not measured: memory size and the peaks that utilisation is relative to."""

from __future__ import annotations

from dataclasses import dataclass

from harli_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """``peak_flops`` is dense bf16, ``peak_bytes_per_s`` DRAM bandwidth, ``memory_bytes`` what the card has."""

    name: str
    memory_bytes: int
    peak_flops: float
    peak_bytes_per_s: float


GPUS: dict[str, GpuSheet] = {"h200": GpuSheet("h200", 141 * 10**9, 989e12, 4.8e12)}
"""GPUs for which samples ship with Harli."""


def gpu_sheet(name: str) -> GpuSheet:
    """Look a GPU up by name; raises `ConfigError` with the known names."""
    try:
        return GPUS[name]
    except KeyError:
        raise ConfigError(f"unknown GPU {name!r}: known GPUs are {', '.join(sorted(GPUS))}") from None
