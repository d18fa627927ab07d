"""GPU time to move a whole LLaMA3-8B row (1,024 tokens x 64 columns x 2 KiB) and rewrite the request-to-slot table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import backends.cuda.memory  # noqa: F401  the installed package, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

import numpy as np
import torch

from backends.cuda import _native
from backends.cuda.memory.compaction import CudaCompactor
from backends.cuda.memory.provider import NativeProvider
from benchmarks.allocator.measuring import gpu_ms, save, spread
from harli_core.memory.compaction import Compaction
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator


def main() -> None:
    """Measure the kernel alone, and all of `CudaCompactor.apply` (the list of moves is copied to the GPU first)."""
    geometry = GridGeometry(row_tokens=1024, columns=64, rows=32)
    provider = NativeProvider(_native.CudaDriver())
    memory = UnifiedAllocator(geometry, provider)
    compactor = CudaCompactor(provider.pool, geometry)
    rng = np.random.Generator(np.random.PCG64(0))
    table = torch.randint(0, geometry.capacity_tokens, (64, 8192), dtype=torch.int32, device="cuda")
    figures: dict[str, object] = {}
    kernel, stream = compactor._kernel, torch.cuda.current_stream().cuda_stream
    for tokens in (128, 512, 1024):
        source = np.sort(31 * 1024 + rng.permutation(1024)[:tokens]).astype(np.int32)
        destination = np.sort(rng.permutation(30 * 1024)[:tokens] + 1).astype(np.int32)
        moves = torch.from_numpy(np.stack((source, destination))).cuda()
        variants: dict[str, Callable[[], object]] = {
            "kernel": partial(kernel.launch, compactor._bases, moves, 2048, table, stream),
            "apply": partial(compactor.apply, Compaction(source, destination, (31,)), table),
        }
        times = gpu_ms(variants, 100)
        figures[f"{tokens}_tokens"] = {
            **{f"{name}_us": spread([1000 * ms for ms in values]) for name, values in times.items()},
            "moved_bytes": tokens * geometry.token_bytes,
            "kernel_tb_per_s": 2 * tokens * geometry.token_bytes / spread(times["kernel"])["median"] / 1e9,
        }
    torch.cuda.synchronize()
    memory.release()
    print(save("compaction_time", {"table_entries": table.numel(), **figures}))


if __name__ == "__main__":
    main()
