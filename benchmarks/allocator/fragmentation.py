"""Fragmentation, and ns an allocation and a free, over an hour of finetune iterations; on the host driver, any machine.

Replays a recorded iteration (record_iteration.py), or with ``--synthetic`` iterations made from LLaMA3-8B's shapes with
micro-batches of 150 to 1,024 tokens, while window layers are dropped and loaded and rows go back and forth.
``--iterations N``; an hour is about 1,200 of 3 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed package, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

import numpy as np

from backends.cuda._native import HostDriver
from backends.cuda.memory.provider import NativeProvider
from benchmarks.allocator.measuring import RESULTS, save, spread
from benchmarks.record import results_folder
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator

ROWS, COLUMNS = 200, 64
LAYER_TENSORS = [4096 * 4096 * 2] * 2 + [1024 * 4096 * 2] * 2 + [4096 * 14336 * 2] * 3 + [4096 * 2] * 2
LAYER_ROWS = 4


class Iteration:
    """A sequence of allocations (bytes, positive) and frees (-(number of the allocation) - 1)."""

    def __init__(self) -> None:
        """Start empty."""
        self.steps: list[int] = []
        self._allocations = 0

    def take(self, size_bytes: int) -> int:
        """Allocate; return its number."""
        self.steps.append(size_bytes)
        self._allocations += 1
        return self._allocations - 1

    def drop(self, numbers: list[int]) -> None:
        """Free."""
        self.steps.extend(-number - 1 for number in numbers)

    def unit(self, temporaries: list[int], kept: list[int]) -> list[int]:
        """Temporaries, each freed two allocations later, then what the unit leaves behind."""
        held: list[int] = []
        for size_bytes in temporaries:
            held.append(self.take(size_bytes))
            if len(held) > 2:
                self.drop([held.pop(0)])
        numbers = [self.take(size_bytes) for size_bytes in kept]
        self.drop(held)
        return numbers


def synthetic_iteration(micro_batches: list[int]) -> list[int]:
    """LLaMA3-8B, LoRA r = 16 on q and v: each micro-batch (tokens) forward and backward with recompute, then AdamW."""
    made = Iteration()
    hidden, wide, kv, rank = 4096, 14336, 1024, 16
    matrices = [rank * hidden * 2, hidden * rank * 2, rank * hidden * 2, kv * rank * 2]
    gradients = [made.take(size_bytes) for _ in range(32) for size_bytes in matrices]
    for tokens in micro_batches:
        body = [
            tokens * 4,
            tokens * hidden * 4,
            tokens * hidden * 2,
            tokens * hidden * 2,
            tokens * kv * 2,
            tokens * kv * 2,
        ]
        body += [tokens * rank * 2, tokens * hidden * 2, tokens * rank * 2, tokens * kv * 2, tokens * 32 * 4]
        body += [tokens * hidden * 2, tokens * wide * 2, tokens * wide * 2, tokens * wide * 2, tokens * hidden * 2]
        body += [512, 2048, 16, 4]
        inputs = [made.unit(body, [tokens * hidden * 2]) for _ in range(32)]
        for layer in reversed(range(32)):
            made.drop(made.unit(body + body[::-1], matrices))
            made.drop(inputs[layer])
    for _ in range(128):
        made.unit([rank * hidden * 4] * 6 + [4, 4, 4], [])
    made.drop(gradients)
    return made.steps


def replay(space: Any, steps: list[int]) -> tuple[list[float], int]:
    """One iteration; return the MiB of fragmentation at 16 points of it, and the number of allocations."""
    addresses: list[int] = []
    allocate, free = space.allocate, space.free
    look = max(1, len(steps) // 16)
    seen = []
    for index, step in enumerate(steps):
        if step > 0:
            addresses.append(allocate(step, 1))
        else:
            free(addresses[-step - 1], 1)
        if index % look == 0:
            seen.append(space.stats()["fragmentation_bytes"] / 2**20)
    return seen, len(addresses)


def recorded_iteration() -> Path | None:
    """The recording of this run's results folder, else the committed one; ends the program where there is none."""
    folders = [results_folder(__file__), RESULTS]
    for path in (folder / "finetune_iteration_trace.json" for folder in folders):
        if path.exists():
            return path
    sys.exit(f"no finetune_iteration_trace.json in {folders[0]} or {RESULTS}: run record_iteration.py, or --synthetic")


def cross_stream_free_ns() -> dict[str, float]:
    """Mean ns of a free on another stream than the tensor's, while so many such frees wait for their fences."""
    figures = {}
    for pending in (0, 100, 1000, 10000):
        driver = HostDriver()
        memory = UnifiedAllocator(
            GridGeometry(row_tokens=1024, columns=COLUMNS, rows=16), provider := NativeProvider(driver)
        )
        memory.lend_rows(15)
        driver.hold(1)
        driver.submit(1)
        for _ in range(pending):
            provider.space.free(provider.space.allocate(2048, 1), 2)
        provider.space.reset_latencies()
        for _ in range(2000):
            provider.space.free(provider.space.allocate(2048, 1), 2)
        figures[f"{pending}_pending"] = provider.space.stats()["free"]["mean_ns"] or 0.0
        driver.let_go(1)
        memory.release()
    return figures


def main() -> None:
    """Replay and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=1200, help="how many; an hour is about 1,200")
    parser.add_argument(
        "--synthetic", action="store_true", help="iterations made from the model's shapes, not the recording"
    )
    options = parser.parse_args()
    iterations: int = options.iterations
    rng = np.random.Generator(np.random.PCG64(3))
    recorded = None if options.synthetic else recorded_iteration()
    if recorded is not None:
        trace, variants = str(recorded), [json.loads(recorded.read_text())["steps"]]
    else:
        trace, variants = "synthetic", [synthetic_iteration(rng.integers(150, 1025, 2).tolist()) for _ in range(16)]
    print(f"iterations: {trace}", flush=True)
    provider = NativeProvider(HostDriver())
    memory = UnifiedAllocator(GridGeometry(row_tokens=1024, columns=COLUMNS, rows=ROWS), provider)
    space = provider.space
    memory.lend_rows(150)
    window = [[space.allocate(size, 2) for size in LAYER_TENSORS] for _ in range(24)]
    within: list[float] = []
    after: list[float] = []
    wall = time.perf_counter()
    allocations = 0
    for iteration in range(iterations):
        seen, allocations = replay(space, variants[int(rng.integers(len(variants)))])
        within += seen
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
        "trace": "synthetic" if recorded is None else recorded.name,
        "trace_folder": None if recorded is None else ("committed" if recorded.parent == RESULTS else "HARLI_RESULTS"),
        "iterations": iterations,
        "allocations_per_iteration": allocations,
        "within_iterations_mib": spread(within) | {"mean": float(np.mean(within)), "max": max(within)},
        "between_iterations_mib": spread(after) | {"mean": float(np.mean(after)), "max": max(after)},
        "drift_mib": float(np.mean(after[-len(after) // 10 :]) - np.mean(after[: max(1, len(after) // 10)])),
        "allocate": stats["allocate"],
        "free": stats["free"],
        "cross_stream_free_ns": cross_stream_free_ns(),
        "wall_s": time.perf_counter() - wall,
    }
    print(save("fragmentation", figures))


if __name__ == "__main__":
    main()
