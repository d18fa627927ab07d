"""The native tests on a GPU: ``python tests/native/run_on_gpu.py``; needs the extension built with HARLI_CUDA=1, and torch.

Runs the driver and pool contracts on the CUDA driver, then what only a GPU can show: the torch pool, compaction by
kernel, and streams that really are late. Prints one line a check and exits 1 if one fails. No pytest needed.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import backends.cuda.memory  # noqa: F401  the installed package, before the checkout's folders come into reach
import harli_core  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

import numpy as np
import torch

from backends.cuda import _native
from backends.cuda._native import CudaDriver
from backends.cuda.memory.compaction import CudaCompactor
from backends.cuda.memory.provider import NativeProvider
from backends.cuda.memory.reclaim import Reclaim
from backends.cuda.memory.torch_pool import TorchPool
from backends.cuda.memory.views import kv_tensor, space_tensor
from harli_core.errors import OutOfMemoryError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.unified import UnifiedAllocator
from tests.native import driver_contract, pool_contract


def kv_tensors_are_the_pool() -> None:
    """A KV column as a bf16 tensor shows what a fill through the driver wrote, and poison is NaN."""
    driver = CudaDriver()
    provider = NativeProvider(driver, scrub="poison")
    memory = UnifiedAllocator(GridGeometry(row_tokens=1024, columns=4, rows=3), provider)
    keys = kv_tensor(provider.pool, 1, torch.bfloat16, (8, 128), on_gpu=True)
    assert keys.shape == (3 * 1024, 8, 128)
    assert keys.is_cuda
    keys.fill_(2.0)
    memory.lend_rows(1)
    provider.return_row(2)
    torch.cuda.synchronize()
    assert keys[2048:].isnan().all()
    assert (keys[:2048] == 2).all()
    memory.release()


def torch_pool_serves_a_training_step() -> None:
    """Forward and backward allocate in the lent rows only; afterwards the rows can be reclaimed and come back."""
    driver = CudaDriver()
    provider = NativeProvider(driver)
    memory = UnifiedAllocator(GridGeometry(row_tokens=1024, columns=16, rows=12), provider)
    memory.lend_rows(10)
    pool = TorchPool(provider.space)
    outside = torch.cuda.memory_stats()["num_alloc_retries"]
    with pool.use():
        weight = torch.randn(2048, 2048, device="cuda", requires_grad=True)
        inputs = torch.randn(512, 2048, device="cuda")
        loss = (inputs @ weight).relu().square().mean()
        loss.backward()
        for tensor in (weight, inputs, loss, weight.grad):
            assert tensor is not None
            assert provider.space.owns(tensor.data_ptr())
    expected = torch.autograd.grad((inputs @ weight).relu().square().mean(), weight)[0]
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)
    assert torch.cuda.memory_stats()["num_alloc_retries"] == outside
    assert provider.space.stats()["live"] > 0
    del weight, inputs, loss, tensor
    try:
        with pool.use():
            torch.empty(2**34, device="cuda")
    except torch.OutOfMemoryError:
        assert "no room" in _native.last_torch_error()
    else:
        raise AssertionError("64 GiB were found in 320 MiB")
    provider.space.check_integrity()
    pool.close()
    torch.cuda.synchronize()
    reclaim = Reclaim(memory, provider, scrub_stream=0)
    assert len(reclaim.request(10)) == 10, provider.space.stats()
    returned: tuple[int, ...] = ()
    deadline = time.monotonic() + 10
    while len(returned) < 10 and time.monotonic() < deadline:
        returned += reclaim.poll()
    assert len(returned) == 10
    memory.check_integrity()
    reclaim.close()
    memory.release()


def late_streams_are_waited_for() -> None:
    """Memory freed on a stream that is still busy is not given to another; the same stream gets it at once."""
    driver = CudaDriver()
    provider = NativeProvider(driver)
    memory = UnifiedAllocator(GridGeometry(row_tokens=1024, columns=4, rows=3), provider)
    memory.lend_rows(1)
    space = provider.space
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    at = space.allocate(4 * 2**21, busy.cuda_stream)
    with torch.cuda.stream(busy):
        torch.cuda._sleep(400_000_000)
    space.free(at, busy.cuda_stream)
    begin = time.perf_counter()
    try:
        space.allocate(4 * 2**21, other.cuda_stream)
    except OutOfMemoryError:
        pass
    else:
        raise AssertionError("memory was given away while its stream was busy")
    assert time.perf_counter() - begin < 0.05, "the refusal waited"
    assert space.allocate(4 * 2**21, busy.cuda_stream) == at
    space.free(at, busy.cuda_stream)
    torch.cuda.synchronize()
    assert space.allocate(4 * 2**21, other.cuda_stream) == at
    space.free(at, other.cuda_stream)
    torch.cuda.synchronize()
    memory.release()


def weights_in_lent_rows_compute_the_same() -> None:
    """A GEMM on a weight in lent rows is bit-identical to one on a plain copy; the weight is freed with its tensor."""
    driver = CudaDriver()
    provider = NativeProvider(driver)
    memory = UnifiedAllocator(GridGeometry(row_tokens=1024, columns=16, rows=4), provider)
    memory.lend_rows(3)
    stream = torch.cuda.current_stream().cuda_stream
    weight = space_tensor(provider.space, torch.bfloat16, (4096, 4096), stream, on_gpu=True)
    weight.normal_()
    plain = weight.clone()
    inputs = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(inputs @ weight, inputs @ plain)
    del weight
    torch.cuda.synchronize()
    provider.space.poll()
    provider.space.poll()
    assert provider.space.stats()["live"] == 0
    memory.release()


def compaction_by_kernel() -> None:
    """Random tokens of sparse rows move in all columns, and the table on the GPU follows."""
    driver = CudaDriver()
    geometry = GridGeometry(row_tokens=1024, columns=8, rows=5)
    provider = NativeProvider(driver)
    memory = UnifiedAllocator(geometry, provider)
    columns = [kv_tensor(provider.pool, column, torch.int64, (256,), on_gpu=True) for column in range(8)]
    slots = memory.allocate_tokens(4500)
    for index, column in enumerate(columns):
        column[torch.from_numpy(slots).cuda().long()] = torch.arange(4500, device="cuda")[:, None] + 10000 * index
    rng = np.random.Generator(np.random.PCG64(1))
    kept = np.sort(rng.choice(4500, 1500, replace=False))
    memory.free_tokens(np.delete(slots, kept))
    table = torch.zeros((3, 700), dtype=torch.int32, device="cuda")
    table.view(-1)[:1500] = torch.from_numpy(slots[kept]).cuda()
    compaction = memory.compact(3)
    assert len(compaction.freed_rows) == 3
    CudaCompactor(provider.pool, geometry).apply(compaction, table)
    moved = table.view(-1)[:1500]
    assert np.array_equal(moved.cpu().numpy(), compaction.rewrite(slots[kept]))
    for index, column in enumerate(columns):
        wanted = torch.from_numpy(kept).cuda() + 10000 * index
        assert (column[moved.long()] == wanted[:, None]).all()
    assert not table.view(-1)[1500:].any()
    memory.check_integrity()
    torch.cuda.synchronize()
    memory.release()


GPU_ONLY = [
    kv_tensors_are_the_pool,
    torch_pool_serves_a_training_step,
    late_streams_are_waited_for,
    weights_in_lent_rows_compute_the_same,
    compaction_by_kernel,
]


def main() -> int:
    """Run everything; 0 if all of it passed."""
    if not _native.with_cuda:
        print("the extension was built without CUDA: HARLI_CUDA=1 python -m pip install .")  # noqa: T201
        return 2
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = CudaDriver()
    checks: list[tuple[str, Callable[[], None]]] = [
        (f"driver: {rule.__name__}", lambda rule=rule: rule(driver))  # type: ignore[misc]
        for rule in driver_contract.CONTRACT
    ]
    for lending in ("alias", "remap"):
        for rule in pool_contract.CONTRACT:
            checks.append((f"{lending}: {rule.__name__}", lambda rule=rule, lending=lending: rule(driver, lending)))  # type: ignore[misc]
    checks += [(rule.__name__, rule) for rule in GPU_ONLY]
    failures = 0
    for name, check in checks:
        begin = time.perf_counter()
        try:
            check()
            outcome = "ok"
        except Exception:
            failures += 1
            outcome = "FAILED\n" + traceback.format_exc()
        driver.clear_faults()
        print(f"{name} ({time.perf_counter() - begin:.2f} s): {outcome}", flush=True)  # noqa: T201
    print(f"{len(checks) - failures} of {len(checks)} passed")  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
