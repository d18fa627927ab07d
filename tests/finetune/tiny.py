"""Tiny models and data, a plain PyTorch + PEFT loop over them, and an engine beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import peft
import torch
import transformers

from backends.cuda.finetune.adapter import attach
from backends.cuda.finetune.assembly import build_engine
from backends.cuda.finetune.dropout import unit_seed
from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.feed import SampleFeed
from backends.cuda.finetune.micro_batch import IGNORED, OptimizerBatch, Sample
from backends.cuda.finetune.optimizer_step import UnitSettings
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.step_report import StepReport

VOCAB, LAYERS = 97, 4
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def tiny_base(kind: str = "llama", dtype: Any = torch.float64, **changes: Any) -> Any:
    """A model of four layers with random weights, the same every time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": kind == "qwen2",
    }
    config = CONFIGS[kind](**{**sizes, **changes})
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    made.model.rotary_emb = type(made.model.rotary_emb)(config)  # not rounded with the weights, as in a loaded model
    return made


def tiny_peft(kind: str = "llama", dtype: Any = torch.float64, base: dict[str, Any] | None = None, **lora: Any) -> Any:
    """Its PEFT model, every LoRA matrix drawn at random: with B at zero every gradient of A would be zero."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **lora}
    made = attach(tiny_base(kind, dtype, **(base or {})), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
            if "lora_B" in name or "lora_embedding_A" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return made


def tiny_samples(count: int = 24, seed: int = 0, longest: int = 20) -> list[Sample]:
    """Samples of different lengths whose first tokens are a masked prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(rng.integers(5, longest))
        ids = rng.integers(0, VOCAB, length)
        labels = ids.copy()
        labels[: int(rng.integers(1, length - 1))] = IGNORED
        made.append(Sample(ids, labels))
    return made


def tiny_feed(batch_samples: int = 8, micro_batch_tokens: int = 40, **changes: Any) -> SampleFeed:
    """Epochs over `tiny_samples`."""
    return SampleFeed(
        changes.pop("samples", None) or tiny_samples(), batch_samples, micro_batch_tokens, seed=1, **changes
    )


def recipe(max_steps: int = 4, **changes: Any) -> Recipe:
    """A learning rate at which a few steps change the loss visibly."""
    return Recipe(max_steps=max_steps, **{"learning_rate": 1e-2, "warmup_steps": 1, **changes})


def tiny_engine(
    model: Any, feed: Any, plan: Recipe, settings: UnitSettings | None = None, **options: Any
) -> FinetuneEngine:
    """An engine on the CPU."""
    return build_engine(model, feed, plan, settings=settings, **{"device": "cpu", **options})


def run_step(engine: FinetuneEngine, stream: Any = None, between: Callable[[], None] | None = None) -> None:
    """Units up to the end of the optimizer step, ``between`` before each."""
    step = engine.cursor.steps
    while engine.cursor.steps == step:
        if between is not None:
            between()
        unit = engine.next_unit()
        assert unit is not None, engine.state
        engine.run(unit, stream)


def run_all(engine: FinetuneEngine, between: Callable[[], None] | None = None) -> None:
    """Units up to the end of the job."""
    while engine.next_unit() is not None:
        run_step(engine, between=between)
    engine.close()


def gradients(engine: FinetuneEngine) -> dict[str, Any]:
    """Run to the first optimizer unit; the gradients by full parameter name."""
    while (unit := engine.next_unit()) is not None and unit.kind != "optimizer":
        engine.run(unit)
    return {
        state.submodel.prefix + name: view.clone()
        for state in engine.states.all
        for name, view in zip(state.names, state.gradient_views, strict=True)
    }


@contextmanager
def seeded_like_units(model: Any, seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Dropout of a plain forward pass draws what the engine's units draw: each submodel begins at its unit's seed."""
    causal = model.get_base_model()
    pieces = [(-1, causal.model.embed_tokens), *enumerate(causal.model.layers), (-2, causal.lm_head)]
    hooks = [
        piece.register_forward_pre_hook(
            lambda _module, _arguments, index=index: (
                torch.manual_seed(unit_seed(seed, step, micro_batch, index)) and None
            )
        )
        for index, piece in pieces
    ]
    yield
    for hook in hooks:
        hook.remove()


def plain_backward(model: Any, batch: OptimizerBatch, seed: int = 42, step: int = 0, *, mask: bool = True) -> float:
    """What anybody would write: forward, cross entropy over all of the batch's tokens, ``loss.backward()``."""
    model.train()
    device = next(model.parameters()).device
    total = 0.0
    for index, part in enumerate(batch.micro_batches):
        ids = part.ids.to(device)
        options = {"attention_mask": _attended(part).to(device)} if mask else {}
        with seeded_like_units(model, seed, step, index):
            logits = model(input_ids=ids, use_cache=False, **options).logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        chosen = logits.flatten(0, 1)[part.trained.to(device)].to(wide)
        loss = torch.nn.functional.cross_entropy(chosen, part.targets.to(device), reduction="sum")
        loss = loss / batch.trained_tokens
        loss.backward()
        total += loss.item()
    return total


def plain_gradients(model: Any, batch: OptimizerBatch, **options: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by parameter name."""
    loss = plain_backward(model, batch, **options)
    return loss, {name: part.grad.clone() for name, part in model.named_parameters() if part.requires_grad}


def plain_losses(model: Any, feed: SampleFeed, plan: Recipe) -> list[float]:
    """Train with torch's AdamW, transformers' schedule and torch's clipping."""
    trained = [part for part in model.parameters() if part.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=plan.learning_rate,
        betas=(plan.adam_beta1, plan.adam_beta2),
        eps=plan.adam_epsilon,
        weight_decay=plan.weight_decay,
    )
    schedule = transformers.get_scheduler(plan.lr_scheduler_type, optimizer, plan.warmup_steps, plan.max_steps)
    losses = []
    for step in range(plan.max_steps):
        losses.append(plain_backward(model, feed.batch(step), plan.seed, step))
        if plan.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, plan.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


def worst_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest relative difference of two sets of gradients, norm by norm; every norm must be there and not zero."""
    assert found.keys() == expected.keys()
    norms = {name: float(tensor.norm()) for name, tensor in expected.items()}
    assert min(norms.values()) > 0.0, norms
    return max(float((found[name] - expected[name]).norm()) / norms[name] for name in expected)


class Collected:
    """Reports of an engine."""

    def __init__(self) -> None:
        """None yet."""
        self.reports: list[StepReport] = []

    def __call__(self, report: StepReport) -> None:
        """Take one."""
        self.reports.append(report)

    @property
    def losses(self) -> list[float]:
        """By step."""
        return [report.loss for report in self.reports]


def _attended(part: Any) -> Any:
    """An attention mask as a tokenizer would give it: 1 up to the last token that is no padding.

    Which tokens are padding is not in a micro-batch, but what is beyond the last trained place of a row does not matter.
    """
    rows, length = part.shape
    mask = torch.zeros(rows, length, dtype=torch.long)
    for place in part.trained.tolist():
        mask[place // length, : place % length + 2] = 1
    return mask
