"""The frozen weights of a serving engine, which fuses q, k, v and gate, up, under the names of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harli_core.errors import JobError


def unfused(config: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Views of one layer's tensors, nothing copied: rows of ``qkv_proj`` and ``gate_up_proj``, everything else as it is.

    ::

        self_attn.qkv_proj.weight  [(heads + 2 kv_heads) head_dim, hidden]   q rows, k rows, v rows
        mlp.gate_up_proj.weight    [2 intermediate, hidden]                  gate rows, up rows
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    parts = {
        "qkv_proj": (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)),
        "gate_up_proj": (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)),
    }
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        outer, _, fused = owner.rpartition(".")
        if fused not in parts:
            made[name] = tensor
            continue
        rows = sum(size for _, size in parts[fused])
        if tensor.shape[0] != rows:
            raise JobError(
                f"shared weights: {name} has {tensor.shape[0]} rows, expected {rows}: is it one rank of several?"
            )
        for (part, _), view in zip(parts[fused], tensor.split([size for _, size in parts[fused]]), strict=True):
            made[f"{outer}.{part}.{leaf}"] = view
    return made
