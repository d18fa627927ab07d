"""Where the time of an optimizer step goes, kind of work by kind of work, in units and in the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import torch

from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.layer_graphs import Stage
from backends.cuda.finetune.layer_pass import AttentionInputs
from backends.cuda.finetune.micro_batch import OptimizerBatch
from benchmarks.finetune.products import Products
from benchmarks.finetune.random_model import PlainLoop

PARTS = ("embedding", "forward", "head_loss", "backward", "optimizer", "other")
COPIES_TIMED = 50


class Marks:
    """Points in time on one stream; the time between two of them belongs to the part that the later one names.

    So the parts of a step add up to the step, gaps between kernels included. On the CPU a mark is the clock's time.
    """

    def __init__(self, stream: Any) -> None:
        """``stream`` is `None` on the CPU."""
        self.stream = stream
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """``part`` ends here."""
        if self.stream is None:
            self._marks.append((part, perf_counter() * 1e3))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        self._marks.append((part, event))

    def take(self) -> dict[str, list[float]]:
        """Times in ms by part since the first mark, the device waited for; forgets them."""
        if self.stream is not None:
            self.stream.synchronize()
        found: dict[str, list[float]] = {part: [] for part in PARTS}
        for (_, begin), (part, end) in zip(self._marks, self._marks[1:], strict=False):
            found[part].append(float(end - begin if self.stream is None else begin.elapsed_time(end)))
        self._marks.clear()
        return found


@contextmanager
def plain_hooks(model: Any, marks: Marks) -> Iterator[Callable[[], None]]:
    """Marks at the boundaries of layers, forward and back, in a plain loop with checkpointing; yields what a loss calls.

    A layer's backward part is from the gradient by its output to that by its input, its recomputation included.
    """
    inner = model.get_base_model().model
    forward = [True]  # checkpointing calls the layers again in the backward pass

    def begin(*_: Any) -> None:
        forward[0] = True
        marks.mark("other")

    def before(part: str, backward: str) -> Callable[..., None]:
        def hook(_: Any, arguments: Any) -> None:
            if forward[0]:
                marks.mark(part)
                arguments[0].register_hook(lambda _: marks.mark(backward))

        return hook

    hooks = [inner.embed_tokens.register_forward_pre_hook(begin)]
    hooks.append(inner.embed_tokens.register_forward_hook(lambda *_: marks.mark("embedding")))
    for index, layer in enumerate(inner.layers):
        hooks.append(layer.register_forward_pre_hook(before("forward" if index else "other", "backward")))
    hooks.append(inner.norm.register_forward_pre_hook(before("forward", "head_loss")))

    def after_loss() -> None:
        forward[0] = False
        marks.mark("head_loss")

    try:
        yield after_loss
    finally:
        for hook in hooks:
            hook.remove()


def plain_breakdown(
    loop: PlainLoop, batch: Callable[[int], OptimizerBatch], steps: int, warm_up: int
) -> dict[str, Any]:
    """Times of the plain loop on the current stream."""
    device = loop.trained[0].device
    marks = Marks(torch.cuda.current_stream(device) if device.type == "cuda" else None)
    with plain_hooks(loop.model, marks) as after_loss:

        def step(number: int) -> None:
            marks.mark("other")
            loop.step(batch(number), after_loss=after_loss, after_backward=lambda: marks.mark("other"))
            marks.mark("optimizer")

        return _figures(step, marks, steps, warm_up)


def unit_breakdown(
    engine: FinetuneEngine, step_of: Callable[[Callable[[str], None]], None], stream: Any, steps: int, warm_up: int
) -> dict[str, Any]:
    """Times of units; ``step_of(mark)`` runs one optimizer step and calls ``mark`` with the kind of each unit after it."""
    marks = Marks(stream)
    embedding = engine.model.embedding.module
    hooks = [
        embedding.register_forward_pre_hook(lambda *_: marks.mark("other")),
        embedding.register_forward_hook(lambda *_: marks.mark("embedding")),
    ]

    def step(_: int) -> None:
        marks.mark("other")
        step_of(marks.mark)

    try:
        return _figures(step, marks, steps, warm_up)
    finally:
        for hook in hooks:
            hook.remove()


def products_tflop(step: Callable[[], object]) -> float:
    """Arithmetic of the matrix products of ``step``, which must not replay graphs."""
    with torch.autograd.set_multithreading_enabled(False), Products() as counted:
        step()
    return int(counted.flops) / 1e12


def _figures(step: Callable[[int], None], marks: Marks, steps: int, warm_up: int) -> dict[str, Any]:
    """Mean ms of a step by part, and the median of single pieces of a part; the first mark of a step starts the clock."""
    total: dict[str, list[float]] = {part: [] for part in PARTS}
    pieces: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(warm_up + steps):
        step(number)
        found = marks.take()
        if number >= warm_up:
            for part, times in found.items():
                total[part].append(sum(times))
                pieces[part] += times
    by_part = {part: float(np.median(times)) for part, times in total.items()}
    return {
        "step_ms": float(np.median([sum(times) for times in zip(*total.values(), strict=True)])),
        "part_ms_a_step": by_part,
        "piece_ms": {part: float(np.median(times)) for part, times in pieces.items() if times},
        "pieces_a_step": {part: len(times) // steps for part, times in pieces.items()},
    }


def stage_copy_ms(engine: FinetuneEngine, rows: int, length: int, stream: Any) -> dict[str, float]:
    """What filling and emptying the stage of captured units takes, for one forward and one backward unit.

    The same copies as `layer_graphs` makes, two of them inside the graphs there: input in, output out twice; input and
    gradient in, gradient out twice, LoRA gradients added.
    """
    model, device = engine.model, engine.device
    hidden = torch.randn(rows, length, model.config.hidden_size, device=device).to(engine.states.dtype)
    inputs = AttentionInputs.of(model.rotary, hidden, torch.arange(length, device=device)[None], None)
    state = engine.states.layers[-1]
    stage = Stage(hidden, inputs, state)

    def forward() -> None:
        stage.fill(hidden, None, inputs, state)
        stage.output.copy_(hidden)
        stage.output.clone()

    def backward() -> None:
        stage.fill(hidden, hidden, inputs, state)
        stage.by_hidden.copy_(hidden)
        stage.by_hidden.clone()
        if state is not None:
            state.gradient.add_(stage.gradient)

    found = {}
    for kind, work in (("forward", forward), ("backward", backward)):
        marks = Marks(stream)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # nothing where it is None
            work()
            for _ in range(COPIES_TIMED):
                marks.mark("other")
                work()
                marks.mark(kind)
        found[kind] = float(np.median(marks.take()[kind]))
    if state is not None:
        state.gradient.zero_()
    return found


def against_plain(units: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds a step that units take longer (negative: less) by part, and the ratio of the steps."""
    ours, theirs = units["part_ms_a_step"], plain["part_ms_a_step"]
    return {
        "more_ms_a_step": {part: ours[part] - theirs[part] for part in PARTS},
        "speed_over_plain": plain["step_ms"] / units["step_ms"],
    }
