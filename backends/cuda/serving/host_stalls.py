"""What may hold the host up in the middle of a step: looking for memory, compiling a kernel, collecting garbage.

The first two should be over before anything is served, and collections short; `HostStalls` says whether they were.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

SMALL_BYTES, SMALL_COUNT = 1 << 20, 32
"""Tensors up to a MiB share pieces of two; so many of them at a time."""

LARGE_BYTES = 128 << 20
"""A run of memory that larger tensors are cut from."""


@dataclass(frozen=True, slots=True)
class Look:
    """How often torch had asked the driver for memory, kernels that Triton had made, and collections, at some point."""

    driver_allocations: int
    kernels: int
    collections: int


class HostStalls:
    """Of this process, from now on; without a GPU only garbage collections are counted."""

    def __init__(self, *, on_gpu: bool) -> None:
        """Have Triton tell of each kernel that it compiles, or loads because no launch had needed it."""
        self._on_gpu = on_gpu
        self.kernels: list[str] = []
        self.collections_ms: list[float] = []
        self._began_s = 0.0
        self._earlier: Any = None
        gc.callbacks.append(self._collects)
        if on_gpu:
            import triton

            self._earlier = triton.knobs.runtime.jit_post_compile_hook
            triton.knobs.runtime.jit_post_compile_hook = self._made

    def look(self) -> Look:
        """Where the counts are now."""
        collections = len(self.collections_ms)
        if not self._on_gpu:
            return Look(0, 0, collections)
        import torch

        return Look(int(torch.cuda.memory_stats()["num_device_alloc"]), len(self.kernels), collections)

    def since(self, before: Look) -> dict[str, Any]:
        """How often the driver was asked, which kernels were made, and the longest collection, after ``before``."""
        now = self.look()
        collections_ms = self.collections_ms[before.collections : now.collections]
        return {
            "driver_allocations": now.driver_allocations - before.driver_allocations,
            "kernels_made": self.kernels[before.kernels : now.kernels],
            "garbage_collections": len(collections_ms),
            "longest_collection_ms": round(max(collections_ms, default=0.0), 3),
        }

    def _collects(self, phase: str, _info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began_s = perf_counter()
        else:
            self.collections_ms.append((perf_counter() - self._began_s) * 1e3)

    def _made(self, **told: Any) -> Any:
        self.kernels.append(str(told.get("repr")))
        return None if self._earlier is None else self._earlier(**told)


def keep_memory_for(stream: Any) -> None:
    """Take memory on ``stream``, less where it is short, and give it back to torch, which keeps it for that stream."""
    import torch

    taken = []
    with torch.cuda.stream(stream), suppress(torch.OutOfMemoryError):
        for size_bytes in (*[SMALL_BYTES] * SMALL_COUNT, LARGE_BYTES):
            taken.append(torch.empty(size_bytes, dtype=torch.uint8, device="cuda"))
    del taken
