"""Lend and reclaim of one row and of one LLaMA3-8B layer's worth of rows, under alias and remap."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed package, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

from backends.cuda import _native
from backends.cuda.memory.provider import Lending, NativeProvider
from backends.cuda.memory.reclaim import Reclaim
from benchmarks.allocator.measuring import save, spread
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator
from tests.native.device_bytes import DeviceBytes

ROWS = 12
COLUMNS = 64
LAYER_BYTES = 2 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 + 2 * 4096)  # LLaMA3-8B, bf16
LENDINGS: tuple[Lending, ...] = ("alias", "remap")


def reclaim_us(memory: UnifiedAllocator, provider: NativeProvider, reclaim: Reclaim, rows: int) -> tuple[float, float]:
    """Lend ``rows``, fill them with tensors, free these, and take the rows back: microseconds of both ways."""
    begin = time.perf_counter_ns()
    assert memory.lend_rows(rows) == rows
    lent = time.perf_counter_ns()
    tensor = provider.space.allocate(rows * memory.geometry.row_bytes, 0)

    def give_up() -> bool:
        provider.space.free(tensor, 0)
        return True

    start = time.perf_counter_ns()
    reclaim.request(rows, give_up)
    back = 0
    while back < rows:
        back += len(reclaim.poll())
    return (lent - begin) / 1e3, (time.perf_counter_ns() - start) / 1e3


def main() -> None:
    """Measure on the GPU, or on the host driver where there is none (figures of another kind, marked as such)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="store_true", help="on the host driver, though there may be a GPU")
    options = parser.parse_args()
    on_gpu = _native.with_cuda and not options.host
    geometry = GridGeometry(row_tokens=1024, columns=COLUMNS, rows=ROWS)
    layer_rows = -(-LAYER_BYTES // geometry.row_bytes)
    parts: dict[Lending, tuple[UnifiedAllocator, NativeProvider, Reclaim]] = {}
    for lending in LENDINGS:
        driver = _native.CudaDriver() if on_gpu else _native.HostDriver()
        provider = NativeProvider(driver, lending)
        memory = UnifiedAllocator(geometry, provider)
        DeviceBytes(driver).wait(0)  # for the first fills: under remap a row is not lent before
        parts[lending] = (memory, provider, Reclaim(memory, provider, scrub_stream=0))
    figures: dict[str, Any] = {}
    for what, rows in (("row", 1), ("layer", layer_rows)):
        samples: dict[str, list[float]] = {
            f"{lending}_{way}_us": [] for lending in LENDINGS for way in ("lend", "reclaim")
        }
        for repeat in range(60 if on_gpu else 5):
            for lending in LENDINGS:
                lend, back = reclaim_us(*parts[lending], rows)
                if repeat:
                    samples[f"{lending}_lend_us"].append(lend)
                    samples[f"{lending}_reclaim_us"].append(back)
        figures[what] = {"rows": rows, "bytes": rows * geometry.row_bytes} | {k: spread(v) for k, v in samples.items()}
        for way in ("lend", "reclaim"):
            ratio = figures[what][f"remap_{way}_us"]["median"] / figures[what][f"alias_{way}_us"]["median"]
            figures[what][f"remap_over_alias_{way}"] = ratio
    for lending in LENDINGS:
        figures[f"{lending}_native"] = parts[lending][1].pool.stats()
        parts[lending][2].close()
        parts[lending][0].release()
    print(
        save(
            "lending_latency" if on_gpu else "lending_latency_host",
            {"driver_kind": "cuda" if on_gpu else "host", **figures},
        )
    )


if __name__ == "__main__":
    main()
