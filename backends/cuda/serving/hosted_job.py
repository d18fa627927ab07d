"""A finetuning job beside a decoder, from its place in lent rows to what it leaves on disk."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backends.cuda.finetune.adapter import publish_adapter
from backends.cuda.finetune.checkpoint import CheckpointWriter
from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.work import JobState
from backends.cuda.serving.job_memory import JobMemory
from backends.cuda.serving.unit_pump import UnitPump

Ending = Literal["running", "finished", "failed", "stopped", "refused"]
"""``stopped``: the server went down before it was finished; ``refused``: it never began."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of a job: why it ended, the last state, what lies on disk (`None`: nothing)."""

    ending: Ending
    reason: str | None
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    checkpoint: str | None = None
    adapter: str | None = None


@dataclass(slots=True)
class Job:
    """A finetuning job beside the decoder. ``engine`` is `None` once it gave up everything that it held."""

    job_id: str
    pump: UnitPump
    memory: JobMemory
    unit_tokens: int
    engine: FinetuneEngine | None
    output_dir: Path | None = None
    released: bool = False
    _last: JobState | None = None
    _saved_step: int | None = None
    _adapter: Path | None = None
    _fault: str | None = None
    _garbage: bool = False
    _publisher: threading.Thread | None = field(default=None, repr=False)

    def tend(self, now_ms: float) -> None:
        """Take rows in that came back, let copies of layers go on; a job that is over gives up its memory behind its last
        unit. Nothing waits.
        """
        self.pump.copy_layers()
        if self.pump.over and not self.released and self.pump.drained():
            self.release(now_ms)
        self.memory.poll(now_ms)

    def release(self, now_ms: float) -> None:
        """Give all rows back, as their fences allow; what a finished job trained is published meanwhile."""
        engine, self.engine = self.engine, None
        self.released = True
        self.pump.work = None
        if engine is not None:
            engine.next_unit()  # the loss of the last step may have arrived only now
            self._last = engine.state
            if self._last.status == "failed":
                self.pump.finished = False
                self.pump.stop(self._last.reason or "the job failed")
            if self.pump.finished and engine.checkpoints is not None:
                self._publish(engine.checkpoints)
        self.memory.release(now_ms, lambda: None if engine is None else engine.give_up_window())
        self._garbage = engine is not None

    def sweep(self) -> None:
        """Free what a released job leaves in reference cycles: slow, so it is for times when nothing decodes."""
        if self._garbage:
            self._garbage = False
            gc.unfreeze()
            gc.collect()

    def save(self) -> None:
        """The server goes down: checkpoint the last complete step, and wait for the disk."""
        if self.engine is not None:
            self._saved_step = self.engine.save()
            self.engine.close()
            self._last = self.engine.state
        if self._publisher is not None:
            self._publisher.join()

    def outcome(self) -> JobOutcome:
        """As of now; call `save` before the last time."""
        state = self.engine.state if self.engine is not None else self._last
        ending: Ending = "running"
        if self.pump.finished:
            ending = "finished"
        elif self.pump.failure is not None:
            ending = "failed"
        elif self._saved_step is not None:
            ending = "stopped"
        if state is None:
            return JobOutcome(ending, self.pump.failure)
        step = self._saved_step if self._saved_step is not None else self._published_step()
        checkpoint = None
        if self.output_dir is not None and step is not None:
            folder = self.output_dir / f"checkpoint-{step}"
            checkpoint = str(folder) if folder.is_dir() else None
        return JobOutcome(
            ending,
            self.pump.failure or self._fault,
            state.step,
            state.max_steps,
            state.loss,
            checkpoint,
            None if self._adapter is None else str(self._adapter),
        )

    def _published_step(self) -> int | None:
        return self._last.step if self.pump.finished and self._last is not None else None

    def _publish(self, writer: CheckpointWriter) -> None:
        """Copy the adapter out of the last checkpoint, once that is written; the disk must not hold up a step."""

        def copy() -> None:
            writer.finish()
            step = writer.newest_step
            if writer.fault() is not None or step is None:
                self._fault = writer.fault()
                return
            try:
                publish_adapter(writer.folder.path(step), writer.folder.output_dir)
                self._adapter = writer.folder.output_dir
            except OSError as error:
                self._fault = f"{writer.folder.output_dir}: cannot write the adapter ({error.strerror})"

        self._publisher = threading.Thread(target=copy, name="harli-adapter")
        self._publisher.start()


def describe(error: Exception) -> str:
    """One line for whatever went wrong."""
    text: Any = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
