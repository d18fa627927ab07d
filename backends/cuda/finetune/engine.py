"""The finetuning engine: a PEFT model trained unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from backends.cuda.finetune import layer_pass
from backends.cuda.finetune.activations import Activations
from backends.cuda.finetune.checkpoint import CheckpointWriter
from backends.cuda.finetune.dropout import EMBEDDING, HEAD, seeded, unit_seed
from backends.cuda.finetune.feed import BatchFeed
from backends.cuda.finetune.layer_runner import EagerRunner, LayerRunner, Place
from backends.cuda.finetune.layer_weights import LayerWeights
from backends.cuda.finetune.lora_states import LoraStates
from backends.cuda.finetune.loss import chunked_loss
from backends.cuda.finetune.micro_batch import OptimizerBatch
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.step_report import Reports, StepReport
from backends.cuda.finetune.submodel import CutModel
from backends.cuda.finetune.work import JobState, Status
from harli_core.errors import JobError
from harli_core.units import Unit, UnitCursor, UnitOrder


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """How the work is cut, which changes when things happen and what memory they take, but no gradient.

    ``recompute``: ``layer`` computes a layer's activations again in its backward unit, ``none`` keeps them (as long as
    the layer stays resident). ``group`` micro-batches have activations at once (`None`: all of a step).
    """

    recompute: Literal["layer", "none"] = "layer"
    group: int | None = None
    head_parts: int = 1
    loss_chunk_tokens: int = 1024


class FinetuneEngine:
    """Implements `FinetuneWork`; on the CPU every call is complete when it returns.

    Units run in the order of `harli_core.units`. Everything that a unit reads from an earlier one is ordered by events,
    so each unit may come on another stream.
    """

    def __init__(
        self,
        model: CutModel,
        states: LoraStates,
        weights: LayerWeights,
        feed: BatchFeed,
        recipe: Recipe,
        device: Any,
        settings: UnitSettings | None = None,
        *,
        runner: LayerRunner | None = None,
        checkpoints: CheckpointWriter | None = None,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        """Begin at step 0, or where ``checkpoints`` has the job (``checkpoints.restore`` was called before)."""
        import torch

        self._torch = torch
        self.model, self.states, self.weights, self.feed, self.recipe = model, states, weights, feed, recipe
        self.device = device
        self.settings = settings or UnitSettings()
        self.runner = runner or EagerRunner(model.layers, states.layers, device)
        self.checkpoints = checkpoints
        self.on_step = on_step
        self.tokens = 0
        self.loss: float | None = None
        self._status: Status = "running"
        self._reason: str | None = None
        self.reports = Reports(device)
        self._bad = torch.zeros((), dtype=torch.float32, device=device)
        self._orders: dict[int, UnitOrder] = {}
        self._stream: Any = None
        self._event: Any = None
        self._read_walk: int | None = None
        self._begin(0, 0)

    # What the loop asks for

    @property
    def state(self) -> JobState:
        """See `FinetuneWork`."""
        return JobState(
            self._status,
            self._reason,
            self.cursor.steps,
            self.recipe.max_steps,
            self.tokens,
            self.loss,
            self.weights.capacity,
            len(self.model.layers),
        )

    def next_unit(self) -> Unit | None:
        """See `FinetuneWork`."""
        self._settle()
        return self.cursor.unit if self._status == "running" else None

    def unit_tokens(self, unit: Unit) -> int:
        """See `FinetuneWork`."""
        if unit.micro_batch is None:
            return 0
        rows, length = self._current().micro_batches[unit.micro_batch].shape
        return rows * length

    def ready(self) -> bool:
        """See `FinetuneWork`."""
        return self.weights.ready(self.cursor.unit.walk)

    def run(self, unit: Unit, stream: Any = None) -> None:
        """See `FinetuneWork`."""
        if unit is not self.cursor.unit or self._status != "running":
            raise JobError(
                f"{unit} is not the next unit of this job, which is {self._status}; ask next_unit() each time"
            )
        torch = self._torch
        if self.device.type != "cuda":
            self._run(unit, None)
            self._settle()
            return
        stream = stream or torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
            if self._event is not None and stream != self._stream:
                stream.wait_event(self._event)
            self._stream = stream
            self._run(unit, stream)

    def pause(self, reason: str = "paused on request") -> None:
        """See `FinetuneWork`."""
        if self._status == "running":
            self._status, self._reason = "paused", reason

    def resume(self) -> None:
        """See `FinetuneWork`."""
        if self._status == "failed":
            raise JobError(f"the job failed and cannot go on: {self._reason}")
        if self._status == "paused":
            if self.checkpoints is not None:
                self.checkpoints.retry()
            over = self.cursor.steps >= self.recipe.max_steps
            self._status, self._reason = "finished" if over else "running", None

    def shrink_window(self, layers: int) -> int:
        """See `FinetuneWork`."""
        if layers < self.weights.capacity:
            self.weights.resize(layers, self.cursor.unit.walk)
        return self.weights.capacity

    def grow_window(self, layers: int) -> int:
        """See `FinetuneWork`."""
        if layers > self.weights.capacity:
            self.weights.resize(layers, self.cursor.unit.walk)
        return self.weights.capacity

    def close(self) -> None:
        """See `FinetuneWork`."""
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)
        self._settle(wait=True)
        if self.checkpoints is not None:
            self.checkpoints.finish()
            self._settle(wait=True)
        self.activations.clear()

    # For whoever starts a job

    def resume_at(self, step: int, tokens: int) -> None:
        """Go on after ``step`` complete steps; the states are those of a checkpoint taken there."""
        self._begin(step, tokens)
        if step >= self.recipe.max_steps:
            self._status, self._reason = "finished", None

    def recut(self, settings: UnitSettings) -> None:
        """Cut the work another way; only between optimizer steps, and after the feed was told what it needs to know."""
        if self.cursor.index != 0 or self.activations.loaded:
            raise JobError("units can be cut anew only between two optimizer steps")
        self.settings = settings
        self._orders.clear()
        self._begin(self.cursor.steps, self.tokens)

    def forget_kept(self, layer: int) -> None:
        """``layer`` is about to leave: what was kept of its forward pass refers to its weights, and is computed again."""
        self.activations.forget_kept(layer)

    @property
    def loss_so_far(self) -> Any:
        """Loss of the step under way, as far as its head units have run; on the device."""
        return self._loss

    # Units

    def _begin(self, step: int, tokens: int) -> None:
        self.tokens = tokens
        self.activations = Activations(self.device)
        self._batch: OptimizerBatch | None = None
        self._norm: Any = None
        self._scale: Any = None
        self._loss = self._torch.zeros((), dtype=self.states.wide, device=self.device)
        first = 0 if step >= self.recipe.max_steps else step
        self.cursor = UnitCursor(self._order(len(self.feed.batch(first).micro_batches)), 0, step)

    def _order(self, micro_batches: int) -> UnitOrder:
        if micro_batches not in self._orders:
            layers, cut = len(self.model.layers), self.settings
            self._orders[micro_batches] = UnitOrder(layers, micro_batches, group=cut.group, head_parts=cut.head_parts)
        return self._orders[micro_batches]

    def _current(self) -> OptimizerBatch:
        if self._batch is None:
            self._batch = self.feed.batch(self.cursor.steps)
        return self._batch

    def _run(self, unit: Unit, stream: Any) -> None:
        if not self.activations.loaded:
            self.activations.load(self._current(), self.model.rotary, self.states.dtype)
        if unit.kind == "forward":
            self._forward(unit, stream)
        elif unit.kind == "backward":
            self._backward(unit, stream)
        elif unit.kind == "head_loss":
            self._head_loss(unit)
        else:
            self._optimizer(unit)
        event = None
        if stream is not None:
            event = self._event = self._torch.cuda.Event()
            event.record(stream)
        if self._read_walk is not None:
            self.weights.used(self._read_walk, event)
            self._read_walk = None
        end = self.cursor.index + 1 == len(self.cursor.order)
        if end:
            self._end_step()
        else:
            self.cursor.advance_to(self.cursor.index + 1)
            self.weights.prefetch(self.cursor.unit.walk)

    def _place(self, unit: Unit, stream: Any) -> Place:
        assert unit.layer is not None
        assert unit.micro_batch is not None
        slot = self.weights.use(unit.walk, stream)
        self._read_walk = unit.walk
        return Place(unit.layer, slot, stream, self._seed(unit.layer, unit.micro_batch))

    def _seed(self, submodel: int, micro_batch: int, part: int = 0) -> int | None:
        piece = {EMBEDDING: self.model.embedding, HEAD: self.model.head}.get(submodel)
        if not (piece or self.model.layers[submodel]).draws:
            return None
        return unit_seed(self.recipe.seed, self.cursor.steps, micro_batch, submodel, part)

    def _forward(self, unit: Unit, stream: Any) -> None:
        layer, index, kept = unit.layer, unit.micro_batch, self.activations
        assert layer is not None
        assert index is not None
        place = self._place(unit, stream)
        if layer == 0:
            with seeded(self._seed(EMBEDDING, index), self.device), self._torch.no_grad():
                kept.put(0, index, self.model.embedding.module(kept.ids(index)))
        hidden, inputs = kept.input(layer, index), kept.inputs(index)
        if self.settings.recompute == "none" and layer >= self.model.first_trained:
            with seeded(place.seed, self.device):
                leaf, output = layer_pass.forward_kept(self.model.layers[layer].module, hidden, inputs)
            kept.keep(layer, index, leaf, output)
            output = output.detach()
        else:
            output = self.runner.forward(place, hidden, inputs)
        if layer < self.model.first_trained:
            kept.drop(layer, index)
        kept.put(layer + 1, index, output)

    def _head_loss(self, unit: Unit) -> None:
        index, kept = unit.micro_batch, self.activations
        assert index is not None
        layers, parts = len(self.model.layers), self.settings.head_parts
        hidden = kept.input(layers, index)
        if unit.part == 0:
            kept.put_gradient(index, self._torch.zeros_like(hidden))
        trained, targets = kept.targets(index)
        first, end = (len(trained) * part // parts for part in (unit.part, unit.part + 1))
        rows = trained[first:end]
        state = self.states.head
        width = hidden.shape[-1]
        with seeded(self._seed(HEAD, index, unit.part), self.device):
            loss, by_rows, gradients = chunked_loss(
                self.model.project,
                hidden.view(-1, width).index_select(0, rows),
                targets[first:end],
                max(1, self._current().trained_tokens),
                self.settings.loss_chunk_tokens,
                [] if state is None else state.parameters,
            )
        self._loss += loss
        if state is not None:
            state.add(gradients)
        kept.gradient(index).view(-1, width).index_copy_(0, rows, by_rows)
        if unit.part + 1 == parts:
            kept.drop(layers, index)

    def _backward(self, unit: Unit, stream: Any) -> None:
        layer, index, kept = unit.layer, unit.micro_batch, self.activations
        assert layer is not None
        assert index is not None
        model = self.model
        if layer < model.first_trained:
            return
        place = self._place(unit, stream)
        by_input = layer > model.first_trained
        pair, state = kept.take_kept(layer, index), self.states.layers[layer]
        if pair is not None:
            parameters = [] if state is None else state.parameters
            by_hidden, gradients = layer_pass.backward_kept(*pair, kept.gradient(index), parameters, by_input=by_input)
            if state is not None:
                state.add(gradients)
        else:
            hidden, by_output = kept.input(layer, index), kept.gradient(index)
            by_hidden = self.runner.backward(place, hidden, by_output, kept.inputs(index), by_input=by_input)
        kept.drop(layer, index)
        if layer == 0 and self.states.embedding is not None:
            with seeded(self._seed(EMBEDDING, index), self.device), self._torch.enable_grad():
                embedded = model.embedding.module(kept.ids(index))
                state = self.states.embedding
                state.add(list(self._torch.autograd.grad(embedded, state.parameters, by_hidden)))
        kept.put_gradient(index, by_hidden)

    def _optimizer(self, unit: Unit) -> None:
        if unit.layer == 0:
            self._norm = self.states.gradient_norm()
            self._bad = self._torch.maximum(self._bad, 1.0 - self._torch.isfinite(self._loss + self._norm).float())
            limit = self.recipe.max_grad_norm
            self._scale = None if limit is None else (limit / (self._norm + 1e-6)).clamp(max=1.0)
        rate = self.recipe.rate_at(self.cursor.steps)
        for state in self.states.updated_with(unit.layer):
            state.update(rate, self._scale, self._bad)

    def _end_step(self) -> None:
        batch = self._current()
        self.tokens += batch.tokens
        rate = self.recipe.rate_at(self.cursor.steps)
        step = self.cursor.steps + 1
        self.reports.send(self._loss, self._norm, step, rate, self.tokens, batch.samples)
        if self.checkpoints is not None and self.checkpoints.due(step, self.recipe.max_steps):
            self.checkpoints.begin(step, self.tokens, self._bad, self.states.tensors())
        if step == self.recipe.max_steps:
            self.cursor.advance_to(len(self.cursor.order))
            self._batch = None
            self._status, self._reason = "finished", None
            return
        self._begin(step, self.tokens)

    # Results on their way

    def _settle(self, *, wait: bool = False) -> None:
        for report in self.reports.arrived(wait=wait):
            if not report.sound:
                self._fail(report)
                break
            self.loss = report.loss
            if self.on_step is not None:
                self.on_step(report)
        if self.checkpoints is not None and self._status in ("running", "finished"):
            fault = self.checkpoints.fault()
            if fault is not None:
                self._status, self._reason = "paused", fault

    def _fail(self, report: StepReport) -> None:
        what = "loss" if report.loss != report.loss or abs(report.loss) == float("inf") else "gradient norm"
        value = report.loss if what == "loss" else report.grad_norm
        self._status = "failed"
        self._reason = f"step {report.step}: the {what} is {value}; no parameter was changed by that step or after it"
