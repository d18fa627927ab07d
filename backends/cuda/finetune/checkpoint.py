"""Checkpoints of a job: all that a bit-equal resume needs, written beside the training and whole or not at all.

::

    output_dir/checkpoint-40/   adapter_model.safetensors  adapter_config.json   an adapter like any other
                                optimizer.safetensors                            master values and AdamW moments
                                trainer_state.json                               step, tokens, data cursor, seed, recipe

Nothing else has state: the schedule, the order of the data and the randomness of dropout are functions of step and seed.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.cuda.finetune.adapter import CONFIG, WEIGHTS, adapter_tensors, config_bytes
from backends.cuda.finetune.durable import durable_folder
from harli_core.errors import JobError

FORMAT = 1
OPTIMIZER, STATE = "optimizer.safetensors", "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint as read: where the job was, and its tensors by name."""

    step: int
    tokens: int
    facts: dict[str, Any]
    tensors: dict[str, Any]
    source: str


class CheckpointFolder:
    """The checkpoints in one output directory."""

    def __init__(self, output_dir: Path, keep: int | None = None) -> None:
        """Keep the newest ``keep`` checkpoints (`None`: all)."""
        self.output_dir, self.keep = output_dir, keep

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, ascending."""
        found = [_NAME.fullmatch(path.name) for path in self.output_dir.glob("checkpoint-*")]
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is."""
        return self.output_dir / f"checkpoint-{step}"

    def write(self, step: int, facts: dict[str, Any], tensors: dict[str, Any], peft_model: Any) -> None:
        """Write one, then drop those beyond ``keep``; raises `OSError`, and then there is no checkpoint of ``step``."""
        from safetensors.torch import save

        masters = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith("master/")}
        if self.path(step).exists():
            shutil.rmtree(self.path(step))
        with durable_folder(self.path(step)) as folder:
            (folder / OPTIMIZER).write_bytes(save(tensors))
            (folder / WEIGHTS).write_bytes(save(adapter_tensors(peft_model, masters), metadata={"format": "pt"}))
            (folder / CONFIG).write_bytes(config_bytes(peft_model))
            (folder / STATE).write_text(json.dumps({"format": FORMAT, "step": step, **facts}, indent=1, sort_keys=True))
        if self.keep is not None:
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def read(self, step: int) -> Restored:
        """Read one back; raises `JobError` where it is unreadable."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.path(step)
        try:
            facts = json.loads((path / STATE).read_text("utf-8"))
            tensors = load_file(path / OPTIMIZER)
            if facts["format"] != FORMAT:
                raise JobError(f"{path}: checkpoint format {facts['format']}, this version reads {FORMAT}")
            return Restored(int(facts["step"]), int(facts["tokens"]), facts, tensors, str(path))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise JobError(f"{path}: cannot read the checkpoint ({' '.join(str(error).split())})") from None


class CheckpointWriter:
    """Takes snapshots in the order of the training's stream and writes them from a thread of its own."""

    def __init__(
        self, folder: CheckpointFolder, peft_model: Any, save_steps: int | None, facts: Callable[[int], dict[str, Any]]
    ) -> None:
        """A checkpoint every ``save_steps`` steps and at the end; ``facts(step)`` is what else to note in it.

        It is asked for in the writing thread, when everything up to ``step`` is complete on the device.
        """
        self.folder, self.peft_model, self.save_steps, self.facts = folder, peft_model, save_steps, facts
        self._host: dict[str, Any] = {}
        self._snapshot: tuple[int, int, dict[str, Any], Any] | None = None
        self._thread: threading.Thread | None = None
        self._fault: OSError | None = None
        self._resumed_step: int | None = None

    @property
    def newest_step(self) -> int | None:
        """Step of the last snapshot, or of the checkpoint that the job went on from; `None` before the first."""
        return self._resumed_step if self._snapshot is None else self._snapshot[0]

    def resumed(self, step: int) -> None:
        """The job goes on from the checkpoint of ``step``."""
        self._resumed_step = step

    def due(self, step: int, max_steps: int) -> bool:
        """Whether a checkpoint follows ``step``."""
        return step == max_steps or (self.save_steps is not None and step % self.save_steps == 0)

    def begin(self, step: int, tokens: int, bad: Any, tensors: dict[str, Any]) -> None:
        """Copy ``tensors`` on the current stream and write them when they have arrived, unless ``bad`` is 1."""
        import torch

        self.finish()
        event = None
        if bad.device.type == "cuda":
            if not self._host:
                self._host = {
                    name: torch.empty_like(part, device="cpu", pin_memory=True) for name, part in tensors.items()
                }
                self._host[""] = torch.empty_like(bad, device="cpu", pin_memory=True)
            for name, part in {**tensors, "": bad}.items():
                self._host[name].copy_(part, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            self._host = {name: part.detach().clone() for name, part in {**tensors, "": bad}.items()}
        kept = {name: part for name, part in self._host.items() if name}
        self._snapshot = step, tokens, kept, event
        self._start()

    def fault(self) -> str | None:
        """Why the last snapshot could not be written; `None` while it is being written or where it was."""
        if self._thread is not None and self._thread.is_alive():
            return None
        if self._fault is None or self._snapshot is None:
            return None
        why = self._fault.strerror or str(self._fault)
        return (
            f"checkpoint of step {self._snapshot[0]} cannot be written to {self.folder.output_dir}: {why}; "
            "make room and resume, the last good checkpoint is untouched"
        )

    def retry(self) -> None:
        """Write the snapshot that could not be written once more; `fault` says how that went."""
        if self.fault() is not None:
            self._start()
            self.finish()

    def finish(self) -> None:
        """Wait for the write under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        self._fault = None
        self._thread = threading.Thread(target=self._write, name="harli-checkpoint")
        self._thread.start()

    def _write(self) -> None:
        assert self._snapshot is not None
        step, tokens, tensors, event = self._snapshot
        if event is not None:
            event.synchronize()
        if float(self._host[""]) != 0.0:
            return
        try:
            self.folder.write(step, {"tokens": tokens, **self.facts(step)}, tensors, self.peft_model)
        except OSError as error:
            self._fault = error
