"""What a serving loop writes down: steps under each plan, requests, and the verdict on steps over target."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from backends.cuda.serving.decoder import Served
from harli_core.loop import DecisionLoop
from harli_core.predict.predictor import StepPredictor
from harli_core.records import RequestBook, StepBook
from harli_core.types import StepPlan, StepResult, StepView


@dataclass(slots=True)
class OpenPlan:
    """A plan in force, and what its steps have taken so far."""

    view: StepView
    plan: StepPlan
    start_s: float
    finetune_sms: int
    turn_budget_ms: float
    window_layers: int
    finetune_tokens: float
    joined: int = 0
    latency_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    turn_ms: list[float] = field(default_factory=list)
    join_gap_ms: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps under it."""
        return len(self.latency_ms)

    def over(self) -> bool:
        """Whether its hold has ended by itself (a change of the batch ends it too)."""
        hold = self.plan.hold
        late = hold.max_step_ms is not None and self.latency_ms and self.latency_ms[-1] > hold.max_step_ms
        return self.steps >= hold.steps or bool(late)


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
    ) -> None:
        """``predictor`` says what decode alone would have taken."""
        self.instance = instance
        self.requests = requests
        self.book = steps
        self._loop = loop
        self._predictor = predictor
        self._qos_ms = qos_ms

    def step(self, opened: OpenPlan, latency_ms: float, decode_ms: float, turn_ms: float, *, finetuned: bool) -> None:
        """One step under ``opened``; ``finetuned``: units ran in it."""
        opened.latency_ms.append(latency_ms)
        opened.decode_ms.append(decode_ms)
        opened.turn_ms.append(turn_ms)
        if latency_ms <= self._qos_ms:
            return
        kv_tokens = opened.view.kv_tokens + opened.view.batch * (opened.steps - 1)
        alone_ms = self._predictor.predict(opened.view.batch, kv_tokens).whole_chip_ms
        if not finetuned or alone_ms > self._qos_ms:
            self.book.solo_violations += 1
        else:
            self.book.finetune_violations += 1

    def settle(self, opened: OpenPlan) -> None:
        """The plan is over: its steps go to the book, its result to the policy."""
        view, plan = opened.view, opened.plan
        if opened.steps:
            span: tuple[Any, ...] = (
                self.instance, view.step, view.batch, opened.joined, view.kv_tokens, view.waiting, plan.decode_sms,
                opened.finetune_sms, view.memory.rows_kv, view.memory.rows_lent, opened.window_layers,
                view.memory.free_but_unlendable_bytes, opened.start_s, opened.turn_budget_ms,
                plan.predicted_ms if plan.predicted_ms is not None else math.nan, opened.finetune_tokens,
            )  # fmt: skip
            self.book.add(span, opened.latency_ms, opened.decode_ms, opened.turn_ms, opened.join_gap_ms)
        parts = (tuple(opened.latency_ms), tuple(opened.decode_ms), tuple(opened.turn_ms))
        self._loop.settle(StepResult(self.instance, view.step, view.batch, view.kv_tokens, *parts))

    def idle(self, view: StepView, duration_ms: float, finetune_sms: int) -> None:
        """A time without requests is over."""
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
