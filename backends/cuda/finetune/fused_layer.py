"""Decoder layers of transformers that compute norms, rotary embedding and SwiGLU in one kernel each.

Modules, parameters and products stay as they are. What those modules do with their inputs is replaced module by module, so
that another model in the process keeps the stock code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from backends.cuda.finetune.submodel import CutModel

ROTARY = "apply_rotary_pos_emb"
"""What the attention of transformers calls, a name of its module."""


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """``rms_norm(inputs, weight, eps)``, ``swiglu(gate, up)``, ``rotary(queries, keys, cos, sin)``: see `layer_kernels`."""

    rms_norm: Callable[[Any, Any, float], Any]
    swiglu: Callable[[Any, Any], Any]
    rotary: Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def triton_kernels(device: Any) -> LayerKernels | None:
    """Ours; `None` where Triton is not installed, or cannot compile for ``device`` (it needs a C compiler)."""
    import torch

    try:
        from backends.cuda.finetune import layer_kernels

        row = torch.ones(1, 16, device=device, dtype=torch.bfloat16)
        layer_kernels.rms_norm(row, row[0], 1e-6)
    except Exception:  # whatever Triton lacks, stock layers do without it
        return None
    return LayerKernels(layer_kernels.rms_norm, layer_kernels.swiglu, layer_kernels.rotary)


def fuse(model: CutModel, kernels: LayerKernels) -> None:
    """Let the layers and the last norm of ``model`` compute with ``kernels``, wherever these do the same."""
    for norm in _norms(model):
        norm.forward = partial(_normed, norm, kernels)
    for layer in model.layers:
        mlp, attention = layer.module.mlp, layer.module.self_attn
        if getattr(model.config, "hidden_act", None) in ("silu", "swish"):
            mlp.forward = partial(_gated, mlp, kernels)
        _turn_with(attention, kernels)


def _norms(model: CutModel) -> Iterator[Any]:
    """Frozen norms by root mean square."""
    for piece in (*model.layers, model.norm):
        for module in piece.module.modules():
            if type(module).__name__.endswith("RMSNorm") and not module.weight.requires_grad:
                yield module


def _normed(norm: Any, kernels: LayerKernels, hidden_states: Any) -> Any:
    return kernels.rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


def _gated(mlp: Any, kernels: LayerKernels, x: Any) -> Any:
    return mlp.down_proj(kernels.swiglu(mlp.gate_proj(x), mlp.up_proj(x)))


def _turn_with(attention: Any, kernels: LayerKernels) -> None:
    """The module's own `forward`, in which the name of the rotary embedding means ours."""
    forward = type(attention).forward
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return

    def turned(queries: Any, keys: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        return kernels.rotary(queries, keys, cos, sin)

    names = {**forward.__globals__, ROTARY: turned}
    ours = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    attention.forward = MethodType(ours, attention)
