"""Decode-like CUDA graph replay while another thread lends and takes back rows, against quiet.

`quiet_again` is quiet a second time: how far its ratio is from 1 is what the other ratios cannot tell apart.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed package, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

import numpy as np
import torch

from backends.cuda import _native
from backends.cuda.memory.provider import Lending, NativeProvider
from benchmarks.allocator.measuring import save, spread
from harli_core.memory.geometry import GridGeometry

SEGMENTS, STEPS = 8, 150
LENDINGS: tuple[Lending, ...] = ("alias", "remap")


def decode_graph() -> tuple[Any, Any]:
    """A graph of 32 pairs of MLP-shaped GEMMs at batch 64: about 2 ms, bound by weight reads as decode is."""
    wide = [torch.randn(4096, 14336, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
    back = [torch.randn(14336, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(32)]
    x = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        hidden = x
        for out, down in zip(wide, back, strict=True):
            hidden = (hidden @ out) @ down
            hidden = hidden * 1e-4

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph, (wide, back, x, side)


class Trader:
    """A thread that lends rows and takes them back, at full rate or one row per ``pause_ms`` with a scrub.

    At full rate by alias no driver call is made at all: what that case shows is the cost of the tables.
    """

    def __init__(self, lending: Lending, pause_ms: float | None) -> None:
        """Commit the rows; the thread starts with `running`."""
        self.driver = _native.CudaDriver()
        self.provider = NativeProvider(self.driver, lending)
        self.provider.reserve(GridGeometry(row_tokens=1024, columns=64, rows=4))
        for row in range(4):
            self.provider.commit_row(row)
        self.pause_ms = pause_ms
        self.rows_traded = 0
        self.stream = torch.cuda.Stream()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin trading."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self) -> None:
        """End, with every row at home."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _work(self) -> None:
        pool = self.provider.pool
        row = 0
        while not self._stop.is_set():
            row = (row + 1) % 4
            pool.lend_row(row)
            if self.pause_ms is not None:
                pool.scrub_row(row, 0, self.stream.cuda_stream)
                event = self.driver.create_event()
                self.driver.record(event, self.stream.cuda_stream)
                while not self.driver.query(event):
                    time.sleep(0.0001)
                self.driver.destroy(event)
                time.sleep(self.pause_ms / 1000)
            pool.return_row(row, None, 0)
            self.rows_traded += 1


def segment(graph: Any) -> tuple[list[float], list[float]]:
    """Replay step by step as decode does; GPU ms and wall ms of each."""
    gpu, wall = [], []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(STEPS):
        start = time.perf_counter()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        wall.append((time.perf_counter() - start) * 1000)
        gpu.append(begin.elapsed_time(end))
    return gpu, wall


def main() -> None:
    """Quiet and each way of trading, in turns."""
    graph, keep = decode_graph()
    traders = {
        f"{lending}_{'full_rate' if pause is None else f'scrub_every_{pause:g}_ms'}": Trader(lending, pause)
        for lending in LENDINGS
        for pause in (None, 2.0, 8.0)
    }
    segment(graph)
    rng = np.random.Generator(np.random.PCG64(0))
    gpu: dict[str, list[float]] = {name: [] for name in ("quiet", *traders, "quiet_again")}
    wall: dict[str, list[float]] = {name: [] for name in gpu}
    trading_s = dict.fromkeys(traders, 0.0)
    for _ in range(SEGMENTS):
        for name in rng.permutation(list(gpu)).tolist():
            start: Callable[[], None] = traders[name].start if name in traders else lambda: None
            start()
            begin = time.perf_counter()
            of_gpu, of_wall = segment(graph)
            gpu[name] += of_gpu
            wall[name] += of_wall
            if name in traders:
                trading_s[name] += time.perf_counter() - begin
                traders[name].stop()
    quiet = spread(gpu["quiet"])
    figures: dict[str, Any] = {}
    for name, steps_ms in gpu.items():
        figures[name] = {"gpu_ms": spread(steps_ms), "wall_ms": spread(wall[name])}
        figures[name]["gpu_p99_over_quiet"] = figures[name]["gpu_ms"]["p99"] / quiet["p99"]
        figures[name]["wall_p99_over_quiet"] = figures[name]["wall_ms"]["p99"] / spread(wall["quiet"])["p99"]
        if name in traders:
            figures[name]["rows_per_s"] = traders[name].rows_traded / trading_s[name]
            filled_bytes = 0 if traders[name].pause_ms is None else traders[name].provider.geometry.row_bytes
            figures[name]["filled_gb_per_s"] = figures[name]["rows_per_s"] * filled_bytes / 1e9
    torch.cuda.synchronize()
    del keep
    for trader in traders.values():
        trader.provider.release()
    print(save("replay_jitter", figures))


if __name__ == "__main__":
    main()
