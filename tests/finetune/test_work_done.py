"""How much arithmetic a step in units is, beside a plain loop with gradient checkpointing over the same batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends.cuda.finetune import layer_pass
from backends.cuda.finetune.layer_pass import AttentionInputs
from backends.cuda.finetune.micro_batch import Sample
from backends.cuda.finetune.optimizer_step import UnitSettings
from backends.cuda.finetune.unread_product import output_unread
from benchmarks.finetune.products import Products
from tests.finetune.tiny import VOCAB, recipe, run_step, tiny_engine, tiny_feed, tiny_peft


def equal_lengths() -> Any:
    """Two micro-batches of three samples of 12 tokens that are all trained on, so that neither side pads or leaves out."""
    rows = np.random.default_rng(0).integers(0, VOCAB, (6, 12))
    return tiny_feed(6, 36, samples=[Sample(row, row) for row in rows])


def plain_flops(**lora: Any) -> int:
    """One step of stock PEFT with non-reentrant checkpointing and transformers' own loss."""
    model = tiny_peft(dtype=torch.float32, **lora)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = equal_lengths().batch(0)
    with Products() as counter:
        for part in batch.micro_batches:
            labels = torch.full(part.shape, -100).flatten()
            labels[part.trained + 1] = part.targets
            model(
                input_ids=part.ids,
                labels=labels.view(part.shape),
                num_items_in_batch=batch.trained_tokens,
                use_cache=False,
            ).loss.backward()
    return int(counter.flops)


def unit_flops(settings: UnitSettings | None = None, **lora: Any) -> int:
    """One step of units."""
    engine = tiny_engine(tiny_peft(dtype=torch.float32, **lora), equal_lengths(), recipe(), settings)
    with Products() as counter:
        run_step(engine)
    return int(counter.flops)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"], ids=["qv", "all"])
def test_units_multiply_no_more_than_a_plain_loop(targets: Any) -> None:
    """Checkpointing stops recomputing at the last tensor that a gradient needs, and so do backward units."""
    assert unit_flops(target_modules=targets) <= plain_flops(target_modules=targets)


def test_parts_and_groups_add_no_products() -> None:
    """However head + loss and the batch are cut, no product is done twice."""
    whole = unit_flops()
    assert unit_flops(UnitSettings(head_parts=3, loss_chunk_tokens=5)) == whole
    assert unit_flops(UnitSettings(group=1)) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("lora", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_leaving_the_last_product_out_changes_no_bit(kind: str, dtype: Any, lora: dict[str, Any]) -> None:
    """Gradients by input and by every trained parameter, with down_proj trained too and dropout."""
    layer = tiny_peft(kind, dtype, **lora, lora_dropout=0.1).get_base_model().model.layers[1].train()
    hidden, by_output = torch.randn(2, 3, 12, 32).to(dtype)
    positions = torch.arange(12)[None]
    rotary = tiny_peft(kind, dtype).get_base_model().model.rotary_emb
    inputs = AttentionInputs.of(rotary, hidden, positions, None)
    parameters = [part for part in layer.parameters() if part.requires_grad]

    def whole() -> tuple[Any, list[Any]]:
        return layer_pass.backward_kept(
            *layer_pass.forward_kept(layer, hidden, inputs), by_output, parameters, by_input=True
        )

    def without() -> tuple[Any, list[Any]]:
        return layer_pass.backward(layer, hidden, by_output, inputs, parameters, by_input=True)

    outcomes = []
    for passed in (whole, without):
        torch.manual_seed(3)
        by_hidden, gradients = passed()
        outcomes.append([by_hidden, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
    assert len(outcomes[0]) > 6


def test_the_layer_is_whole_again_afterwards() -> None:
    """Inside, the last product has no values; afterwards, and after an error inside, it has."""
    layer = tiny_peft(target_modules=["q_proj"]).get_base_model().model.layers[0]
    inputs = torch.randn(3, 48, dtype=torch.float64)
    expected = layer.mlp.down_proj(inputs)
    with output_unread(layer):
        assert not layer.mlp.down_proj(inputs).any()
    assert torch.equal(layer.mlp.down_proj(inputs), expected)
    with pytest.raises(RuntimeError), output_unread(layer):
        inputs.view(5)
    assert torch.equal(layer.mlp.down_proj(inputs), expected)
