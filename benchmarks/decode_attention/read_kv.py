"""A kernel that reads K and V of given slots and adds them up: what decode attention cannot be faster than."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 32


# mypy: disable-error-code="no-untyped-def,untyped-decorator"
@triton.jit
def _read(keys, values, slots, sums, tokens, slot_stride, tile: tl.constexpr, head_dim: tl.constexpr):
    program, head = tl.program_id(0), tl.program_id(1)
    share = tl.cdiv(tokens, tl.num_programs(0))
    first = program * share
    last = tl.minimum(first + share, tokens)
    of_head = tl.arange(0, head_dim)
    total = tl.zeros([tile, head_dim], tl.float32)
    for begin in tl.range(first, last, tile):
        token = begin + tl.arange(0, tile)
        slot = tl.load(slots + token, mask=token < last, other=0)
        at = slot[:, None] * slot_stride + head * head_dim + of_head[None, :]
        inside = (token < last)[:, None]
        total += tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + (program * tl.num_programs(1) + head) * head_dim + of_head, tl.sum(total, 0))


def read_kv(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, sums: torch.Tensor, programs: int) -> None:
    """Read ``slots`` of ``keys`` and ``values`` (slots x heads x head_dim), with ``programs`` blocks a head.

    ``sums`` has room for ``programs`` x heads x head_dim floats.
    """
    heads, head_dim = keys.shape[1:]
    assert sums.numel() >= programs * heads * head_dim
    _read[(programs, heads)](
        keys, values, slots, sums, len(slots), keys.stride(0), tile=TILE, head_dim=head_dim, num_warps=4, num_stages=3
    )
