"""`free_but_unlendable_bytes` while 64 requests come and go, with and without compaction (bookkeeping only, any machine)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed package, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

import numpy as np

from benchmarks.allocator.measuring import save, spread
from harli_core.memory.counting_provider import CountingProvider
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.token_slots import Slots
from harli_core.memory.unified import UnifiedAllocator

REQUESTS = 64
GRIDS = {
    "per_layer": GridGeometry(row_tokens=1024, columns=64, rows=160),
    "page_major": GridGeometry(row_tokens=16, columns=1, rows=160 * 64),
}


def churn(geometry: GridGeometry, every: int | None, steps: int) -> dict[str, Any]:
    """Decode ``steps`` steps at a full batch; compact every ``every`` steps as far as it goes."""
    rng = np.random.Generator(np.random.PCG64(7))
    memory = UnifiedAllocator(geometry, CountingProvider())

    def arrive() -> tuple[Slots, int]:
        prompt = int(np.clip(rng.lognormal(6.5, 0.9), 16, 8192))
        return memory.allocate_tokens(prompt), int(np.clip(rng.lognormal(5.0, 0.8), 2, 2000))

    batch = [arrive() for _ in range(REQUESTS)]
    unlendable, lendable, moved = [], [], 0
    for step in range(steps):
        new = memory.allocate_tokens(REQUESTS)
        for index, (slots, left) in enumerate(batch):
            batch[index] = (np.append(slots, new[index]), left - 1)
            if left <= 1:
                memory.free_tokens(batch[index][0])
                batch[index] = arrive()
        if every is not None and step % every == 0:
            compaction = memory.compact(geometry.rows)
            moved += compaction.source.size
            batch = [(np.sort(compaction.rewrite(slots)), left) for slots, left in batch]
        if step > steps // 5:
            unlendable.append(memory.free_but_unlendable_bytes / 2**20)
            lendable.append(memory.grid.rows_free * geometry.row_bytes / 2**20)
    return {
        "unlendable_mib": spread(unlendable) | {"mean": float(np.mean(unlendable))},
        "lendable_mib": spread(lendable) | {"mean": float(np.mean(lendable))},
        "moved_mib_per_step": moved * geometry.token_bytes / 2**20 / steps,
    }


def main() -> None:
    """Run both layouts."""
    steps = 4000
    figures: dict[str, Any] = {"requests": REQUESTS, "steps": steps}
    for name, geometry in GRIDS.items():
        for every in (None, 50, 10):
            figures[f"{name}_{'never' if every is None else f'every_{every}_steps'}"] = churn(geometry, every, steps)
    print(save("churn", figures))


if __name__ == "__main__":
    main()
