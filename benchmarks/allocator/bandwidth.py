"""Copies, decode-attention reads and GEMMs through pool memory against plain cudaMalloc buffers.

Everything is made afresh in each round, because what a copy takes also depends on where in memory it happened to land: the
ratios of all rounds are told one by one, and that of all their times together is the figure.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed package, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

import torch

from backends.cuda import _native
from backends.cuda.memory.provider import NativeProvider
from backends.cuda.memory.views import Region, kv_region, space_tensor, tensor_of
from benchmarks.allocator.measuring import gpu_ms, save, spread
from benchmarks.allocator.paged_read import launch
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator

TOKENS = 65536
COLUMNS = 64
HEADS, DIM = 8, 128
ENTRY = HEADS * DIM  # elements of one token in one column
LAYERS_READ = 8
ROUNDS = 5
ORDERS = ("in_order", "rotated")
ROWS = TOKENS // 1024
Times = dict[str, list[float]]


def against(base: str, rounds: list[Times], moved_bytes: int | None = None) -> dict[str, Any]:
    """Spread of each variant over all rounds, its bandwidth, and the ratio of medians to the base (above 1 is slower)."""
    times = {name: [ms for each in rounds for ms in each[name]] for name in rounds[0]}
    medians = {name: spread(values)["median"] for name, values in times.items()}
    out: dict[str, Any] = {}
    for name, values in times.items():
        out[name] = {"ms": spread(values), "time_over_plain": medians[name] / medians[base]}
        by_round = [spread(each[name])["median"] / spread(each[base])["median"] for each in rounds]
        out[name]["time_over_plain_by_round"] = by_round
        if moved_bytes is not None:
            out[name]["tb_per_s"] = moved_bytes / medians[name] / 1e9
    return out


def pools() -> tuple[list[Any], dict[str, Any]]:
    """The KV memory of LLaMA3-8B four times: pool and plain, per layer and page-major, as flat bf16 tensors."""
    driver = _native.CudaDriver()
    memories = []
    flat: dict[str, Any] = {}
    for name, geometry in (
        ("per_layer", GridGeometry(row_tokens=1024, columns=COLUMNS, rows=ROWS)),
        ("page_major", GridGeometry(row_tokens=16, columns=1, rows=TOKENS // 16)),
    ):
        provider = NativeProvider(driver)
        memories.append(UnifiedAllocator(geometry, provider))
        columns = [kv_region(provider.pool, column, on_gpu=True) for column in range(geometry.columns)]
        flat[f"pool_{name}"] = [tensor_of(region, torch.bfloat16, (-1,)) for region in columns]
    flat["plain_per_layer"] = [torch.empty(TOKENS * ENTRY, dtype=torch.bfloat16, device="cuda") for _ in range(COLUMNS)]
    flat["plain_page_major"] = [torch.empty(TOKENS * ENTRY * COLUMNS, dtype=torch.bfloat16, device="cuda")]
    for tensors in flat.values():
        for tensor in tensors:
            tensor.normal_()
    return memories, flat


class Columns:
    """Columns of 2 MiB blocks without a pool, to see what the order of creation does to a copy.

    ``in_order``: a column's blocks are created one after the other, as the pool does. ``rotated``: row after row, each row
    beginning one column further, so that a column's blocks do not lie a power of two apart.
    """

    def __init__(self, driver: _native.Driver, *, in_order: bool) -> None:
        """Create and map all of them."""
        self.driver = driver
        self.block = 2 * 2**20
        self.column_bytes = ROWS * self.block
        self.at = driver.reserve(COLUMNS * self.column_bytes)
        self.handles: dict[int, int] = {}
        places = [(row, column) for column in range(COLUMNS) for row in range(ROWS)]
        if not in_order:
            places = [(row, (column + row) % COLUMNS) for row in range(ROWS) for column in range(COLUMNS)]
        for row, column in places:
            address = self.at + column * self.column_bytes + row * self.block
            self.handles[address] = driver.create(self.block)
            driver.map(address, self.block, self.handles[address])
        driver.set_access(self.at, COLUMNS * self.column_bytes)

    def tensors(self) -> list[Any]:
        """One flat bf16 tensor a column."""
        regions = [
            Region(self.at + index * self.column_bytes, self.column_bytes, self, on_gpu=True)
            for index in range(COLUMNS)
        ]
        return [tensor_of(region, torch.bfloat16, (-1,)) for region in regions]

    def release(self) -> None:
        """Give everything back; work on it must have passed."""
        for address, handle in self.handles.items():
            self.driver.unmap(address, self.block)
            self.driver.release(handle)
        self.driver.free(self.at, COLUMNS * self.column_bytes)


def copies(flat: dict[str, Any]) -> Times:
    """128 MiB from one place to another in each kind of memory, another pair of places each time."""
    size = TOKENS * ENTRY

    def copy_of(name: str) -> Callable[[], object]:
        tensors = flat[name]
        pieces = tensors if len(tensors) > 1 else list(tensors[0].split(size))
        pairs = itertools.cycle(itertools.pairwise(pieces))

        def copy() -> None:
            source, to = next(pairs)
            to.copy_(source)

        return copy

    return gpu_ms({name: copy_of(name) for name in flat}, 2 * (COLUMNS - 1))


def reads(flat: dict[str, Any]) -> Times:
    """Decode attention over 32 requests of 2,048 tokens in scattered slots, eight layers."""
    requests, context, parts = 32, TOKENS // 32, 8
    table = torch.randperm(TOKENS, device="cuda", dtype=torch.int32).view(requests, context)
    query = torch.randn(requests, HEADS, DIM, dtype=torch.bfloat16, device="cuda") / DIM
    out = torch.empty(requests, HEADS, parts, DIM, device="cuda")

    def read_of(name: str) -> Callable[[], object]:
        tensors = flat[name]

        def per_layer() -> None:
            for layer in range(LAYERS_READ):
                launch(query, tensors[2 * layer], tensors[2 * layer + 1], table, out, ENTRY)

        def page_major() -> None:
            for layer in range(LAYERS_READ):
                keys = tensors[0][2 * layer * ENTRY :]
                launch(query, keys, keys[ENTRY:], table, out, ENTRY * COLUMNS)

        return per_layer if len(tensors) > 1 else page_major

    return gpu_ms({name: read_of(name) for name in flat}, 30)


def gemms() -> dict[str, Any]:
    """Frozen layer weights in lent rows against plain ones, 1,024 finetune tokens."""
    provider = NativeProvider(_native.CudaDriver())
    memory = UnifiedAllocator(GridGeometry(row_tokens=1024, columns=COLUMNS, rows=6), provider)
    memory.lend_rows(5)
    stream = torch.cuda.current_stream().cuda_stream
    figures = {}
    for rows, columns in ((4096, 4096), (4096, 14336), (14336, 4096)):
        plain = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
        lent = space_tensor(provider.space, torch.bfloat16, (rows, columns), stream, on_gpu=True)
        lent.copy_(plain)
        inputs = torch.randn(1024, rows, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(1024, columns, dtype=torch.bfloat16, device="cuda")

        def product(weight: Any, inputs: Any = inputs, out: Any = out) -> Callable[[], object]:
            return lambda: torch.mm(inputs, weight, out=out)

        figures[f"{rows}x{columns}"] = against("plain", [gpu_ms({"plain": product(plain), "lent": product(lent)}, 300)])
        del lent
    torch.cuda.synchronize()
    memory.release()
    return figures


def main() -> None:
    """Measure and save."""
    copied, read = [], []
    for _ in range(ROUNDS):
        memories, flat = pools()
        read.append(reads(flat))
        columns = {f"blocks_{order}": Columns(_native.CudaDriver(), in_order=order == "in_order") for order in ORDERS}
        for name, made in columns.items():
            flat[name] = made.tensors()
            for tensor in flat[name]:
                tensor.normal_()
        copied.append(copies(flat))
        torch.cuda.synchronize()
        flat.clear()
        for memory in (*memories, *columns.values()):
            memory.release()
        torch.cuda.empty_cache()
    read_bytes = LAYERS_READ * 2 * TOKENS * ENTRY * 2
    figures = {
        "rounds": ROUNDS,
        "copy_128_mib": against("plain_per_layer", copied, 2 * TOKENS * ENTRY * 2),
        "attention_read": against("plain_per_layer", read, read_bytes),
        "gemm_1024_tokens": gemms(),
    }
    print(save("bandwidth", figures))


if __name__ == "__main__":
    main()
