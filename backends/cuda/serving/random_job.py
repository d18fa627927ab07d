"""A LoRA job on random weights and random tokens, in the shape of a real model: for measuring, not for learning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from backends.cuda.finetune.adapter import attach
from backends.cuda.finetune.feed import SampleFeed
from backends.cuda.finetune.micro_batch import Sample

TARGETS = ("q_proj", "v_proj")
"""What LoRA is put on; the samples that profiles are fitted to were measured with these."""


def random_peft_model(config: Mapping[str, Any], rank: int, device: str, dtype: Any, *, weights: bool = True) -> Any:
    """A PEFT model with random frozen weights; ``weights`` of `False`: shapes only, for shared weights.

    LoRA B is random too: at zero, nothing would flow into A. Weights are drawn on ``device`` and end on the host.
    """
    import peft
    import torch
    import transformers

    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    made = kinds[config["model_type"]](**{key: value for key, value in config.items() if key != "torch_dtype"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=dtype)
    if weights:
        generator = torch.Generator(device).manual_seed(0)
        for name, parameter in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            if value.dim() == 1:
                value.fill_(1.0 if "norm" in name else 0.0)
            else:
                value.normal_(std=0.02, generator=generator)
            # One parameter at a time through the device: the host copy is all that stays.
            model.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(value.cpu(), requires_grad=False)
        if made.tie_word_embeddings:
            model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(made)
    lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    adapted = attach(model, lora, on_meta=not weights)
    torch.manual_seed(0)
    for name, parameter in list(adapted.named_parameters()):
        if not parameter.requires_grad:
            continue
        owner, _, leaf = name.rpartition(".")
        value = torch.empty(parameter.shape, dtype=dtype).normal_(std=0.02)
        adapted.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(value, requires_grad=True)
    return adapted


def random_feed(vocab: int, unit_tokens: int, micro_batches: int, seed: int = 0) -> SampleFeed:
    """Optimizer batches of ``micro_batches`` samples of ``unit_tokens`` tokens each, all of them trained on."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, vocab, unit_tokens) for _ in range(4 * micro_batches)]
    return SampleFeed([Sample(part, part) for part in ids], micro_batches, unit_tokens, seed=seed)


def served_weights(scheduler: Any, config: Any) -> Any:
    """The tensors of the served model as a job's shared weights (views, nothing copied)."""
    from backends.cuda.finetune.assembly import SharedWeights
    from backends.cuda.finetune.fused_weights import unfused

    model = scheduler.tp_worker.model_runner.model
    layers = [
        unfused(config, {name: part.data for name, part in layer.named_parameters()}) for layer in model.model.layers
    ]
    vocab = config.vocab_size
    embedding = model.model.embed_tokens.weight.data[:vocab]
    head = embedding if config.tie_word_embeddings else model.lm_head.weight.data[:vocab]
    return SharedWeights(layers, embedding, model.model.norm.weight.data, head)


def local_peft_model(path: Path, rank: int, dtype: Any) -> Any:
    """A PEFT model on the weights of a local Hugging Face folder."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=dtype)
    return attach(
        model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    )
