"""What may hold the host up in the middle of a step: looking for memory, and compiling a kernel.

Both should be over before anything is served; `HostStalls` says whether they were.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

SMALL_BYTES, SMALL_COUNT = 1 << 20, 32
"""Tensors up to a MiB share pieces of two; so many of them at a time."""

LARGE_BYTES = 128 << 20
"""A run of memory that larger tensors are cut from."""


@dataclass(frozen=True, slots=True)
class Look:
    """How often torch had asked the driver for memory, and how many kernels Triton had made, at some point."""

    driver_allocations: int
    kernels: int


class HostStalls:
    """Of this process, from now on; nothing is counted without a GPU."""

    def __init__(self, *, on_gpu: bool) -> None:
        """Have Triton tell of each kernel that it compiles, or loads because no launch had needed it."""
        self._on_gpu = on_gpu
        self.kernels: list[str] = []
        self._earlier: Any = None
        if on_gpu:
            import triton

            self._earlier = triton.knobs.runtime.jit_post_compile_hook
            triton.knobs.runtime.jit_post_compile_hook = self._made

    def look(self) -> Look:
        """Where the counts are now."""
        if not self._on_gpu:
            return Look(0, 0)
        import torch

        return Look(int(torch.cuda.memory_stats()["num_device_alloc"]), len(self.kernels))

    def since(self, before: Look) -> dict[str, Any]:
        """How often the driver was asked, and which kernels were made, after ``before``."""
        now = self.look()
        return {
            "driver_allocations": now.driver_allocations - before.driver_allocations,
            "kernels_made": self.kernels[before.kernels : now.kernels],
        }

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
