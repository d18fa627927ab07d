"""Memory that torch keeps for a stream, so that work on it need not ask the driver for any while others run."""

from __future__ import annotations

from typing import Any

SMALL_BYTES, SMALL_COUNT = 1 << 20, 32
"""Tensors up to a MiB share pieces of two; so many of them at a time."""

LARGE_BYTES = 128 << 20
"""A run of memory that larger tensors are cut from."""


def keep_for(stream: Any) -> None:
    """Take memory on ``stream`` and give it back to torch, which keeps it for tensors of that stream."""
    import torch

    with torch.cuda.stream(stream):
        taken = [torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cuda") for _ in range(SMALL_COUNT)]
        taken.append(torch.empty(LARGE_BYTES, dtype=torch.uint8, device="cuda"))
    del taken


def driver_allocations() -> int | None:
    """How often torch asked the driver for memory so far; `None` without a GPU."""
    import torch

    return int(torch.cuda.memory_stats()["num_device_alloc"]) if torch.cuda.is_available() else None
