"""Arrays and tensors over the memory, compaction on the host, and the C functions that torch calls."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import numpy as np
import pytest

from backends.cuda import _native
from backends.cuda._native import HostDriver
from backends.cuda.memory.compaction import CudaCompactor, HostCompactor
from backends.cuda.memory.provider import NativeProvider
from backends.cuda.memory.torch_pool import TorchPool
from backends.cuda.memory.views import OwnedBytes, Region, host_bytes, kv_array, kv_tensor, space_tensor, tensor_of
from harli_core.errors import BackendUnavailableError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator

GRID = GridGeometry(row_tokens=8, columns=2, rows=4, block_bytes=16384)
ENTRY = GRID.block_bytes // GRID.row_tokens


@pytest.fixture
def provider() -> NativeProvider:
    """A committed grid on the host, the upper rows lent."""
    made = NativeProvider(HostDriver(4096))
    memory = UnifiedAllocator(GRID, made)
    memory.lend_rows(2)
    return made


def test_column_is_indexed_by_slot(provider: NativeProvider) -> None:
    """A column is one contiguous array over all rows, and shows what is written at a row's address."""
    column = kv_array(provider.pool, 1, ENTRY)
    assert column.shape == (GRID.capacity_tokens, ENTRY)
    column[GRID.row_tokens + 3] = 7
    block = host_bytes(provider.pool.kv_address(1, 1), GRID.block_bytes).reshape(-1, ENTRY)
    assert (block[3] == 7).all()
    assert not block[2].any()


def test_array_keeps_the_pool_alive(provider: NativeProvider) -> None:
    """An array outlives every other reference to its pool."""
    column = kv_array(provider.pool, 0, ENTRY)
    provider._pool = provider._space = None
    gc.collect()
    column[5] = 9
    assert column[5, 0] == 9


def test_gpu_region_has_the_cuda_interface(provider: NativeProvider) -> None:
    """A region on the GPU is offered through the CUDA array interface alone."""
    region = Region(provider.pool.kv_address(0, 0), 64, provider.pool, on_gpu=True)
    assert region.__cuda_array_interface__["data"] == (provider.pool.kv_address(0, 0), False)
    assert region.__cuda_array_interface__["shape"] == (64,)
    assert not hasattr(region, "__array_interface__")


def test_owned_bytes_are_freed_with_the_last_array(provider: NativeProvider) -> None:
    """The allocation lives as long as an array over it."""
    owned = OwnedBytes(provider.space, 5000, 0)
    array = np.asarray(Region(owned.address, 5000, owned, on_gpu=False))
    del owned
    gc.collect()
    assert provider.space.stats()["live"] == 1
    array[:] = 1
    del array
    gc.collect()
    assert provider.space.stats()["live"] == 0


def test_torch_sees_kv_and_tensors(provider: NativeProvider) -> None:
    """Torch tensors of bf16 share the bytes of the KV view, and of an allocation in lent rows."""
    torch = pytest.importorskip("torch")
    keys = kv_tensor(provider.pool, 0, torch.bfloat16, (ENTRY // 2 // 64, 64), on_gpu=False)
    assert keys.shape == (GRID.capacity_tokens, ENTRY // 128, 64)
    keys[2] = 1.5
    assert (kv_array(provider.pool, 0, ENTRY)[2].view(np.uint16) == 0x3FC0).all()
    weight = space_tensor(provider.space, torch.bfloat16, (16, 128), 0, on_gpu=False)
    weight.normal_()
    assert torch.equal((weight @ weight.T).float(), (weight.clone() @ weight.clone().T).float())
    assert provider.space.stats()["live"] == 1
    del weight
    gc.collect()
    assert provider.space.stats()["live"] == 0


def test_poison_is_nan_in_both_half_types(provider: NativeProvider) -> None:
    """0xFFFF is NaN in bf16 and fp16, and a masked product with it is caught."""
    torch = pytest.importorskip("torch")
    region = Region(provider.pool.kv_address(0, 0), 64, provider.pool, on_gpu=False)
    np.asarray(region)[:] = 0xFF
    for dtype in (torch.bfloat16, torch.float16):
        assert (tensor_of(region, dtype, (-1,)) * 0).isnan().all()


def test_compaction_moves_bytes_and_slots() -> None:
    """The core's plan is carried out in every column, tables of any shape follow, and the row's bytes are free to lend."""
    provider = NativeProvider(HostDriver(4096))
    memory = UnifiedAllocator(GRID, provider)
    columns = [kv_array(provider.pool, column, ENTRY) for column in range(2)]
    slots = memory.allocate_tokens(31)
    for index, column in enumerate(columns):
        column[slots] = (np.arange(31, dtype=np.uint8) + 100 * index)[:, None]
    kept = np.concatenate((slots[:9], slots[20:22]))
    contents = [column[kept, 0].copy() for column in columns]
    memory.free_tokens(np.setdiff1d(slots, kept))
    table = np.zeros((2, 12), dtype=np.int32)  # slot 0 pads
    table[1, :11] = kept
    compaction = memory.compact(4)
    assert compaction.freed_rows
    HostCompactor(provider.pool, GRID).apply(compaction, table)
    for column, content in zip(columns, contents, strict=True):
        assert (column[table[1, :11], 0] == content).all()
    assert not table[0].any()
    assert memory.lend_rows(4) >= len(compaction.freed_rows)
    memory.check_integrity()


def test_torch_entry_points(provider: NativeProvider) -> None:
    """The exported C functions allocate from the bound space, answer null where there is no room, and remember why."""
    library = ctypes.CDLL(_native.extension_file())
    malloc, free = library.harli_torch_malloc, library.harli_torch_free
    malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free.restype, free.argtypes = None, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    _native.bind_torch_space(None)
    assert malloc(100, 0, None) is None
    assert "no tensor space is bound" in _native.last_torch_error()
    space = provider.space
    _native.bind_torch_space(space)
    at = malloc(100, 0, None)
    assert space.size_of(at) == 100
    assert malloc(2**40, 0, None) is None
    assert "no room" in _native.last_torch_error()
    _native.bind_torch_space(None)
    free(at, 100, 0, None)  # to the space that it came from
    assert space.stats()["live"] == 0
    free(at, 100, 0, None)  # an error that torch cannot be told
    assert _native.last_torch_error()
    assert _native.bound_torch_space() is None


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch fails, as where it is not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize(
    "use",
    [
        lambda provider: TorchPool(provider.space),
        lambda provider: kv_tensor(provider.pool, 0, None, (8,), on_gpu=True),
        lambda provider: kv_tensor(provider.pool, 0, None, (8,), on_gpu=False),
        lambda provider: CudaCompactor(provider.pool, GRID),
    ],
)
def test_missing_torch_is_one_clear_error(
    provider: NativeProvider, monkeypatch: pytest.MonkeyPatch, use: Callable[[NativeProvider], object]
) -> None:
    """What needs torch says so, and how to get it; nothing stays bound."""
    without_torch(monkeypatch)
    with pytest.raises(
        BackendUnavailableError, match=r"needs torch, which is not installed; install it with: pip install"
    ):
        use(provider)
    assert _native.bound_torch_space() is None


def test_torch_without_a_gpu_is_one_clear_error(provider: NativeProvider) -> None:
    """The CPU build of torch cannot serve the pool for finetuning, and is told from a missing one."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailableError, match=r"needs a GPU, and torch .* finds none"):
        TorchPool(provider.space)
    assert _native.bound_torch_space() is None
