"""What a serving loop writes down: steps of each batch under a plan, requests, and the verdict on steps over target."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from backends.cuda.serving.beside_units import BesideUnits
from backends.cuda.serving.served_request import Served
from harli_core.loop import DecisionLoop
from harli_core.predict.predictor import StepPredictor
from harli_core.records import RequestBook, StepBook
from harli_core.types import StepPlan, StepResult, StepView


@dataclass(slots=True)
class HeldPlan:
    """A plan in force, and what is left of its hold.

    ``predicted_ms`` is for its first step alone, of which ``elapsed_ms`` had passed when the policy was asked.
    """

    plan: StepPlan
    steps_left: int
    finetune_sms: int
    turn_budget_ms: float
    predicted_ms: float | None
    elapsed_ms: float


@dataclass(slots=True)
class Span:
    """Steps of one batch under a plan: what was true before the first, and what they have taken so far."""

    held: HeldPlan
    step: int
    batch: int
    kv_tokens: int
    waiting: int
    rows_kv: int
    rows_lent: int
    unlendable_bytes: int
    start_s: float
    window_layers: int
    finetune_tokens: float
    joined: int = 0
    latency_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    turn_ms: list[float] = field(default_factory=list)
    join_gap_ms: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps so far."""
        return len(self.latency_ms)

    @property
    def kv_tokens_now(self) -> int:
        """Tokens that the batch holds before the next step."""
        return self.kv_tokens + self.batch * self.steps


class Recorder:
    """Books of one instance."""

    def __init__(
        self,
        instance: int,
        loop: DecisionLoop,
        requests: RequestBook,
        steps: StepBook,
        predictor: StepPredictor,
        qos_ms: float,
        beside: BesideUnits | None = None,
    ) -> None:
        """``predictor`` says what decode alone would have taken, ``beside`` what units took beside it (`None`: no job)."""
        self.instance = instance
        self.requests = requests
        self.book = steps
        self._loop = loop
        self._predictor = predictor
        self._qos_ms = qos_ms
        self._beside = beside

    def step(self, span: Span, latency_ms: float, decode_ms: float, turn_ms: float, *, finetuned: bool) -> None:
        """One more step of ``span``; ``finetuned``: units ran in it."""
        kv_tokens = span.kv_tokens_now
        span.latency_ms.append(latency_ms)
        span.decode_ms.append(decode_ms)
        span.turn_ms.append(turn_ms)
        if latency_ms <= self._qos_ms:
            return
        alone_ms = self._predictor.predict(span.batch, kv_tokens).whole_chip_ms
        if not finetuned or alone_ms > self._qos_ms:
            self.book.solo_violations += 1
        else:
            self.book.finetune_violations += 1

    def settle(self, span: Span) -> None:
        """The span is over: its steps go to the book, its result to the policy."""
        if not span.steps:
            return
        held = span.held
        predicted_ms, held.predicted_ms = held.predicted_ms, None
        columns: tuple[Any, ...] = (
            self.instance, span.step, span.batch, span.joined, span.kv_tokens, span.waiting, held.plan.decode_sms,
            held.finetune_sms, span.rows_kv, span.rows_lent, span.window_layers, span.unlendable_bytes, span.start_s,
            held.turn_budget_ms, predicted_ms if predicted_ms is not None else math.nan, span.finetune_tokens,
        )  # fmt: skip
        self.book.add(columns, span.latency_ms, span.decode_ms, span.turn_ms, span.join_gap_ms)
        parts = (tuple(span.latency_ms), tuple(span.decode_ms), tuple(span.turn_ms))
        unit_ratio = self._beside.ratio(held.finetune_sms) if self._beside is not None else None
        self._loop.settle(
            StepResult(self.instance, span.step, span.batch, span.kv_tokens, *parts, unit_ratio=unit_ratio)
        )

    def idle(self, view: StepView, duration_ms: float, finetune_sms: int) -> None:
        """A time without requests is over."""
        if self._beside is not None:
            self._beside.skip()
        self.book.idle_s += duration_ms / 1e3
        self.book.idle_finetune_sm_s += finetune_sms * duration_ms / 1e3
        self._loop.settle(StepResult(self.instance, view.step, 0, 0, (), (), (), duration_ms / 1e3))

    def first_token(self, served: Served, time_s: float) -> None:
        """The request's first token came at ``time_s``."""
        self.requests.first_token_s[served.index] = time_s
        self.requests.instance[served.index] = self.instance

    def produced(self, served: Served) -> None:
        """Note the tokens that the request has so far."""
        self.requests.produced_tokens[served.index] = served.emitted
        self.requests.preemptions[served.index] = served.preemptions
