"""A decode-attention-like Triton kernel: each program reads the K and V of one request's part through its slot table."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


# mypy: disable-error-code="no-untyped-def,untyped-decorator"
@triton.jit
def attend(query, keys, values, table, out, context, split, token_stride, BLOCK: tl.constexpr, DIM: tl.constexpr):  # noqa: N803
    """One program: one request, one head, one part of its context; see `launch`."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    dims = tl.arange(0, DIM)
    q = tl.load(query + (request * tl.num_programs(1) + head) * DIM + dims).to(tl.float32)
    total = tl.zeros([DIM], tl.float32)
    weight_sum = 0.0
    best = -1e30
    for start in range(part * split, (part + 1) * split, BLOCK):
        at = start + tl.arange(0, BLOCK)
        slots = tl.load(table + request * context + at).to(tl.int64)
        place = slots[:, None] * token_stride + head * DIM + dims[None, :]
        k = tl.load(keys + place).to(tl.float32)
        scores = tl.sum(k * q[None, :], 1)
        top = tl.maximum(best, tl.max(scores, 0))
        scale = tl.exp(best - top)
        weights = tl.exp(scores - top)
        v = tl.load(values + place).to(tl.float32)
        total = total * scale + tl.sum(v * weights[:, None], 0)
        weight_sum = weight_sum * scale + tl.sum(weights, 0)
        best = top
    tl.store(out + ((request * tl.num_programs(1) + head) * tl.num_programs(2) + part) * DIM + dims, total / weight_sum)


def launch(query: Any, keys: Any, values: Any, table: Any, out: Any, token_stride: int) -> None:
    """``query`` [requests, heads, 128], ``table`` [requests, context] of slots, ``out`` [requests, heads, parts, 128]."""
    requests, context = table.shape
    parts = out.shape[2]
    grid = (requests, query.shape[1], parts)
    attend[grid](
        query, keys, values, table, out, context, context // parts, token_stride, BLOCK=64, DIM=128, num_warps=4
    )
