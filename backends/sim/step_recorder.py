"""What an instance writes down about its steps, and its verdict on those over target."""

from __future__ import annotations

import math
from collections.abc import Sequence

from backends.sim.device_model import DeviceModel
from backends.sim.finetune_job import FinetuneJob
from backends.sim.job_memory import JobMemory
from backends.sim.request import SimRequest
from backends.sim.step_layout import Span, StepLayout
from harli_core.records import StepBook


class StepRecorder:
    """Adds the steps of one instance to the run's book."""

    def __init__(
        self,
        index: int,
        device: DeviceModel,
        job: FinetuneJob | None,
        memory: JobMemory | None,
        book: StepBook,
        qos_ms: float,
    ) -> None:
        """``qos_ms`` is the target that violations are judged by."""
        self._index = index
        self._device = device
        self._job = job
        self._memory = memory
        self._book = book
        self._qos_ms = qos_ms

    def record(self, span: Span, layout: StepLayout, joined: Sequence[SimRequest]) -> None:
        """Keep the steps of ``layout`` (at least one); ``joined`` requests decode in them for the first time here."""
        held = span.held
        plan, split = held.plan, held.split
        first_ms = layout.ends_ms[0]
        gaps_ms = [first_ms - request.last_token_ms for request in joined if request.last_token_ms is not None]
        columns = (
            self._index,
            span.step,
            span.batch,
            len(joined),
            span.kv_tokens,
            span.waiting,
            plan.decode_sms,
            split.finetune_sms if split is not None else 0,
            span.rows_kv,
            span.rows_lent,
            self._memory.resident_layers if self._memory is not None else 0,
            span.unlendable_bytes,
            (span.start_ms - span.elapsed_ms) / 1000.0,
            held.turn.budget_ms if held.turn is not None else 0.0,
            plan.predicted_ms if held.fresh and plan.predicted_ms is not None else math.nan,
            self._job.progress_tokens if self._job is not None else 0.0,
        )
        turn_ms = None if held.turn is None and not span.turned_ms else layout.turn_ms
        self._book.add(columns, layout.latency_ms, layout.decode_ms, turn_ms, gaps_ms)
        self._device.count_steps(span.point, span.kv_tokens, len(layout.ends_ms))
        if max(layout.latency_ms) > self._qos_ms:
            self._judge(span, layout.latency_ms)

    def record_idle(self, duration_ms: float, finetune_sms: int) -> None:
        """Keep a time without requests."""
        self._book.idle_s += duration_ms / 1000.0
        self._book.idle_finetune_sm_s += finetune_sms * duration_ms / 1000.0

    def _judge(self, span: Span, latency_ms: Sequence[float]) -> None:
        """Split violations into those that decode alone would have had and those that finetuning caused."""
        for index, ms in enumerate(latency_ms):
            if ms <= self._qos_ms:
                continue
            kv_tokens = span.kv_tokens + index * span.batch
            alone_ms = self._device.alone_ms(self._index, span.step + index, span.batch, kv_tokens)
            if self._job is None or alone_ms > self._qos_ms:
                self._book.solo_violations += 1
            else:
                self._book.finetune_violations += 1
