"""``trainer_log.jsonl``: one line a completed optimizer step, in the names of LLaMA-Factory's file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.cuda.finetune.durable import write_durably
from backends.cuda.finetune.step_report import StepReport
from harli_core.errors import JobError


class TrainerLog:
    """The log of a job across its runs: a resumed run begins with the lines of its checkpoint, so no step is told twice."""

    def __init__(self, output_dir: Path, total_steps: int, steps_per_epoch: int) -> None:
        """Nothing is written before `begin`."""
        self.path = output_dir / "trainer_log.jsonl"
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.restored: list[dict[str, Any]] = []

    def begin(self, history: Sequence[dict[str, Any]]) -> None:
        """Replace what is there by ``history``; raises `JobError` where the folder cannot be written."""
        self.restored = list(history)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self.path, "".join(_line(entry) for entry in history).encode())
        except OSError as error:
            raise JobError(f"{self.path}: cannot be written ({error.strerror})") from None

    def append(self, report: StepReport) -> None:
        """Add a line; where the disk refuses, the step is still in the next checkpoint's history."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(self.entry(report)))
        except OSError:
            return

    def entry(self, report: StepReport) -> dict[str, Any]:
        """A line's fields; nothing that differs from run to run, such as the time."""
        return {
            "current_steps": report.step,
            "total_steps": self.total_steps,
            "epoch": round(report.step / self.steps_per_epoch, 4),
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.learning_rate,
            "tokens": report.tokens,
            "samples": list(report.samples),
        }


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True) + "\n"
