"""A run as a Chrome trace (JSON Object Format), for https://ui.perfetto.dev or chrome://tracing.

One process an instance; its threads are decode, finetuning and the copy stream. Times are microseconds of simulated time.
Slices of a thread follow each other and never overlap: a turn stands at the start of its step, decode at the end.
Finetuning has a slice for each turn and for each step beside which it runs, not for each unit: a simulated job moves over
all units of such a time at once, and nothing keeps when each of them ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harli_cli.unfinished_file import UnfinishedFile
from harli_core.decision_log import DecisionRecord
from harli_core.errors import ConfigError
from harli_core.types import StepPlan, StepResult

DECODE, FINETUNE, COPY = 1, 2, 3
"""Threads of an instance."""


class PerfettoWriter:
    """A decision sink that writes events as they come, to a file that takes its name when the run is complete."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` for writing; raises `ConfigError` when that cannot be done."""
        self._seen: dict[int, tuple[int, int, int, int]] = {}
        self._first = True
        self._file = UnfinishedFile(path, partial(_unwritable, path))
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')

    def write(self, record: DecisionRecord) -> None:
        """Add the steps of one plan, or one idle time, and what changed at its beginning."""
        view, plan = record.view, record.plan
        state = (
            plan.decode_sms,
            sum(job.sms for job in plan.jobs),
            view.memory.rows_lent,
            sum(job.window_layers for job in view.jobs),
        )
        self._changes(view.instance, view.time_s * 1e6, state)
        start_us = (view.time_s * 1000.0 - view.elapsed_ms) * 1000.0
        for result in record.results:
            if result.latency_ms:
                start_us = self._steps(view.instance, plan, result, start_us)
            elif state[1] and result.idle_s > 0.0:
                about = {"sms": state[1]}
                self._slice(view.instance, FINETUNE, "finetune, no requests", start_us, result.idle_s * 1e6, about)

    def add_copies(self, instance: int, copies: Iterable[tuple[int, float, float]], end_s: float) -> None:
        """Add frozen layers that were swapped in (layer, begin and end in ms), those begun before the run ended."""
        for layer, begin_ms, done_ms in copies:
            if begin_ms < end_s * 1000.0:
                length_us = (min(done_ms, end_s * 1000.0) - begin_ms) * 1000.0
                self._slice(instance, COPY, "swap in", begin_ms * 1000.0, length_us, {"layer": layer})

    def _steps(self, pid: int, plan: StepPlan, result: StepResult, start_us: float) -> float:
        """Add the steps of one batch from ``start_us`` on; returns when they end."""
        beside_sms = sum(job.sms for job in plan.jobs)
        steps = zip(result.latency_ms, result.decode_ms, result.turn_ms, strict=True)
        for step, (latency_ms, decode_ms, turn_ms) in enumerate(steps, start=result.first_step):
            end_us = start_us + latency_ms * 1000.0
            decode_us = min(decode_ms, latency_ms) * 1000.0
            about = {"step": step, "batch": result.batch, "latency_ms": latency_ms}
            self._slice(pid, DECODE, "step", start_us, latency_ms * 1000.0, about)
            self._slice(pid, DECODE, "decode", end_us - decode_us, decode_us, {"sms": plan.decode_sms})
            turn_us = min(turn_ms * 1000.0, latency_ms * 1000.0)
            if turn_us > 0.0:
                self._slice(pid, FINETUNE, "turn", start_us, turn_us, {"sms": "all"})
            if beside_sms and decode_us > 0.0:
                begins_us = max(end_us - decode_us, start_us + turn_us)
                self._slice(pid, FINETUNE, "beside decode", begins_us, end_us - begins_us, {"sms": beside_sms})
            start_us = end_us
        return start_us

    def _changes(self, pid: int, at_us: float, state: tuple[int, int, int, int]) -> None:
        """An instant for each thing that is not as it was, and the counters that show it."""
        before = self._seen.get(pid)
        if before is None:
            names = ((None, "process_name", f"instance {pid}"), (DECODE, "thread_name", "decode"),
                     (FINETUNE, "thread_name", "finetuning"), (COPY, "thread_name", "copy stream"))  # fmt: skip
            for tid, kind, name in names:
                self._event({"ph": "M", "pid": pid, "tid": tid or 0, "name": kind, "args": {"name": name}})
        if before == state:
            return
        self._seen[pid] = state
        decode_sms, beside_sms, lent, window = state
        counters = {"SMs": {"decode": decode_sms, "finetune": beside_sms}, "rows lent": {"rows": lent},
                    "window": {"layers": window}}  # fmt: skip
        for name, values in counters.items():
            self._event({"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": at_us, "args": values})
        if before is None:
            return
        if before[:2] != state[:2]:
            self._instant(pid, DECODE, "split", at_us, {"decode_sms": decode_sms, "finetune_sms": beside_sms})
        if lent != before[2]:
            self._instant(
                pid, FINETUNE, "lend" if lent > before[2] else "reclaim", at_us, {"rows": abs(lent - before[2])}
            )

    def _slice(self, pid: int, tid: int, name: str, at_us: float, length_us: float, about: dict[str, Any]) -> None:
        self._event({"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": at_us, "dur": length_us, "args": about})

    def _instant(self, pid: int, tid: int, name: str, at_us: float, about: dict[str, Any]) -> None:
        self._event({"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": at_us, "args": about})

    def _event(self, event: dict[str, Any]) -> None:
        text = ("\n" if self._first else ",\n") + json.dumps(event, separators=(",", ":"), allow_nan=False)
        self._first = False
        self._file.write(text)

    def __enter__(self) -> Self:
        """Use as a context manager: the trace gets its name only when the block succeeds."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close and name the trace, or remove it."""
        self._file.close("\n]}\n", complete=kind is None)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    told = error.strerror if isinstance(error, IsADirectoryError) else f"cannot write there ({error.strerror})"
    return ConfigError(f"--perfetto {path}: {told}")


class SinkPair:
    """Two decision sinks that get the same records."""

    def __init__(self, *sinks: Any) -> None:
        """Anything with ``write(record)``."""
        self._sinks = sinks

    def write(self, record: DecisionRecord) -> None:
        """Pass the record on."""
        for sink in self._sinks:
            sink.write(record)
