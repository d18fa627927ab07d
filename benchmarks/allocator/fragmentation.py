"""Fragmentation, and ns an allocation and a free, over an hour of finetune iterations; on the host driver, any machine.

Replays a recorded iteration (record_iteration.py) or, without one, an iteration synthesised from LLaMA3-8B's shapes, while
window layers are dropped and loaded and rows go back and forth. ``--iterations N``; an hour is about 1,200 of 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import numpy as np

from backends.cuda._native import HostDriver
from backends.cuda.memory.provider import NativeProvider
from benchmarks.allocator.measuring import RESULTS, save, spread
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator

ROWS, COLUMNS = 200, 64
LAYER_TENSORS = [4096 * 4096 * 2] * 2 + [1024 * 4096 * 2] * 2 + [4096 * 14336 * 2] * 3 + [4096 * 2] * 2
LAYER_ROWS = 4


def synthetic_iteration() -> list[int]:
    """Allocations of 32 layers forward and backward with recompute, 1,024 tokens, LoRA r = 16, then AdamW."""
    steps: list[int] = []

    def unit(sizes: list[int], kept: list[int]) -> list[int]:
        """Temporaries each freed two allocations later; the kept ones are returned by number."""
        first = len([step for step in steps if step > 0])
        for index, size in enumerate(sizes):
            steps.append(size)
            if index >= 2:
                steps.append(-(first + index - 2) - 1)
        steps.extend(-(first + index) - 1 for index in (len(sizes) - 2, len(sizes) - 1))
        numbers = []
        for size in kept:
            numbers.append(len([step for step in steps if step > 0]))
            steps.append(size)
        return numbers

    tokens, hidden, wide, kv, rank = 1024, 4096, 14336, 1024, 16
    body = [tokens * 4, tokens * hidden * 4, tokens * hidden * 2, tokens * hidden * 2, tokens * kv * 2, tokens * kv * 2]
    body += [
        tokens * rank * 2,
        tokens * hidden * 2,
        tokens * rank * 2,
        tokens * kv * 2,
        tokens * 32 * 4,
        tokens * hidden * 2,
    ]
    body += [tokens * wide * 2, tokens * wide * 2, tokens * wide * 2, tokens * hidden * 2, 512, 2048, 16, 4]
    inputs = [unit(body, [tokens * hidden * 2]) for _ in range(32)]
    gradients = []
    for layer in range(32):
        gradients += unit(body + body[::-1], [rank * hidden * 2, hidden * rank * 2, rank * hidden * 2, kv * rank * 2])
        steps.extend(-number - 1 for number in inputs[31 - layer])
    for _ in range(128):
        unit([rank * hidden * 4] * 6 + [4, 4, 4], [])
    steps.extend(-number - 1 for number in gradients)
    return steps


def replay(space: Any, steps: list[int]) -> tuple[int, int]:
    """One iteration; return the most bytes of fragmentation seen at 16 points of it, and the allocations."""
    addresses: list[int] = []
    allocate, free = space.allocate, space.free
    look = max(1, len(steps) // 16)
    worst = 0
    for index, step in enumerate(steps):
        if step > 0:
            addresses.append(allocate(step, 1))
        else:
            free(addresses[-step - 1], 1)
        if index % look == 0:
            worst = max(worst, space.stats()["fragmentation_bytes"])
    return worst, len(addresses)


def main() -> None:
    """Replay and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=1200)
    iterations = parser.parse_args().iterations
    recorded = Path(os.environ.get("HARLI_RESULTS", RESULTS)) / "finetune_iteration_trace.json"
    steps = json.loads(recorded.read_text())["steps"] if recorded.exists() else synthetic_iteration()
    provider = NativeProvider(HostDriver())
    memory = UnifiedAllocator(GridGeometry(row_tokens=1024, columns=COLUMNS, rows=ROWS), provider)
    space = provider.space
    rng = np.random.Generator(np.random.PCG64(3))
    memory.lend_rows(150)
    window = [[space.allocate(size, 2) for size in LAYER_TENSORS] for _ in range(24)]
    worst, after, wall = [], [], time.perf_counter()
    allocations = 0
    for iteration in range(iterations):
        peak, allocations = replay(space, steps)
        worst.append(peak / 2**20)
        space.poll()
        for tensors in rng.permutation(24)[:4]:  # the window shrinks and grows with the load
            for address in window[tensors]:
                space.free(address, 2)
            window[tensors] = [space.allocate(size, 2) for size in LAYER_TENSORS]
        if iteration % 5 == 0:
            for row in space.rows_empty()[: int(rng.integers(0, 2 * LAYER_ROWS))]:
                memory.finetune_blocks.remove_row(row)
                memory.grid.begin_reclaim(row)
                space.remove_row(row)
                provider.pool.return_row(row, None, 0)
                memory.grid.finish_reclaim(row)
            memory.lend_rows(int(rng.integers(0, 2 * LAYER_ROWS)))
        after.append(space.stats()["fragmentation_bytes"] / 2**20)
    space.check_integrity()
    stats = space.stats()
    figures = {
        "trace": recorded.name if recorded.exists() else "synthetic",
        "iterations": iterations,
        "allocations_per_iteration": allocations,
        "worst_within_iteration_mib": spread(worst) | {"mean": float(np.mean(worst)), "max": max(worst)},
        "between_iterations_mib": spread(after) | {"mean": float(np.mean(after)), "max": max(after)},
        "drift_mib": float(np.mean(after[-len(after) // 10 :]) - np.mean(after[: max(1, len(after) // 10)])),
        "allocate": stats["allocate"],
        "free": stats["free"],
        "wall_s": time.perf_counter() - wall,
    }
    print(save("fragmentation", figures))


if __name__ == "__main__":
    main()
