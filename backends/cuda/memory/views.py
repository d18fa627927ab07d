"""Native memory as arrays and tensors, without copying."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.cuda._native import PagePool, TensorSpace
from backends.cuda.memory.torch_library import torch_for, torch_on_gpu


class Region:
    """``size_bytes`` bytes at an address, kept alive by ``owner``; numpy takes it on the host, torch and others on CUDA."""

    def __init__(self, address: int, size_bytes: int, owner: object, *, on_gpu: bool) -> None:
        """Describe the region; nothing is touched."""
        self.owner = owner
        self.on_gpu = on_gpu
        interface: dict[str, Any] = {"data": (address, False), "shape": (size_bytes,), "typestr": "|u1", "version": 3}
        if on_gpu:
            self.__cuda_array_interface__ = {**interface, "strides": None}
        else:
            self.__array_interface__ = interface


def kv_region(pool: PagePool, column: int, *, on_gpu: bool) -> Region:
    """One column of the KV view: all its rows, indexed by token slot. Rows that are lent fault under ``remap``."""
    return Region(pool.kv_address(column, 0), pool.rows * pool.block_bytes, pool, on_gpu=on_gpu)


def kv_array(pool: PagePool, column: int, entry_bytes: int) -> NDArray[np.uint8]:
    """A column on the host as ``[slots, entry_bytes]``."""
    return np.asarray(kv_region(pool, column, on_gpu=False)).reshape(-1, entry_bytes)


def kv_tensor(pool: PagePool, column: int, dtype: Any, shape: tuple[int, ...], *, on_gpu: bool) -> Any:
    """A column as a torch tensor ``[slots, *shape]`` of ``dtype``."""
    return tensor_of(kv_region(pool, column, on_gpu=on_gpu), dtype, (-1, *shape))


def tensor_of(region: Region, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A torch tensor over the region, of any dtype (bf16 has no name in the array interfaces, so it goes as bytes)."""
    torch = torch_on_gpu("a tensor") if region.on_gpu else torch_for("a tensor")
    flat = torch.as_tensor(region, device="cuda") if region.on_gpu else torch.from_numpy(np.asarray(region))
    return flat.view(dtype).view(shape)


class OwnedBytes:
    """An allocation of the tensor space that is freed, on its stream, when the last array or tensor over it goes."""

    def __init__(self, space: TensorSpace, size_bytes: int, stream: int) -> None:
        """Allocate; raises `OutOfMemoryError`."""
        self.space = space
        self.stream = stream
        self.size_bytes = size_bytes
        self.address = space.allocate(size_bytes, stream)

    def __del__(self) -> None:
        """Free; reuse elsewhere waits for what the stream was given before."""
        if hasattr(self, "address"):
            self.space.free(self.address, self.stream)


def space_tensor(space: TensorSpace, dtype: Any, shape: tuple[int, ...], stream: int, *, on_gpu: bool) -> Any:
    """A torch tensor in the lent rows (frozen weights, say), freed with its last reference."""
    owned = OwnedBytes(space, max(1, math.prod(shape) * dtype.itemsize), stream)
    return tensor_of(Region(owned.address, owned.size_bytes, owned, on_gpu=on_gpu), dtype, shape)


def host_bytes(address: int, size_bytes: int) -> NDArray[np.uint8]:
    """Bytes of the host driver's memory; the caller keeps what they belong to alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
