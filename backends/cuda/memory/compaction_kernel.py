"""The compaction kernel, compiled at run time with NVRTC through cuda-python."""

from __future__ import annotations

import ctypes
from typing import Any

from harli_core.errors import BackendUnavailableError, DriverCallError

THREADS = 256
WARPS = THREADS // 32
TABLE_BLOCKS = 128
"""Fewest blocks that share the rewriting of the table."""

SOURCE = """
// One warp moves one token's entry in one column: all its loads first, then its stores.
__device__ void move(uint4* column, long long source, long long destination, int entry_vectors) {
    const uint4* const from = column + source * entry_vectors;
    uint4* const to = column + destination * entry_vectors;
    for (int at = threadIdx.x % 32; at < entry_vectors; at += 4 * 32) {
        uint4 held[4];
        #pragma unroll
        for (int part = 0; part < 4; ++part) {
            if (at + part * 32 < entry_vectors) held[part] = __ldcs(from + at + part * 32);
        }
        #pragma unroll
        for (int part = 0; part < 4; ++part) {
            if (at + part * 32 < entry_vectors) __stcs(to + at + part * 32, held[part]);
        }
    }
}

// Sources are ascending: most entries are settled by the bounds, the rest by a binary search.
__device__ void rewrite(int* table, long long entries, const int* source, const int* destination, int moves) {
    const int first = source[0];
    const int last = source[moves - 1];
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; at < entries; at += step) {
        const int slot = table[at];
        if (slot < first || slot > last) continue;
        int low = 0;
        int high = moves - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (source[middle] < slot) low = middle + 1; else high = middle;
        }
        if (source[low] == slot) table[at] = destination[low];
    }
}

// grid = (blocks, columns + 1): a line of blocks moves one column, the last line rewrites the table meanwhile.
extern "C" __global__ void compact(const unsigned long long* bases, int columns, const int* source,
                                   const int* destination, int moves, int entry_vectors, int* table,
                                   long long entries) {
    if (blockIdx.y == columns) {
        rewrite(table, entries, source, destination, moves);
        return;
    }
    const int which = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (which < moves) move(reinterpret_cast<uint4*>(bases[blockIdx.y]), source[which], destination[which], entry_vectors);
}
"""


class CompactionKernel:
    """The kernel, loaded in the context that is current at construction."""

    def __init__(self) -> None:
        """Compile for the current device; raises `BackendUnavailableError` without cuda-python or NVRTC."""
        try:
            from cuda.bindings import driver, nvrtc
        except ImportError as error:
            raise BackendUnavailableError(
                "compaction on the GPU needs cuda-python; install with: pip install '.[cuda]' in the checkout"
            ) from error
        import torch

        self._driver = driver
        torch.cuda.current_stream()  # makes the primary context current
        major, minor = torch.cuda.get_device_capability()
        program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"compaction.cu", 0, [], []))
        options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
        outcome = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(outcome[0]) != 0:
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise DriverCallError("compaction kernel does not compile: " + log.decode().replace("\n", " "))
        cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        _checked(nvrtc.nvrtcDestroyProgram(program))
        self._module = _checked(driver.cuModuleLoadData(cubin))
        self._compact = _checked(driver.cuModuleGetFunction(self._module, b"compact"))

    def launch(self, bases: Any, moves: Any, entry_bytes: int, table: Any, stream: int) -> None:
        """Copy entries ``moves[0] -> moves[1]`` in all columns, and put the new places into ``table``.

        On the GPU: ``bases`` the columns' addresses (int64), ``moves`` int32 ``[2, n]``, sources ascending, ``table``
        contiguous int32. Sources and destinations are disjoint, so the copies may run in any order.
        """
        count = moves.shape[1]
        arguments = (
            bases.data_ptr(), bases.numel(), moves[0].data_ptr(), moves[1].data_ptr(), count, entry_bytes // 16,
            table.data_ptr(), table.numel(),
        )  # fmt: skip
        pointer = ctypes.c_void_p
        kinds = (pointer, ctypes.c_int, pointer, pointer, ctypes.c_int, ctypes.c_int, pointer, ctypes.c_longlong)
        blocks = max(-(-count // WARPS), TABLE_BLOCKS)
        shape = (blocks, bases.numel() + 1, 1, THREADS, 1, 1)
        _checked(self._driver.cuLaunchKernel(self._compact, *shape, 0, stream, (arguments, kinds), 0))


def _checked(outcome: tuple[Any, ...]) -> Any:
    """The values of a cuda-python call; raises `DriverCallError` for its error code."""
    if int(outcome[0]) != 0:
        raise DriverCallError(f"driver call failed: {outcome[0]}")
    return outcome[1] if len(outcome) == 2 else outcome[1:] or None
