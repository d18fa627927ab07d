"""One optimizer step under way: what its units do, and what lives from one of them to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from backends.cuda.finetune import layer_pass
from backends.cuda.finetune.activations import Activations
from backends.cuda.finetune.dropout import EMBEDDING, HEAD, seeded, unit_seed
from backends.cuda.finetune.layer_runner import LayerRunner, Place
from backends.cuda.finetune.layer_weights import LayerWeights
from backends.cuda.finetune.lora_states import LoraStates
from backends.cuda.finetune.loss import chunked_loss
from backends.cuda.finetune.micro_batch import OptimizerBatch
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.submodel import CutModel
from harli_core.units import Unit


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """How the work is cut, which changes when things happen and what memory they take, but no gradient.

    ``recompute``: ``layer`` computes a layer's activations again in its backward unit, ``none`` keeps them (as long as
    the layer stays resident). ``group`` micro-batches have activations at once (`None`: all of a step).
    """

    recompute: Literal["layer", "none"] = "layer"
    group: int | None = None
    head_parts: int = 1
    loss_chunk_tokens: int = 512


@dataclass(frozen=True, slots=True)
class StepParts:
    """What every step of a job works with."""

    model: CutModel
    states: LoraStates
    weights: LayerWeights
    runner: LayerRunner
    recipe: Recipe
    settings: UnitSettings
    device: Any


class OptimizerStep:
    """Runs units on the current stream; the engine sees to their order and to the streams.

    ``walk_read`` is the walk position whose frozen layer the last unit read, `None` if it read none. ``bad`` (1 or 0, on
    the device) says whether this step or an earlier one came to something that is no number.
    """

    def __init__(self, parts: StepParts, step: int, batch: OptimizerBatch, bad: Any) -> None:
        """Nothing has run of step ``step`` (the first one is 0)."""
        import torch

        self._torch = torch
        self.parts, self.step, self.batch, self.bad = parts, step, batch, bad
        self.activations = Activations(parts.device)
        self.loss = torch.zeros((), dtype=parts.states.wide, device=parts.device)
        self.norm: Any = None
        self.walk_read: int | None = None
        self._scale: Any = None

    def run(self, unit: Unit, stream: Any, host_ms: float | None = None) -> None:
        """Do the work of ``unit``; ``host_ms``: see `FinetuneWork.run`."""
        self.walk_read = None
        if not self.activations.loaded:
            self.activations.load(self.batch, self.parts.model.rotary, self.parts.states.dtype)
        if unit.kind == "forward":
            self._forward(unit, self._place(unit, stream, host_ms))
        elif unit.kind == "backward":
            self._backward(unit, stream, host_ms)
        elif unit.kind == "head_loss":
            self._head_loss(unit, stream)
        else:
            self._optimizer(unit)

    def _place(self, unit: Unit, stream: Any, host_ms: float | None) -> Place:
        assert unit.layer is not None
        assert unit.micro_batch is not None
        slot = self.parts.weights.use(unit.walk, stream)
        self.walk_read = unit.walk
        return Place(unit.layer, slot, stream, self._seed(unit.layer, unit.micro_batch), host_ms)

    def _seed(self, submodel: int, micro_batch: int, part: int = 0) -> int | None:
        piece = {EMBEDDING: self.parts.model.embedding, HEAD: self.parts.model.head}.get(submodel)
        if not (piece or self.parts.model.layers[submodel]).draws:
            return None
        return unit_seed(self.parts.recipe.seed, self.step, micro_batch, submodel, part)

    def _forward(self, unit: Unit, place: Place) -> None:
        layer, index, kept = unit.layer, unit.micro_batch, self.activations
        assert layer is not None
        assert index is not None
        if layer == 0:
            with seeded(self._seed(EMBEDDING, index), self.parts.device), self._torch.no_grad():
                kept.put(0, index, self.parts.model.embedding.module(kept.ids(index)))
        hidden, inputs = kept.input(layer, index), kept.inputs(index)
        if self.parts.settings.recompute == "none" and layer >= self.parts.model.first_trained:
            with seeded(place.seed, self.parts.device):
                leaf, output = layer_pass.forward_kept(self.parts.model.layers[layer].module, hidden, inputs)
            kept.keep(layer, index, leaf, output)
            output = output.detach()
        else:
            output = self.parts.runner.forward(place, hidden, inputs)
        if layer < self.parts.model.first_trained:
            self._drop(layer, index)
        kept.put(layer + 1, index, output)

    def _head_loss(self, unit: Unit, stream: Any) -> None:
        index, kept = unit.micro_batch, self.activations
        assert index is not None
        layers, parts = len(self.parts.model.layers), self.parts.settings.head_parts
        hidden = kept.input(layers, index)
        if unit.part == 0:
            kept.put_gradient(index, self._torch.zeros_like(hidden))
        trained, targets = kept.targets(index)
        first, end = (len(trained) * part // parts for part in (unit.part, unit.part + 1))
        rows = trained[first:end]
        state = self.parts.states.head
        width = hidden.shape[-1]
        with self.parts.runner.working_memory(stream), seeded(self._seed(HEAD, index, unit.part), self.parts.device):
            loss, by_rows, gradients = chunked_loss(
                self.parts.model.project,
                hidden.view(-1, width).index_select(0, rows),
                targets[first:end],
                max(1, self.batch.trained_tokens),
                self.parts.settings.loss_chunk_tokens,
                [] if state is None else state.parameters,
            )
            self.loss += loss
            if state is not None:
                state.add(gradients)
            kept.gradient(index).view(-1, width).index_copy_(0, rows, by_rows)
            del loss, by_rows, gradients
        if unit.part + 1 == parts:
            self._drop(layers, index)

    def _backward(self, unit: Unit, stream: Any, host_ms: float | None) -> None:
        layer, index, kept = unit.layer, unit.micro_batch, self.activations
        assert layer is not None
        assert index is not None
        model = self.parts.model
        if layer < model.first_trained:
            return
        place = self._place(unit, stream, host_ms)
        by_input = layer > model.first_trained
        pair, state = kept.take_kept(layer, index), self.parts.states.layers[layer]
        if pair is not None:
            parameters = [] if state is None else state.parameters
            by_hidden, gradients = layer_pass.backward_kept(*pair, kept.gradient(index), parameters, by_input=by_input)
            if state is not None:
                state.add(gradients)
        else:
            hidden, by_output = kept.input(layer, index), kept.gradient(index)
            by_hidden = self.parts.runner.backward(place, hidden, by_output, kept.inputs(index), by_input=by_input)
        self._drop(layer, index)
        if layer == 0 and self.parts.states.embedding is not None:
            with seeded(self._seed(EMBEDDING, index), self.parts.device), self._torch.enable_grad():
                embedded = model.embedding.module(kept.ids(index))
                state = self.parts.states.embedding
                state.add(list(self._torch.autograd.grad(embedded, state.parameters, by_hidden)))
        kept.put_gradient(index, by_hidden)

    def _drop(self, layer: int, index: int) -> None:
        """The input of ``layer`` was read for the last time; where layers keep more than that, others may refer to it."""
        hidden = self.activations.drop(layer, index)
        if layer and hidden is not None and self.parts.settings.recompute == "layer":
            self.parts.runner.reuse(hidden)

    def _optimizer(self, unit: Unit) -> None:
        if unit.layer == 0:
            self.norm = self.parts.states.gradient_norm()
            self.bad = self._torch.maximum(self.bad, 1.0 - self._torch.isfinite(self.loss + self.norm).float())
            limit = self.parts.recipe.max_grad_norm
            self._scale = None if limit is None else (limit / (self.norm + 1e-6)).clamp(max=1.0)
        rate = self.parts.recipe.rate_at(self.step)
        self.parts.states.update(unit.layer, rate, self._scale, self.bad)
