"""Triton kernels of the finetuning layers under Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.sglang.interpreted_kernels

Prints as JSON how far outputs and gradients are from the same in torch, each relative to its largest value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from backends.cuda.finetune import layer_kernels


def turned(queries: Any, keys: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Rotary embedding as transformers has it."""
    cos, sin = cos[:, None], sin[:, None]

    def one(states: Any) -> Any:
        first, second = states.chunk(2, -1)
        return states * cos + torch.cat((-second, first), -1) * sin

    return one(queries), one(keys)


def outcome(compute: Callable[..., Any], *inputs: Any) -> list[Any]:
    """Outputs of ``compute``, and gradients by ``inputs``."""
    leaves = [given.clone().requires_grad_() for given in inputs]
    outputs = compute(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    by_output = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, by_output)]


def cases() -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Name, ours, torch's: sizes that are no powers of two, those of heads too; rows that share angles and that do not."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 3, 96), torch.randn(96)
    yield (
        "rms_norm",
        outcome(lambda states: layer_kernels.rms_norm(states, weight, 1e-5), hidden),
        outcome(lambda states: functional.rms_norm(states, (96,), weight, 1e-5), hidden),
    )
    gate, up = torch.randn(2, 3, layer_kernels.PART + 200), torch.randn(2, 3, layer_kernels.PART + 200)
    yield (
        "swiglu",
        outcome(layer_kernels.swiglu, gate, up),
        outcome(lambda one, other: functional.silu(one) * other, gate, up),
    )
    for head_dim, rows in ((16, 1), (16, 2), (20, 1)):
        queries, keys = (torch.randn(2, 5, heads, head_dim).transpose(1, 2) for heads in (6, 2))
        angles = torch.randn(rows, 5, head_dim // 2).repeat(1, 1, 2)
        cos, sin = angles.cos(), angles.sin()
        yield (
            f"rotary of {head_dim}, {rows} rows of angles",
            outcome(lambda one, other, c=cos, s=sin: layer_kernels.rotary(one, other, c, s), queries, keys),
            outcome(lambda one, other, c=cos, s=sin: turned(one, other, c, s), queries, keys),
        )


def main() -> None:
    """Compare."""
    found = {
        name: [float((one - other).abs().max() / other.abs().max()) for one, other in zip(ours, theirs, strict=True)]
        for name, ours, theirs in cases()
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
