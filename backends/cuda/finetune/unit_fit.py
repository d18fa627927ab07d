"""How much work a unit may be: the longest micro-batch, and the parts of head + loss, that keep to ``unit_ms``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.feed import SampleFeed
from backends.cuda.finetune.layer_pass import AttentionInputs
from backends.cuda.finetune.layer_runner import Place
from backends.cuda.finetune.loss import chunked_loss

SAFETY = 0.9
"""Share of ``unit_ms`` that a unit may take when measured alone; beside decode it takes longer."""
REPEATS = 3
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class UnitFit:
    """Micro-batches of ``rows`` full-length samples and head + loss in ``head_parts``, with what was measured for them."""

    rows: int
    length: int
    head_parts: int
    layer_ms: float
    head_ms: float
    unit_ms: float

    @property
    def micro_batch_tokens(self) -> int:
        """Padded tokens of a micro-batch."""
        return self.rows * self.length

    @property
    def kept(self) -> bool:
        """Whether the longest unit keeps to ``unit_ms``; a sequence cannot be cut, so a long one may not."""
        return self.layer_ms <= self.unit_ms

    @classmethod
    def of(
        cls, unit_ms: float, length: int, layer_ms: Callable[[int], float], head_ms: Callable[[int], float]
    ) -> UnitFit:
        """Choose from measurements: ``layer_ms(rows)`` of the longest layer unit, ``head_ms(tokens)`` of head + loss."""
        limit = unit_ms * SAFETY
        rows, longest = 1, layer_ms(1)
        for more in ROWS[1:]:
            if longest > limit or longest * more / rows > 1.5 * limit:
                break
            measured = layer_ms(more)
            if measured > limit:
                break
            rows, longest = more, measured
        whole = head_ms(rows * length)
        return cls(rows, length, max(1, math.ceil(whole / limit)), longest, whole, unit_ms)


def fit_units(engine: FinetuneEngine, feed: SampleFeed, unit_ms: float, length: int, stream: Any = None) -> UnitFit:
    """Measure on ``stream`` before the first step, and cut the job's work accordingly; waits for the device."""
    import torch

    model, device = engine.model, engine.device
    width = model.config.hidden_size
    vocabulary = model.config.vocab_size
    like = torch.empty(0, dtype=engine.states.dtype, device=device)
    middle = len(model.layers) - 1
    if device.type == "cuda":
        stream = stream or torch.cuda.current_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))

    def layer_ms(rows: int) -> float:
        positions = torch.arange(length, device=device)[None]
        inputs = AttentionInputs.of(model.rotary, like, positions, None)
        hidden = torch.randn(rows, length, width, device=device).to(like.dtype)
        place = Place(middle, engine.weights.use(middle, stream), stream, None)
        try:
            return _ms(lambda: engine.runner.backward(place, hidden, hidden, inputs, by_input=True), device, stream)
        finally:
            for state in engine.states.all:
                state.gradient.zero_()

    def head_ms(tokens: int) -> float:
        hidden = torch.randn(tokens, width, device=device).to(like.dtype)
        targets = torch.arange(tokens, device=device) % vocabulary
        chunk = engine.settings.loss_chunk_tokens
        return _ms(lambda: chunked_loss(model.project, hidden, targets, tokens, chunk, []), device, stream)

    fit = UnitFit.of(unit_ms, length, layer_ms, head_ms)
    feed.micro_batch_tokens = fit.micro_batch_tokens
    engine.recut(replace(engine.settings, head_parts=fit.head_parts))
    return fit


def _ms(work: Callable[[], object], device: Any, stream: Any) -> float:
    """Fastest of a few runs, after two that warm up and capture."""
    import torch

    if device.type != "cuda":
        times = []
        for _ in range(REPEATS):
            begin_s = perf_counter()
            work()
            times.append((perf_counter() - begin_s) * 1e3)
        return min(times)
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        work()
        work()
        marks = []
        for _ in range(REPEATS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            work()
            end.record(stream)
            marks.append((begin, end))
        stream.synchronize()
    return min(float(begin.elapsed_time(end)) for begin, end in marks)
