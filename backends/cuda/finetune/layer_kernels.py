"""What lies between the products of a decoder layer, each as one Triton kernel: norms, rotary embedding, SwiGLU.

Stock modules run each of them as five to ten kernels that read and write memory for little arithmetic, beside decode steps
that need the same memory. A kernel is compiled once for a model, whatever the lengths: in a serving process a compilation
would stand in the way of a decode step. Weights of norms are frozen, so there is no gradient by them.

Imports torch and triton, so it is imported where it is used.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PART = 2048
"""Columns of SwiGLU that one program computes."""


@triton.jit
def _norm(inputs, weight, outputs, scales, eps, columns: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    values = tl.load(inputs + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / columns + eps)
    tl.store(scales + row, scale)
    normed = (values * scale).to(outputs.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(outputs + row * columns + column, (normed * weights).to(outputs.dtype.element_ty), mask=inside)


@triton.jit
def _norm_back(by_output, inputs, weight, scales, by_input, columns: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < columns
    at = row * columns + column
    scale = tl.load(scales + row)
    normed = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32) * scale
    gradient = tl.load(by_output + at, mask=inside, other=0.0).to(tl.float32)
    gradient *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(gradient * normed, 0) / columns
    tl.store(by_input + at, (scale * (gradient - normed * along)).to(by_input.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate, up, outputs, columns: tl.constexpr, part: tl.constexpr):
    column = tl.program_id(1) * part + tl.arange(0, part)
    inside = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    open_part = (gates / (1.0 + tl.exp(-gates))).to(outputs.dtype.element_ty).to(tl.float32)
    tl.store(outputs + at, (open_part * ups).to(outputs.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_back(by_output, gate, up, by_gate, by_up, columns: tl.constexpr, part: tl.constexpr):
    column = tl.program_id(1) * part + tl.arange(0, part)
    inside = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    gradient = tl.load(by_output + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gates))
    tl.store(by_up + at, (gradient * gates * share).to(by_up.dtype.element_ty), mask=inside)
    slope = share * (1.0 + gates * (1.0 - share))
    tl.store(by_gate + at, (gradient * ups * slope).to(by_gate.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _rotate(
    inputs, outputs, cos, sin, length, by_row, by_head, by_token, angles_by_row,
    heads: tl.constexpr, half: tl.constexpr, head_block: tl.constexpr, half_block: tl.constexpr, back: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, place = token // length, token % length
    head = tl.arange(0, head_block)[:, None]
    column = tl.arange(0, half_block)[None, :]
    turned = column < half
    inside = (head < heads) & turned
    at = inputs + row * by_row + place * by_token + head * by_head + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    angle = row * angles_by_row + place * (2 * half) + column
    cosine = tl.load(cos + angle, mask=turned, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    if back:
        sine = -sine
    to = outputs + (token * heads + head) * (2 * half) + column
    tl.store(to, (first * cosine - second * sine).to(outputs.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * cosine + first * sine).to(outputs.dtype.element_ty), mask=inside)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, eps: float) -> Any:
        inputs, weight = inputs.contiguous(), weight.contiguous()
        columns = inputs.shape[-1]
        rows = inputs.numel() // columns
        outputs, scales = torch.empty_like(inputs), torch.empty(rows, device=inputs.device, dtype=torch.float32)
        block = triton.next_power_of_2(columns)
        _norm[(rows,)](inputs, weight, outputs, scales, eps, columns=columns, block=block, num_warps=_warps(block))
        ctx.save_for_backward(inputs, weight, scales)
        return outputs

    @staticmethod
    def backward(ctx: Any, *by_output: Any) -> Any:
        inputs, weight, scales = ctx.saved_tensors
        by_input, columns = torch.empty_like(inputs), inputs.shape[-1]
        block = triton.next_power_of_2(columns)
        _norm_back[(scales.numel(),)](
            by_output[0].contiguous(), inputs, weight, scales, by_input,
            columns=columns, block=block, num_warps=_warps(block),
        )  # fmt: skip
        return by_input, None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> Any:
        gate, up = gate.contiguous(), up.contiguous()
        outputs, columns = torch.empty_like(gate), gate.shape[-1]
        grid = (gate.numel() // columns, triton.cdiv(columns, PART))
        _swiglu[grid](gate, up, outputs, columns=columns, part=PART, num_warps=4)
        ctx.save_for_backward(gate, up)
        return outputs

    @staticmethod
    def backward(ctx: Any, *by_output: Any) -> Any:
        gate, up = ctx.saved_tensors
        by_gate, by_up, columns = torch.empty_like(gate), torch.empty_like(up), gate.shape[-1]
        grid = (gate.numel() // columns, triton.cdiv(columns, PART))
        _swiglu_back[grid](by_output[0].contiguous(), gate, up, by_gate, by_up, columns=columns, part=PART, num_warps=4)
        return by_gate, by_up


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Any, cos: Any, sin: Any) -> Any:
        ctx.save_for_backward(cos, sin)
        return _rotated(inputs, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *by_output: Any) -> Any:
        return _rotated(by_output[0], *ctx.saved_tensors, back=True), None, None


def rms_norm(inputs: Any, weight: Any, eps: float) -> Any:
    """``inputs`` [..., columns] over their root mean square in fp32, times ``weight`` [columns]."""
    return _RmsNorm.apply(inputs, weight, eps)


def swiglu(gate: Any, up: Any) -> Any:
    """``silu(gate) * up``, of equal shapes."""
    return _Swiglu.apply(gate, up)


def rotary(queries: Any, keys: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Both [rows, heads, tokens, head_dim], turned by angles of [1 or rows, tokens, head_dim] whose halves are equal.

    Raises `ValueError` for angles of another shape: those of only a part of each head, for example.
    """
    rows, _, length, head_dim = queries.shape
    fitting = ((1, length, head_dim), (rows, length, head_dim))
    if keys.shape[::2] != queries.shape[::2] or keys.shape[3] != head_dim or cos.shape not in fitting:
        raise ValueError(
            f"queries {tuple(queries.shape)} and keys {tuple(keys.shape)} cannot be turned by angles {tuple(cos.shape)}: "
            f"expected {fitting[0]} or {fitting[1]}"
        )
    return _Rotary.apply(queries, cos, sin), _Rotary.apply(keys, cos, sin)


def _rotated(inputs: Any, cos: Any, sin: Any, *, back: bool) -> Any:
    inputs = inputs if inputs.stride(-1) == 1 else inputs.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, length, head_dim = inputs.shape
    outputs = torch.empty(rows, length, heads, head_dim, device=inputs.device, dtype=inputs.dtype)
    _rotate[(rows * length,)](
        inputs, outputs, cos, sin, length, inputs.stride(0), inputs.stride(1), inputs.stride(2),
        cos.stride(0) if len(cos) > 1 else 0,
        heads=heads, half=head_dim // 2, head_block=triton.next_power_of_2(heads),
        half_block=triton.next_power_of_2(head_dim // 2), back=back, num_warps=4,
    )  # fmt: skip
    return outputs.transpose(1, 2)


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))
