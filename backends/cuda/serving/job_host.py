"""Puts a finetuning job beside a decoder: lends it rows, builds its engine in them."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from backends.cuda.serving.decoder import Decoder
from backends.cuda.serving.hosted_job import Job
from backends.cuda.serving.job_memory import JobMemory, needs_of
from backends.cuda.serving.job_source import JobSource, layer_bytes
from backends.cuda.serving.partitions import Partitions
from backends.cuda.serving.random_job import served_weights
from backends.cuda.serving.timeline import Timeline
from backends.cuda.serving.unit_pump import UnitPump
from harli_core.errors import JobError
from harli_core.types import UnitKind


def host_job(
    source: JobSource,
    decoder: Decoder,
    partitions: Partitions,
    timeline: Timeline,
    unit_ms: Callable[[UnitKind, int, int], float],
) -> Job:
    """Lend as many rows as half of the pool allows, and build the engine.

    Raises `JobError` or `OutOfMemoryError`, or whatever the job's own code raises; then no row stays lent.
    """
    geometry = decoder.memory.allocator.geometry
    layers = int(source.peft_model.config.num_hidden_layers)
    needs = needs_of(layer_bytes(source), layers, geometry)
    if needs.rows_floor >= geometry.rows:
        raise JobError(
            f"finetuning needs {needs.rows_floor} rows of {geometry.row_bytes >> 20} MiB, the pool has "
            f"{geometry.rows}; raise --memory-gb"
        )
    memory = JobMemory(decoder, needs, _scrub_stream(decoder))
    try:
        with _on(decoder.stream):
            memory.grow(needs.rows_wanted if needs.rows_wanted < geometry.rows // 2 else needs.rows_floor)
        held = memory.rows_held * geometry.row_blocks // needs.layer_blocks if needs.layer_blocks else layers
        window = min(layers, max(min(2, layers), held))
        shared = served_weights(decoder.scheduler, source.peft_model.config) if source.shared else None
        engine = source.start(None if source.shared else window, None if source.shared else memory.slot, shared)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # slots in lent rows may live in there, and in cycles
        gc.collect()
        memory.release(timeline.now_ms(), lambda: None)
        while memory.under_way:
            memory.poll(timeline.now_ms())
        raise
    memory.attach(engine)
    pump = UnitPump(engine, partitions, timeline, unit_ms)
    return Job("job-0", pump, memory, source.unit_tokens, engine, source.output_dir)


def _on(stream: Any) -> Any:
    """Rows change hands in the order of the decoder's stream; on a CPU there is none."""
    if stream is None:
        return nullcontext()
    import torch

    return torch.cuda.stream(stream)


def _scrub_stream(decoder: Decoder) -> int:
    if not decoder.memory.on_gpu:
        return 0
    import torch

    stream: int = torch.cuda.Stream().cuda_stream
    return stream
