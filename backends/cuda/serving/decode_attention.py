"""SGLang's Triton kernel for decode attention, with launch parameters for a part of a Hopper GPU.

SGLang launches it with tiles of 32 tokens and two pipeline stages. A step on all SMs hides that; on the SMs of a partition
too few bytes are in flight, and it reads KV at half the speed of the memory (`benchmarks/decode_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KERNEL = "_fwd_grouped_kernel_stage1"
"""Name of the kernel in SGLang's module: grouped-query attention over one part of each request's KV."""

HOPPER = (9, 0)
"""The compute capability that was measured; others have other shared memory, and keep SGLang's parameters."""

TILE: dict[str, int] = {"BLOCK_N": 128, "num_warps": 4, "num_stages": 3}
"""Tokens of a tile, warps of a block, stages of its pipeline: the fastest of those measured, on every partition."""

HEAD_DIM = 128
"""Of K and V; tiles of larger heads would not fit."""


class DecodeKernel:
    """Launches ``kernel`` (a Triton function) with `TILE` wherever that fits, else as it was asked to."""

    def __init__(self, kernel: Any) -> None:
        """Nothing else of the kernel changes: same programs, same arguments."""
        self.replaces = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """As Triton functions are launched."""
        launch = self.replaces[grid]

        def launched(*arguments: Any, **options: Any) -> Any:
            return launch(*arguments, **(options | TILE if fits(*arguments, **options) else options))

        return launched


def fits(_query: Any, keys: Any, *_others: Any, **options: Any) -> bool:
    """Whether `TILE` is for such a launch: plain K and V of two bytes and `HEAD_DIM`."""
    plain = not options["HAS_MLA"] and not options["BLOCK_DPE"] and options["SCORE_MOD"] is None
    heads = options["BLOCK_DMODEL"] == options["BLOCK_DV"] == HEAD_DIM
    return bool(plain and heads and keys.element_size() == 2)


def register(capability: tuple[int, int] | None) -> bool:
    """Put `DecodeKernel` in place on a GPU of that compute capability (`None`: no GPU); says whether it did."""
    if capability != HOPPER:
        return False
    from sglang.kernels.ops.attention import decode_attention

    kernel = getattr(decode_attention, KERNEL)
    setattr(decode_attention, KERNEL, DecodeKernel(getattr(kernel, "replaces", kernel)))
    return True


def capability_here() -> tuple[int, int] | None:
    """Of the GPU that torch has current."""
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
