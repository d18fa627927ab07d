"""Where a finetuning job beside a decoder comes from: a job file, or random weights and tokens of a given shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from backends.cuda.finetune.assembly import SharedWeights, build_engine
from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.frozen_layer import FrozenLayout
from backends.cuda.finetune.job import LoadedJob
from backends.cuda.finetune.layer_weights import SlotMemory
from backends.cuda.finetune.optimizer_step import UnitSettings
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.submodel import CutModel
from backends.cuda.serving.random_job import random_feed, random_peft_model

ENDLESS_STEPS = 10_000_000


@dataclass(frozen=True, slots=True)
class JobSettings:
    """A random job: ``config`` is the finetuned model's; with ``shared`` it trains on the served model's own tensors."""

    config: dict[str, Any]
    unit_tokens: int
    micro_batches: int
    rank: int = 16
    shared: bool = False


class JobSource(Protocol):
    """A job whose model is known and whose weights have no place yet."""

    @property
    def shared(self) -> bool:
        """Whether it trains on the served model's own tensors."""
        ...

    @property
    def peft_model(self) -> Any:
        """The PEFT model."""
        ...

    @property
    def unit_tokens(self) -> int:
        """Tokens of a micro-batch, as far as is known before `start`."""
        ...

    @property
    def output_dir(self) -> Path | None:
        """Where checkpoints and the adapter go; `None`: nowhere."""
        ...

    def start(
        self, window_layers: int | None, slot_memory: SlotMemory | None, shared: SharedWeights | None
    ) -> FinetuneEngine:
        """Make the engine; the weights' places are those of `build_engine`."""
        ...


class RandomJob:
    """Implements `JobSource` for `JobSettings`; it never ends."""

    def __init__(self, settings: JobSettings, device: str, dtype: Any) -> None:
        """Draw the weights."""
        self._settings, self._device = settings, device
        self.peft_model: Any = random_peft_model(
            settings.config, settings.rank, device, dtype, weights=not settings.shared
        )
        self.shared = settings.shared
        self.unit_tokens = settings.unit_tokens
        self.output_dir: Path | None = None

    def start(
        self, window_layers: int | None, slot_memory: SlotMemory | None, shared: SharedWeights | None
    ) -> FinetuneEngine:
        """See `JobSource`."""
        settings = self._settings
        return build_engine(
            self.peft_model,
            random_feed(settings.config["vocab_size"], settings.unit_tokens, settings.micro_batches),
            Recipe(max_steps=ENDLESS_STEPS, learning_rate=1e-5, lr_scheduler_type="constant"),
            device=self._device,
            window_layers=window_layers,
            shared=shared,
            slot_memory=slot_memory,
            settings=UnitSettings(head_parts=max(1, settings.unit_tokens // 1024)),
        )


class FileJob:
    """Implements `JobSource` for a job file; ``window_layers`` of the file gives way to the rows that are lent."""

    def __init__(self, loaded: LoadedJob, *, shared: bool) -> None:
        """``shared``: the file's model is the served one."""
        self._loaded = loaded
        self.shared = shared
        self.peft_model: Any = loaded.peft_model
        self.output_dir: Path | None = Path(loaded.job.output_dir)

    @property
    def unit_tokens(self) -> int:
        """See `JobSource`; cutting the job for a GPU may change it in `start`."""
        return self._loaded.feed.micro_batch_tokens

    def start(
        self, window_layers: int | None, slot_memory: SlotMemory | None, shared: SharedWeights | None
    ) -> FinetuneEngine:
        """See `JobSource`."""
        return self._loaded.start(window_layers=window_layers, slot_memory=slot_memory, shared=shared).engine


def layer_bytes(source: JobSource) -> int:
    """Bytes of one frozen layer of the job's own; 0 where the served model's are used."""
    return 0 if source.shared else FrozenLayout.of(CutModel(source.peft_model).layers[0]).size_bytes
