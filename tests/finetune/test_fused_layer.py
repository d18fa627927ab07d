"""Layers that compute norms, rotary embedding and SwiGLU with other kernels give what stock layers give."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional

from backends.cuda.finetune.fused_layer import LayerKernels, fuse, triton_kernels
from backends.cuda.finetune.submodel import CutModel
from tests.finetune.tiny import LAYERS, VOCAB, tiny_peft


def half_turned(states: Any) -> Any:
    """The second half, negated, before the first one."""
    first, second = states.chunk(2, -1)
    return torch.cat((-second, first), -1)


def counted(calls: Counter[str]) -> LayerKernels:
    """The formulas in plain torch, each call counted."""

    def rms_norm(inputs: Any, weight: Any, eps: float) -> Any:
        calls["rms_norm"] += 1
        states = inputs.float()
        return weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)).to(inputs.dtype)

    def swiglu(gate: Any, up: Any) -> Any:
        calls["swiglu"] += 1
        return functional.silu(gate) * up

    def rotary(queries: Any, keys: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        calls["rotary"] += 1
        cos, sin = cos[:, None], sin[:, None]
        return queries * cos + half_turned(queries) * sin, keys * cos + half_turned(keys) * sin

    return LayerKernels(rms_norm, swiglu, rotary)


def outcome(model: Any) -> list[Any]:
    """Loss of two samples, and the gradient of every trained parameter."""
    ids = torch.arange(22).view(2, 11) * 7 % VOCAB
    loss = model(input_ids=ids, labels=ids).loss
    return [loss, *torch.autograd.grad(loss, [part for part in model.parameters() if part.requires_grad])]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_fused_model_gives_the_same_loss_and_gradients(kind: str) -> None:
    """All three kernels are used in every layer (and in the heads of Qwen3), and nothing changes but rounding."""
    expected = outcome(tiny_peft(kind).train())
    calls: Counter[str] = Counter()
    model = tiny_peft(kind)
    fuse(CutModel(model), counted(calls))
    found = outcome(model)
    norms = (4 if kind == "qwen3" else 2) * LAYERS + 1
    assert calls == {"rms_norm": norms, "swiglu": LAYERS, "rotary": LAYERS}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_another_model_of_the_process_keeps_the_stock_code() -> None:
    """What is replaced belongs to modules, not to transformers."""
    calls: Counter[str] = Counter()
    fuse(CutModel(tiny_peft()), counted(calls))
    outcome(tiny_peft().train())
    assert not calls


def test_an_activation_that_is_not_silu_stays() -> None:
    """SwiGLU is what the kernel computes; any other gate is left alone."""
    calls: Counter[str] = Counter()
    model = tiny_peft(base={"hidden_act": "gelu"})
    expected = outcome(tiny_peft(base={"hidden_act": "gelu"}).train())
    fuse(CutModel(model), counted(calls))
    for one, other in zip(outcome(model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert calls["swiglu"] == 0
    assert calls["rotary"] == LAYERS


def test_a_norm_that_is_trained_stays() -> None:
    """The kernel has no gradient by the norm's weight."""
    calls: Counter[str] = Counter()
    model = tiny_peft()
    cut = CutModel(model)
    cut.layers[1].module.input_layernorm.weight.requires_grad_()
    fuse(cut, counted(calls))
    outcome(model)
    assert calls["rms_norm"] == 2 * LAYERS


def test_without_a_gpu_that_triton_compiles_for_layers_stay_stock() -> None:
    """Whether Triton is missing or cannot launch, the job does without our kernels."""
    assert triton_kernels("cpu") is None
