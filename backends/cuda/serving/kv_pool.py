"""SGLang's KV pool on the unified pool: its buffers are the KV view of our blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backends.cuda._native import Driver, HostDriver
from backends.cuda.memory.provider import Lending, NativeProvider, Scrub
from backends.cuda.memory.views import kv_tensor
from harli_core.errors import ConfigError
from harli_core.memory.geometry import BLOCK_BYTES, GridGeometry
from harli_core.memory.unified import UnifiedAllocator

PINNED_TOKENS = 1
"""SGLang pads decode graphs with slot 0, which no request ever gets."""


@dataclass(frozen=True, slots=True)
class KvSettings:
    """How the pool behind SGLang's KV cache is made; ``block_bytes`` other than 2 MiB is for tests on the host."""

    lending: Lending = "alias"
    scrub: Scrub = "zero"
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The unified memory of one decode instance: books, bytes, and where they are."""

    allocator: UnifiedAllocator
    provider: NativeProvider
    on_gpu: bool


def grid_of(
    tokens: int, layers: int, heads: int, head_dim: int, dtype_bytes: int, block_bytes: int = BLOCK_BYTES
) -> GridGeometry:
    """The per-layer grid whose capacity is ``tokens`` slots; raises `ConfigError` where they make no whole rows."""
    entry_bytes = heads * head_dim * dtype_bytes
    if block_bytes % entry_bytes:
        raise ConfigError(
            f"a KV entry of {entry_bytes} bytes ({heads} heads of {head_dim}) does not divide a block of {block_bytes} "
            "bytes, so a token would straddle two blocks: this model cannot be served from the unified pool"
        )
    row_tokens = block_bytes // entry_bytes
    rows = tokens // row_tokens
    if tokens % row_tokens or rows < 1:
        raise ConfigError(
            f"the KV cache has {tokens} token slots, which are not whole rows of {row_tokens}: set max_total_tokens "
            f"to {max(1, rows) * row_tokens - PINNED_TOKENS} (one slot is SGLang's own)"
        )
    return GridGeometry(row_tokens, 2 * layers, rows, block_bytes)


def kv_memory(geometry: GridGeometry, device: str, settings: KvSettings) -> KvMemory:
    """Take the memory: on the GPU that torch has current, or on the host for ``device`` "cpu"."""
    on_gpu = device.startswith("cuda")
    driver: Driver
    if on_gpu:
        import torch

        from backends.cuda._native import CudaDriver

        torch.cuda.current_stream()  # the primary context exists from here on
        driver = CudaDriver(torch.cuda.current_device())
        stream = torch.cuda.current_stream().cuda_stream
    else:
        driver = HostDriver(min(settings.block_bytes, BLOCK_BYTES))
        stream = 0
    provider = NativeProvider(driver, settings.lending, settings.scrub, kv_stream=stream)
    return KvMemory(UnifiedAllocator(geometry, provider, PINNED_TOKENS), provider, on_gpu)


def pool_class(base: Any, settings: KvSettings) -> Any:
    """SGLang's ``MHATokenToKVPool`` (``base``) with its buffers in unified memory, found as ``pool.harli``.

    Column ``2 * layer`` of the grid holds K, the next one V. The class replaces SGLang's own, so it takes the same
    arguments and refuses what the unified pool cannot do.
    """

    class HarliKVPool(base):  # type: ignore[misc]
        harli: KvMemory

        def _create_buffers_normal(self) -> None:
            if self.page_size != 1 or self.kv_cache_layout != "nhd" or self.head_dim != self.v_head_dim:
                raise ConfigError(
                    f"the unified pool needs page size 1, layout nhd and equal K and V heads, not page size "
                    f"{self.page_size}, layout {self.kv_cache_layout}, head sizes {self.head_dim} and {self.v_head_dim}"
                )
            geometry = grid_of(
                self.size + self.page_size,
                self.layer_num,
                self.head_num,
                self.head_dim,
                self.store_dtype.itemsize,
                settings.block_bytes,
            )
            self.harli = kv_memory(geometry, str(self.device), settings)
            pool, shape = self.harli.provider.pool, (self.head_num, self.head_dim)
            columns = [
                kv_tensor(pool, column, self.store_dtype, shape, on_gpu=self.harli.on_gpu)
                for column in range(geometry.columns)
            ]
            self.k_buffer, self.v_buffer = columns[0::2], columns[1::2]

    return HarliKVPool
