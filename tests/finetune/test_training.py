"""Whole runs: the losses of a plain loop, and bit-equal ones however units are paused and windows moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.cuda.finetune.adapter import write_adapter
from backends.cuda.finetune.optimizer_step import UnitSettings
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.work import FinetuneWork
from harli_core.errors import JobError
from tests.finetune.tiny import (
    LAYERS,
    Collected,
    plain_losses,
    recipe,
    run_all,
    run_step,
    tiny_base,
    tiny_engine,
    tiny_feed,
    tiny_peft,
)


@pytest.mark.parametrize(("kind", "dropout"), [("llama", 0.0), ("qwen2", 0.0), ("llama", 0.2)])
def test_fifty_steps_have_the_losses_of_a_plain_loop(kind: str, dropout: float) -> None:
    """AdamW, warm-up, cosine and clipping over several epochs, fp32, in a window, as PyTorch and PEFT train it."""
    plan = recipe(50, warmup_steps=5, weight_decay=0.1, max_grad_norm=0.3)
    feed = tiny_feed(4, 40)
    plain = plain_losses(tiny_peft(kind, torch.float32, lora_dropout=dropout), feed, plan)
    seen = Collected()
    model = tiny_peft(kind, torch.float32, lora_dropout=dropout)
    run_all(tiny_engine(model, feed, plan, window_layers=2, on_step=seen))
    assert seen.losses == pytest.approx(plain, rel=1e-5)
    assert sum(plain[-6:]) < 0.98 * sum(plain[:6])  # an epoch each
    norms = [report.grad_norm for report in seen.reports]
    assert min(norms) < 0.3 < max(norms)  # some steps are clipped, some are not


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "constant_with_warmup"])
def test_schedules_are_those_of_transformers(schedule: Any) -> None:
    """Every rate of every schedule, exactly."""
    plan = Recipe(20, learning_rate=0.3, lr_scheduler_type=schedule, warmup_steps=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=plan.learning_rate)
    theirs = transformers.get_scheduler(schedule, optimizer, plan.warmup_steps, plan.max_steps)
    for step in range(plan.max_steps):
        assert plan.rate_at(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=0)
        optimizer.step()
        theirs.step()


def undisturbed(**options: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses and final state of a run that nobody touches."""
    seen = Collected()
    engine = tiny_engine(tiny_peft(lora_dropout=0.1), tiny_feed(), recipe(), on_step=seen, **options)
    run_all(engine)
    return seen.losses, engine.states.tensors()


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], dict[str, Any]]:
    """An undisturbed run with all layers resident."""
    return undisturbed()


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), recompute=st.sampled_from(["layer", "none"]))
def test_pauses_and_windows_at_random_change_no_bit(
    reference: tuple[list[float], dict[str, Any]], seed: int, recompute: Any
) -> None:
    """Paused after every unit, the window shrunk or grown at random ones: the same losses and the same adapter."""
    rng = np.random.default_rng(seed)
    seen = Collected()
    engine = tiny_engine(
        tiny_peft(lora_dropout=0.1),
        tiny_feed(),
        recipe(),
        UnitSettings(recompute=recompute),
        window_layers=int(rng.integers(2, LAYERS + 1)),
        on_step=seen,
    )

    def disturb() -> None:
        engine.pause("a test")
        assert engine.next_unit() is None
        assert engine.state.reason == "a test"
        engine.resume()
        if rng.random() < 0.3:
            size = int(rng.integers(1, LAYERS + 2))
            assert engine.shrink_window(size) <= max(2, size)
            assert engine.grow_window(int(rng.integers(2, LAYERS + 1))) >= 2
            engine.weights.check_integrity()  # type: ignore[attr-defined]  # windowed here

    run_all(engine, between=disturb)
    losses, state = reference
    assert seen.losses == losses
    assert engine.states.tensors().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in engine.states.tensors().items())


def test_units_run_in_the_order_of_the_core_only() -> None:
    """The engine walks `harli_core`'s cursor and refuses any other unit, whoever asks for it."""
    engine = tiny_engine(tiny_peft(), tiny_feed(), recipe())
    assert isinstance(engine, FinetuneWork)
    order = engine.cursor.order.units
    assert engine.next_unit() is order[0]
    with pytest.raises(JobError, match="not the next unit of this job, which is running"):
        engine.run(order[1])
    engine.run(order[0])
    assert engine.next_unit() is order[1]
    engine.pause()
    with pytest.raises(JobError, match="which is paused"):
        engine.run(order[1])


def test_state_says_what_there_is_and_why_it_stopped() -> None:
    """Steps, tokens and window while running; a reason when paused; an end when finished."""
    engine = tiny_engine(tiny_peft(), tiny_feed(), recipe(2), window_layers=3)
    state = engine.state
    assert (state.status, state.reason, state.step, state.max_steps, state.loss) == ("running", None, 0, 2, None)
    assert (state.window_layers, state.layers) == (3, LAYERS)
    unit = engine.next_unit()
    assert unit is not None
    assert engine.unit_tokens(unit) == engine.feed.batch(0).micro_batches[0].ids.numel()
    assert engine.unit_tokens(engine.cursor.order.units[-1]) == 0
    run_step(engine)
    assert engine.state.tokens == engine.feed.batch(0).tokens
    engine.pause("memory is needed")
    assert (engine.state.status, engine.state.reason) == ("paused", "memory is needed")
    engine.resume()
    run_all(engine)
    assert (engine.state.status, engine.state.step) == ("finished", 2)
    assert engine.next_unit() is None


def test_every_sample_is_trained_once_an_epoch() -> None:
    """Three epochs with a smaller last batch: each sample once in each, in another order."""
    feed = tiny_feed(7, 40)
    seen = Collected()
    run_all(tiny_engine(tiny_peft(), feed, recipe(3 * feed.steps_per_epoch), on_step=seen))
    trained = [report.samples for report in seen.reports]
    epochs = [sum(trained[first : first + 4], ()) for first in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len(set(epochs)) == 3


def test_a_loss_that_is_no_number_stops_the_job() -> None:
    """The job fails with the step and the value, and neither that step nor a later one changes a parameter."""
    seen = Collected()
    engine = tiny_engine(tiny_peft(), tiny_feed(), recipe(6), on_step=seen)
    run_step(engine)
    before = {name: tensor.clone() for name, tensor in engine.states.tensors().items()}
    engine.model.norm.module.weight.data[0] = float("nan")
    while (unit := engine.next_unit()) is not None:
        engine.run(unit)
    assert engine.state.status == "failed"
    assert engine.state.reason == "step 2: the loss is nan; no parameter was changed by that step or after it"
    assert len(seen.reports) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.states.tensors().items())
    with pytest.raises(JobError, match="cannot go on: step 2: the loss is nan"):
        engine.resume()


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}])
def test_the_adapter_loads_into_plain_peft(tmp_path: Path, lora: dict[str, Any]) -> None:
    """`PeftModel.from_pretrained` on an untouched base changes the output exactly as the trained model in memory does."""
    model = tiny_peft(base={"tie_word_embeddings": False}, **lora)
    engine = tiny_engine(model, tiny_feed(), recipe())
    run_all(engine)
    write_adapter(tmp_path / "adapter", model, engine.states.masters())
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = tiny_base(tie_word_embeddings=False)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        without = base(ids).logits
        loaded = (
            peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False).eval()(ids).logits
        )
        in_memory = model.eval()(ids).logits
    assert torch.equal(loaded, in_memory)
    assert float((loaded - without).norm() / without.norm()) > 1e-3
