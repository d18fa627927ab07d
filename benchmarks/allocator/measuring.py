"""What the allocator benchmarks share: interleaved timing, and results that say where they come from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import results_folder, write_json

RESULTS = Path(__file__).parent / "results"
REPOSITORY = Path(__file__).parents[2]


def machine() -> dict[str, Any]:
    """Where and from what this run was made."""
    known: dict[str, Any] = {"host": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    try:
        import torch

        known["torch"] = torch.__version__
        if torch.cuda.is_available():
            known["gpu"] = torch.cuda.get_device_name()
            known["sms"] = torch.cuda.get_device_properties(0).multi_processor_count
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            drivers = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
            known["driver"] = drivers[0] if drivers else ""  # one line a GPU, all the same
    except ImportError:
        known["torch"] = None
    return known


def commit() -> str | None:
    """The commit that is measured: HARLI_COMMIT where there is no repository (a copied tree)."""
    given = os.environ.get("HARLI_COMMIT")
    if given:
        return given
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write ``results/name.json`` at once or not at all; HARLI_RESULTS names another folder."""
    record = {
        "benchmark": name,
        "machine": machine(),
        "commit": commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
    path = results_folder(__file__) / f"{name}.json"
    write_json(path, {**record, **figures}, sort_keys=False)
    return path


def spread(values: list[float]) -> dict[str, float]:
    """Median, 1st and 99th percentile, and how many."""
    low, middle, high = np.percentile(values, (1, 50, 99))
    return {"median": float(middle), "p1": float(low), "p99": float(high), "count": len(values)}


def gpu_ms(variants: dict[str, Callable[[], object]], repeats: int, warm_up: int = 5) -> dict[str, list[float]]:
    """GPU time of each variant. They take turns in an order drawn anew each time, so that clocks, heat and what the one
    before left in the caches hit all of them alike.
    """
    import torch

    rng = np.random.Generator(np.random.PCG64(0))
    names = list(variants)
    for _ in range(warm_up):
        for action in variants.values():
            action()
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in variants}
    for _ in range(repeats):
        for at in rng.permutation(len(names)):
            name = names[at]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            variants[name]()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) for begin, end in pairs] for name, pairs in marks.items()}
