"""Where a serving process's start-up goes, stage by stage: seconds, and memory of the GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2.0**30

STAGES = {
    "load_model": "weights",
    "alloc_memory_pool": "KV pool",
    "init_attention_backends": "attention backends",
    "init_cuda_graphs": "graphs",
}
"""Methods of SGLang's model runner that a start consists of, in order. The last two are made once for each graph set."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage took; memory is `None` on a CPU."""

    seconds: float
    gib: float | None


def gpu_used_gib(device: str) -> float | None:
    """What is taken of the GPU, torch's unused blocks apart; `None` on a CPU."""
    if device != "cuda":
        return None
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return float(total_bytes - free_bytes) / GIB


@contextmanager
def stages(device: str) -> Iterator[dict[str, Stage]]:
    """Fills what it gives while a scheduler of SGLang is made inside."""
    from backends.cuda.serving import sglang_version

    sglang_version.prepare(device)
    from sglang.srt.model_executor.model_runner import ModelRunner

    found: dict[str, Stage] = {}
    before = {method: getattr(ModelRunner, method) for method in STAGES}
    for method, name in STAGES.items():
        setattr(ModelRunner, method, _timed(before[method], name, found, device))
    try:
        yield found
    finally:
        for method, original in before.items():
            setattr(ModelRunner, method, original)


def _timed(inner: Callable[..., Any], name: str, found: dict[str, Stage], device: str) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        used = gpu_used_gib(device)
        begin_s = time.perf_counter()
        result = inner(*arguments, **options)
        seconds = time.perf_counter() - begin_s
        after = gpu_used_gib(device)
        found[name] = Stage(seconds, None if used is None or after is None else after - used)
        return result

    return timed


def process_age_s() -> float:
    """Seconds since this process began, Python's own start included."""
    began_ticks = int(Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19])
    since_boot_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
    return since_boot_s - began_ticks / os.sysconf("SC_CLK_TCK")


def graphs_of(scheduler: Any) -> tuple[int, int]:
    """Batch sizes that SGLang captured decode graphs for, and the graphs of all sets; none on a CPU."""
    runner = scheduler.tp_worker.model_runner.decode_cuda_graph_runner
    if not hasattr(runner, "capture_bs"):  # decode runs eagerly
        return 0, 0
    return len(runner.capture_bs), len(runner.backend._graphs)
