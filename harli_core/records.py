"""What a run leaves behind: one row a request and one row a decode step, kept as flat columns while it runs."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPLETED, UNFINISHED, REJECTED = 1, 0, 2
"""States of a request; one that was neither completed nor rejected when the run ended is unfinished."""


class RequestBook:
    """One row a request, indexed by its place in the trace. Times are seconds from the trace's zero, NaN while unset."""

    def __init__(self, prompt_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]) -> None:
        """The sizes asked for; everything else is filled in as the run goes."""
        count = len(prompt_tokens)
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.arrival_s: NDArray[np.float64] = np.full(count, np.nan)
        self.first_token_s: NDArray[np.float64] = np.full(count, np.nan)
        self.last_token_s: NDArray[np.float64] = np.full(count, np.nan)
        self.produced_tokens = np.zeros(count, dtype=np.int64)
        self.instance = np.full(count, -1, dtype=np.int32)
        self.preemptions = np.zeros(count, dtype=np.int32)
        self.state = np.zeros(count, dtype=np.int8)
        self.reasons: dict[int, str] = {}

    def __len__(self) -> int:
        """Requests in the trace."""
        return len(self.prompt_tokens)

    def reject(self, index: int, reason: str) -> None:
        """Refuse request ``index`` for ``reason``."""
        self.state[index] = REJECTED
        self.reasons[index] = reason

    def complete(self, index: int, last_token_s: float) -> None:
        """Request ``index`` has all its tokens, the last one at ``last_token_s``."""
        self.state[index] = COMPLETED
        self.last_token_s[index] = last_token_s

    def note_produced(self, index: int, remaining: int) -> None:
        """Request ``index`` still lacks ``remaining`` tokens."""
        self.produced_tokens[index] = self.output_tokens.item(index) - remaining

    def ttft_s(self) -> NDArray[np.float64]:
        """Arrival to first token of each request, NaN where there was none."""
        return self.first_token_s - self.arrival_s

    def tpot_s(self) -> NDArray[np.float64]:
        """(last - first token time) / (n - 1) of each completed request; NaN where n = 1 or not completed."""
        gaps = self.output_tokens - 1
        tpot = np.full(len(self), np.nan)
        defined = (self.state == COMPLETED) & (gaps > 0)
        tpot[defined] = (self.last_token_s[defined] - self.first_token_s[defined]) / gaps[defined]
        return tpot


SPAN_FIELDS = (
    ("instance", "q"),
    ("first_step", "q"),
    ("batch", "q"),
    ("joined", "q"),
    ("kv_tokens", "q"),
    ("waiting", "q"),
    ("decode_sms", "q"),
    ("finetune_sms", "q"),
    ("rows_kv", "q"),
    ("rows_lent", "q"),
    ("window_layers", "q"),
    ("free_but_unlendable_bytes", "q"),
    ("start_s", "d"),
    ("turn_budget_ms", "d"),
    ("predicted_ms", "d"),
    ("finetune_tokens", "d"),
)
"""What is constant over the steps of one plan, or true at the first of them, in the order of `StepBook.add`.

``joined`` requests of the batch are new in it, ``finetune_tokens`` is progress including the optimizer step under way,
``start_s`` the emission before the first step (or the end of the idle time before it), ``predicted_ms`` NaN where
nothing was predicted.
"""

_SPAN = struct.Struct("=" + "".join(code for _, code in SPAN_FIELDS))
_SPAN_DTYPE = np.dtype([(name, np.int64 if code == "q" else np.float64) for name, code in SPAN_FIELDS])


class StepBook:
    """One row a step, in spans of steps that shared one plan; spans are packed, steps are flat columns.

    Violations are judged as steps are added: ``solo`` where decode alone would have been over target too.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.steps = array("i")
        self.latency_ms = array("d")
        self.decode_ms = array("d")
        self.turn_ms = array("d")
        self.join_gap_ms = array("d")
        self.solo_violations = 0
        self.finetune_violations = 0
        self.idle_s = 0.0
        self.idle_finetune_sm_s = 0.0
        self._spans = bytearray()

    def add(
        self,
        span: tuple[float, ...],
        latency_ms: list[float],
        decode_ms: list[float],
        turn_ms: list[float] | None,
        join_gap_ms: list[float],
    ) -> None:
        """Keep the steps of one plan.

        ``span`` follows `SPAN_FIELDS`; ``join_gap_ms`` are the gaps since their last token of requests that joined.
        ``turn_ms`` is `None` where every step is its decode and nothing else, but for the wait before the first.
        """
        self._spans += _SPAN.pack(*span)
        count = len(latency_ms)
        self.steps.append(count)
        self.decode_ms.fromlist(decode_ms)
        if turn_ms is None:
            self.latency_ms += self.decode_ms[-count:]
            self.latency_ms[-count] = latency_ms[0]
            self.turn_ms.frombytes(bytes(count * self.turn_ms.itemsize))
        else:
            self.latency_ms.fromlist(latency_ms)
            self.turn_ms.fromlist(turn_ms)
        self.join_gap_ms.fromlist(join_gap_ms)

    def __len__(self) -> int:
        """Steps kept."""
        return len(self.latency_ms)

    def span_column(self, name: str) -> NDArray[np.int64] | NDArray[np.float64]:
        """One value a span."""
        return np.frombuffer(self._spans, dtype=_SPAN_DTYPE)[name]

    def spread(self, name: str) -> NDArray[np.int64] | NDArray[np.float64]:
        """A span's column repeated for each of its steps."""
        column: NDArray[Any] = self.span_column(name)
        return np.repeat(column, self.span_steps())

    def span_steps(self) -> NDArray[np.int32]:
        """Steps of each span."""
        return np.frombuffer(self.steps, dtype=np.int32)

    def ends_s(self) -> NDArray[np.float64]:
        """When each step ended, in seconds of the run."""
        latency_ms = np.frombuffer(self.latency_ms)
        counts = self.span_steps().astype(np.int64)
        starts, total_ms = np.cumsum(counts) - counts, np.cumsum(latency_ms)
        before_ms = np.repeat(total_ms[starts] - latency_ms[starts], counts)
        found: NDArray[np.float64] = np.repeat(self.span_column("start_s"), counts) + (total_ms - before_ms) / 1000.0
        return found

    def step_within_span(self) -> NDArray[np.int64]:
        """0, 1, 2, .. within each span, one entry a step."""
        steps = self.span_steps().astype(np.int64)
        starts = np.cumsum(steps) - steps
        return np.arange(int(steps.sum()), dtype=np.int64) - np.repeat(starts, steps)
