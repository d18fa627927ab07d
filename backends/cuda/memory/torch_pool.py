"""Torch code whose tensors live in the lent rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from backends.cuda._native import TensorSpace, bind_torch_space, extension_file
from backends.cuda.memory.torch_library import torch_on_gpu
from harli_core.errors import MemoryAccountingError

MALLOC = "harli_torch_malloc"
FREE = "harli_torch_free"


class TorchPool:
    """A `torch.cuda.MemPool` over a tensor space.

    Inside `use`, this thread's CUDA allocations come from the lent rows: torch's caching allocator asks for segments (2
    MiB for small tensors, 20 MiB and more for others) and cuts them up itself. Torch keeps the segments of a pool as
    long as the pool lives, so `trim`, called between iterations, starts a new one. What lives long (frozen weights,
    optimizer state) is better allocated one by one with `views.space_tensor`.
    One pool at a time in a process: the C entry points serve the space bound last.
    """

    def __init__(self, space: TensorSpace) -> None:
        """Bind ``space`` and make the pool; raises `BackendUnavailableError` without a CUDA build of torch and a GPU."""
        torch = torch_on_gpu("the pool for finetuning's tensors")
        self._torch: Any = torch
        self.space = space
        # Kept: torch holds plain pointers into the library.
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(extension_file(), MALLOC, FREE)
        bind_torch_space(space)
        self._pool: Any = None
        self._users = 0
        self._warm_streams: set[int] = set()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Allocate from the pool in this block, backward passes included.

        Torch routes by thread, and runs backward in a thread of its own unless multithreading of autograd is off, as it
        is here.
        """
        torch = self._torch
        if self._pool is None:
            self._pool = torch.cuda.MemPool(self._allocator.allocator())
        self._warm_up(torch.cuda.current_stream())
        self._users += 1
        try:
            with torch.autograd.set_multithreading_enabled(False), torch.cuda.use_mem_pool(self._pool):
                yield
        finally:
            self._users -= 1

    def _warm_up(self, stream: Any) -> None:
        """Let cuBLAS get its workspace for this stream outside the pool: it keeps it, and would pin a row for ever."""
        if stream.cuda_stream not in self._warm_streams:
            ones = self._torch.ones(16, 16, device="cuda", dtype=self._torch.bfloat16)
            self._torch.mm(ones, ones)
            self._warm_streams.add(stream.cuda_stream)

    def trim(self) -> None:
        """Give segments without a live tensor back to the tensor space; raises `MemoryAccountingError` inside `use`.

        Those of live tensors follow when torch empties its caches after the tensors have gone.
        """
        if self._users:
            raise MemoryAccountingError("a torch pool cannot be trimmed while it is in use")
        self._pool = None

    def close(self) -> None:
        """Trim and unbind the space; live tensors stay valid and are freed to it."""
        self.trim()
        bind_torch_space(None)
