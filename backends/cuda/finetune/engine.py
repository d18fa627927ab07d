"""The finetuning engine: a PEFT model trained unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backends.cuda.finetune.checkpoint import CheckpointWriter
from backends.cuda.finetune.feed import BatchFeed
from backends.cuda.finetune.layer_runner import EagerRunner, LayerRunner
from backends.cuda.finetune.layer_weights import LayerWeights
from backends.cuda.finetune.lora_states import LoraStates
from backends.cuda.finetune.optimizer_step import OptimizerStep, StepParts, UnitSettings
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.step_report import Reports, StepReport
from backends.cuda.finetune.submodel import CutModel
from backends.cuda.finetune.work import JobState, Status
from harli_core.errors import JobError
from harli_core.units import Unit, UnitCursor, UnitOrder


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
        """Begin at step 0; `resume_at` goes on elsewhere."""
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
        self._begin(0, 0)
        self._mark()

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
        rows, length = self._step.batch.micro_batches[unit.micro_batch].shape
        return rows * length

    def ready(self) -> bool:
        """See `FinetuneWork`."""
        return self.weights.ready(self.cursor.unit.walk)

    def copy_layers(self) -> None:
        """See `FinetuneWork`."""
        self.weights.feed()

    def run(self, unit: Unit, stream: Any = None, host_ms: float | None = None) -> None:
        """See `FinetuneWork`."""
        if unit is not self.cursor.unit or self._status != "running":
            raise JobError(
                f"{unit} is not the next unit of this job, which is {self._status}; ask next_unit() each time"
            )
        torch = self._torch
        if self.device.type != "cuda":
            self._run(unit, None, host_ms)
            self._settle()
            return
        stream = stream or torch.cuda.current_stream(self.device)
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
            if self._event is not None and stream != self._stream:
                stream.wait_event(self._event)
            self._stream = stream
            self._run(unit, stream, host_ms)

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
        self._step.activations.clear()

    # For whoever ends a job

    def save(self) -> int | None:
        """Begin a checkpoint of the last complete step, and return that step; `close` waits for it.

        An update under way is finished first, so that what is saved is one step's. `None`: no step is complete, the job
        failed, or it keeps no checkpoints.
        """
        while (unit := self.next_unit()) is not None and unit.kind == "optimizer":
            self.run(unit, self._stream)
        step = self.cursor.steps
        if self.checkpoints is None or self._status == "failed" or step == 0:
            return None
        if self.checkpoints.newest_step != step:
            if self.device.type != "cuda":
                self.checkpoints.begin(step, self.tokens, self._bad, self.states.tensors())
            else:
                with self._torch.cuda.stream(self._stream):
                    self.checkpoints.begin(step, self.tokens, self._bad, self.states.tensors())
        return step

    def give_up_window(self) -> None:
        """Let go of the frozen weights, in stream order; no unit can run after it."""
        if self._status == "running":
            self._status, self._reason = "paused", "its memory was taken"
        self._step.activations.clear()
        self.weights.release()

    # For whoever starts a job

    def resume_at(self, step: int, tokens: int) -> None:
        """Go on after ``step`` complete steps; the states are those of a checkpoint taken there."""
        self._begin(step, tokens)
        self._mark()
        if step >= self.recipe.max_steps:
            self._status, self._reason = "finished", None

    def recut(self, settings: UnitSettings) -> None:
        """Cut the work another way; only between optimizer steps, and after the feed was told what it needs to know."""
        if self.cursor.index != 0 or self._step.activations.loaded:
            raise JobError("units can be cut anew only between two optimizer steps")
        self.settings = settings
        self._orders.clear()
        self._begin(self.cursor.steps, self.tokens)
        self._mark()

    def forget_kept(self, layer: int) -> None:
        """``layer`` is about to leave: what was kept of its forward pass refers to its weights, and is computed again."""
        self._step.activations.forget_kept(layer)

    @property
    def loss_so_far(self) -> Any:
        """Loss of the step under way, as far as its head units have run; on the device."""
        return self._step.loss

    # Units

    def _begin(self, step: int, tokens: int) -> None:
        self.tokens = tokens
        over = step >= self.recipe.max_steps
        batch = self.feed.batch(0 if over else step)
        parts = StepParts(self.model, self.states, self.weights, self.runner, self.recipe, self.settings, self.device)
        self.cursor = UnitCursor(self._order(len(batch.micro_batches)), 0, step)
        self._step = OptimizerStep(parts, step, batch, self._bad)

    def _mark(self) -> None:
        """Units on other streams wait for what the current one was given until now."""
        if self.device.type == "cuda":
            self._stream = self._torch.cuda.current_stream(self.device)
            self._event = self._torch.cuda.Event()
            self._event.record(self._stream)

    def _order(self, micro_batches: int) -> UnitOrder:
        if micro_batches not in self._orders:
            layers, cut = len(self.model.layers), self.settings
            self._orders[micro_batches] = UnitOrder(
                layers,
                micro_batches,
                group=cut.group,
                head_parts=cut.head_parts,
                optimizer_layers=self.states.layers_together,
            )
        return self._orders[micro_batches]

    def _run(self, unit: Unit, stream: Any, host_ms: float | None) -> None:
        self._step.run(unit, stream, host_ms)
        if stream is not None:
            self._event = self._torch.cuda.Event()
            self._event.record(stream)
        if self._step.walk_read is not None:
            self.weights.used(self._step.walk_read, self._event)
        if self.cursor.index + 1 == len(self.cursor.order):
            self._end_step()
            return
        self.cursor.advance_to(self.cursor.index + 1)
        self.weights.prefetch(self.cursor.unit.walk)

    def _end_step(self) -> None:
        done = self._step
        self.tokens += done.batch.tokens
        self._bad = done.bad
        step = done.step + 1
        rate = self.recipe.rate_at(done.step)
        self.reports.send(done.loss, done.norm, step, rate, self.tokens, done.batch.samples)
        if self.checkpoints is not None and self.checkpoints.due(step, self.recipe.max_steps):
            self.checkpoints.begin(step, self.tokens, self._bad, self.states.tensors())
        if step == self.recipe.max_steps:
            self.cursor.advance_to(len(self.cursor.order))
            self._status, self._reason = "finished", None
            return
        self._begin(step, self.tokens)
        self._mark()

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
