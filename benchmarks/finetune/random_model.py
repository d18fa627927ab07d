"""Models of real shapes with random weights, their data, and the plain training loop that Harli is compared with."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import peft
import torch
import transformers

from backends.cuda.finetune.adapter import attach
from backends.cuda.finetune.feed import SampleFeed
from backends.cuda.finetune.micro_batch import OptimizerBatch, Sample
from harli_core.model import ModelShape, model_shape

TARGETS = {
    "qv": ["q_proj", "v_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
TINY = ("tiny", "qwen2-tiny")
TINY_SHAPE = ModelShape(
    name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=512, dtype_bytes=2
)


def shape_of(name: str) -> ModelShape:
    """A model of the core, or one of ``TINY`` for trying the benchmark out without a GPU."""
    return TINY_SHAPE if name in TINY else model_shape(name)


def random_model(name: str, targets: str, rank: int, device: str, dtype: Any) -> Any:
    """A PEFT model with random frozen weights and LoRA matrices (B too: at zero the A gradients would be zero)."""
    shape = shape_of(name)
    kind = transformers.Qwen2Config if name.startswith("qwen2") else transformers.LlamaConfig
    config = kind(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    torch.manual_seed(0)
    for place, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0 if "norm" in place else 0.0)
        else:
            parameter.data.normal_(std=0.02)
    made = attach(
        model,
        peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS[targets], task_type="CAUSAL_LM"),
    )
    for place, parameter in made.named_parameters():
        if parameter.requires_grad and "lora_B" in place:
            parameter.data.normal_(std=0.02)
    return made


def random_feed(vocab: int, length: int, rows: int, accumulation: int, seed: int = 0) -> SampleFeed:
    """Samples of ``length`` tokens, all trained on: ``accumulation`` micro-batches of ``rows`` a step."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, vocab, length) for _ in range(rows * accumulation)]
    return SampleFeed([Sample(part, part) for part in ids], rows * accumulation, rows * length, seed=seed)


class PlainLoop:
    """What anybody would write: PEFT model, gradient checkpointing, ``loss.backward()``, clipping, fused AdamW."""

    def __init__(self, model: Any, *, autocast: bool) -> None:
        """``autocast``: LoRA matrices stay in fp32 and are cast at each use; otherwise they are bf16 as the model is."""
        self.model, self.autocast = model, autocast
        dtype = next(part.dtype for part in model.parameters() if not part.requires_grad)
        self.trained = [part for part in model.parameters() if part.requires_grad]
        for part in self.trained:
            part.data = part.data.to(torch.float32 if autocast else dtype)
        model.train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=True)

    def step(
        self,
        batch: OptimizerBatch,
        after_loss: Callable[[], None] = lambda: None,
        after_backward: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """One optimizer step; the loss stays on the device. The calls are made in each micro-batch."""
        device = self.trained[0].device
        total = torch.zeros((), device=device)
        for part in batch.micro_batches:
            ids = part.ids.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.model(
                    input_ids=ids, labels=ids, num_items_in_batch=batch.trained_tokens, use_cache=False
                ).loss
            after_loss()
            loss.backward()
            after_backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def close(self) -> None:
        """Leave the model as it was found."""
        self.model.gradient_checkpointing_disable()
        self.model.disable_input_require_grads()


def seconds_a_step(step: Any, steps: int, warm_up: int) -> list[float]:
    """Wall time of each of ``steps`` steps, the device waited for, after ``warm_up``."""
    times = []
    for number in range(warm_up + steps):
        begin_s = perf_counter()
        step(number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number >= warm_up:
            times.append(perf_counter() - begin_s)
    return times
