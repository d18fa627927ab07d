"""Gradients of the hand-chained units are those of ``loss.backward()`` through stock PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.cuda.finetune.optimizer_step import UnitSettings
from tests.finetune.tiny import (
    gradients,
    plain_gradients,
    recipe,
    tiny_engine,
    tiny_feed,
    tiny_peft,
    tiny_samples,
    worst_difference,
)

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}


def difference(kind: str, dtype: Any, feed: Any, settings: UnitSettings, window: int | None, **lora: Any) -> float:
    """Worst difference of a whole optimizer batch, loss included."""
    loss, expected = plain_gradients(tiny_peft(kind, dtype, **lora), feed.batch(0))
    engine = tiny_engine(tiny_peft(kind, dtype, **lora), feed, recipe(), settings, window_layers=window)
    found = gradients(engine)
    assert float(engine.loss_so_far) == pytest.approx(loss, rel=CLOSE[dtype])
    return worst_difference(found, expected)


@pytest.mark.parametrize("recompute", ["layer", "none"])
@pytest.mark.parametrize("window", [None, 2, 3, 4])
@pytest.mark.parametrize("group", [None, 1, 2])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_every_window_group_and_recompute_setting(
    kind: str, group: int | None, window: int | None, recompute: Any
) -> None:
    """Whatever is resident, kept or grouped, fp64 gradients agree to 1e-9 of their norm."""
    settings = UnitSettings(recompute=recompute, group=group, head_parts=2, loss_chunk_tokens=7)
    assert difference(kind, torch.float64, tiny_feed(), settings, window) < CLOSE[torch.float64]


def test_qwen3() -> None:
    """A model whose layers also normalise queries and keys."""
    assert difference("qwen3", torch.float64, tiny_feed(), UnitSettings(group=2), 3) < CLOSE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(("batch_samples", "micro_batch_tokens"), [(1, 20), (4, 20), (8, 64), (24, 200), (12, 1)])
def test_every_accumulation_and_micro_batch(kind: str, dtype: Any, batch_samples: int, micro_batch_tokens: int) -> None:
    """From one sample to a whole epoch a step, from one sample to all of them a micro-batch, in fp64 and fp32."""
    feed = tiny_feed(batch_samples, micro_batch_tokens)
    assert difference(kind, dtype, feed, UnitSettings(), 2) < CLOSE[dtype]


def test_how_a_batch_is_cut_changes_no_gradient() -> None:
    """One micro-batch or many: the loss is a mean over the tokens of the whole optimizer batch, not of means."""
    whole, cut = (tiny_engine(tiny_peft(), tiny_feed(8, tokens), recipe()) for tokens in (1000, 20))
    assert len(cut.feed.batch(0).micro_batches) > len(whole.feed.batch(0).micro_batches) == 1
    assert worst_difference(gradients(cut), gradients(whole)) < 1e-9


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"target_modules": "all-linear"},
        {"target_modules": ["k_proj"], "layers_to_transform": [1, 3]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens", "o_proj"]},
        {"target_modules": r".*\.(gate|up)_proj", "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    ],
    ids=["rslora", "dora", "all", "some-layers", "head", "embedding", "pattern"],
)
def test_adapters_of_every_form(lora: dict[str, Any]) -> None:
    """rsLoRA, DoRA, all projections, some layers only, head and embedding: whatever stock PEFT puts into the layers."""
    settings = UnitSettings(loss_chunk_tokens=11)
    assert difference("llama", torch.float64, tiny_feed(), settings, 2, **lora) < CLOSE[torch.float64]


@pytest.mark.parametrize("recompute", ["layer", "none"])
@pytest.mark.parametrize("window", [None, 2])
def test_dropout_draws_the_same_in_recomputation(recompute: Any, window: int | None) -> None:
    """With dropout, recomputing or keeping and any window give the gradients of a plain loop under the same seeds."""
    lora = {"lora_dropout": 0.3, "base": {"attention_dropout": 0.2}}
    settings = UnitSettings(recompute=recompute)
    assert difference("llama", torch.float64, tiny_feed(), settings, window, **lora) < CLOSE[torch.float64]


def test_a_batch_of_equal_lengths_needs_no_padding() -> None:
    """Gradients with transformers' own loss function (fp32), where it can be used as it is."""
    samples = [sample for sample in tiny_samples(200) if len(sample) == 9][:6]
    feed = tiny_feed(6, 27, samples=samples)
    batch = feed.batch(0)
    model = tiny_peft(dtype=torch.float32)
    model.train()
    for part in batch.micro_batches:
        labels = torch.full(part.shape, -100).flatten()
        labels[part.trained + 1] = part.targets
        model(
            input_ids=part.ids, labels=labels.view(part.shape), num_items_in_batch=batch.trained_tokens, use_cache=False
        ).loss.backward()
    expected = {name: part.grad for name, part in model.named_parameters() if part.requires_grad}
    found = gradients(tiny_engine(tiny_peft(dtype=torch.float32), feed, recipe()))
    assert worst_difference(found, expected) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_bf16_is_as_close_to_fp32_as_a_plain_loop(kind: str) -> None:
    """Rounding in units is no worse than in a plain bf16 loop; both sides turn by the same unrounded frequencies."""
    lora: dict[str, Any] = {
        "r": 8,
        "target_modules": "all-linear",
        "base": {"hidden_size": 128, "intermediate_size": 256},
    }
    wide, narrow, cut = (tiny_peft(kind, torch.bfloat16, **lora) for _ in range(3))
    wide.to(torch.float32)
    engine = tiny_engine(cut, tiny_feed(), recipe())
    rotaries = [model.get_base_model().model.rotary_emb for model in (wide, narrow)]
    assert all(torch.equal(rotary.inv_freq, engine.model.rotary.inv_freq) for rotary in rotaries)
    assert engine.model.rotary.inv_freq.dtype == torch.float32
    exact, plain = (plain_gradients(model, tiny_feed().batch(0), mask=False)[1] for model in (wide, narrow))

    def distance(found: dict[str, Any]) -> float:
        far = sum(float((found[name].float() - part).square().sum()) for name, part in exact.items())
        return float((far / sum(float(part.square().sum()) for part in exact.values())) ** 0.5)

    assert 0.0 < distance(gradients(engine)) < 1.2 * distance(plain) < 0.05
