"""A core `Compaction` carried out: KV entries moved in every column, and the request-to-slot table rewritten."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backends.cuda._native import PagePool
from backends.cuda.memory.compaction_kernel import CompactionKernel
from backends.cuda.memory.torch_library import torch_on_gpu
from backends.cuda.memory.views import kv_array
from harli_core.errors import ConfigError
from harli_core.memory.compaction import Compaction
from harli_core.memory.geometry import GridGeometry


class Compactor(Protocol):
    """Moves tokens in stream order: what was launched before sees the old places, what comes after sees the new ones."""

    def apply(self, compaction: Compaction, tables: Any) -> None:
        """Copy every source slot to its destination in all columns, and rewrite ``tables`` (int32 slots) in place."""
        ...


class HostCompactor:
    """Plain copies, at once; ``tables`` is a numpy array."""

    def __init__(self, pool: PagePool, geometry: GridGeometry) -> None:
        """Work on the KV view of ``pool``."""
        entry_bytes = geometry.block_bytes // geometry.row_tokens
        self._columns = [kv_array(pool, column, entry_bytes) for column in range(geometry.columns)]

    def apply(self, compaction: Compaction, tables: NDArray[np.int32]) -> None:
        """Copy and rewrite."""
        for column in self._columns:
            column[compaction.destination] = column[compaction.source]
        tables[...] = compaction.rewrite(tables)


class CudaCompactor:
    """One kernel launch over all columns and the table, on torch's current stream; ``tables`` is on the GPU."""

    def __init__(self, pool: PagePool, geometry: GridGeometry) -> None:
        """Compile the kernel; raises `ConfigError` unless an entry is a multiple of 16 bytes (one vector load)."""
        entry_bytes = geometry.block_bytes // geometry.row_tokens
        if entry_bytes % 16:
            raise ConfigError(f"a KV entry of {entry_bytes} bytes cannot be moved: not a multiple of 16 bytes")
        torch = torch_on_gpu("compaction on the GPU")
        self._entry_bytes = entry_bytes
        bases = [pool.kv_address(column, 0) for column in range(geometry.columns)]
        self._bases = torch.tensor(bases, dtype=torch.int64, device="cuda")
        self._kernel = CompactionKernel()

    def apply(self, compaction: Compaction, tables: Any) -> None:
        """Launch; ``tables`` is a contiguous int32 tensor of any shape."""
        import torch

        if compaction.source.size == 0:
            return
        if tables.dtype != torch.int32 or not tables.is_contiguous():
            raise ConfigError("the request-to-slot table must be a contiguous int32 tensor")
        # A pageable copy this small is staged at once by the driver: it is in stream order and does not wait.
        moves = torch.from_numpy(np.stack((compaction.source, compaction.destination)).astype(np.int32))
        moves = moves.to("cuda", non_blocking=True)
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel.launch(self._bases, moves, self._entry_bytes, tables, stream)
        moves.record_stream(torch.cuda.current_stream())
