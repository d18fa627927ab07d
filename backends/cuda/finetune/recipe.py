"""What decides the numbers of a training run, apart from model and data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from harli_core.errors import ConfigError

Schedule = Literal["cosine", "linear", "constant", "constant_with_warmup"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """AdamW, its schedule and clipping, named and defined as in PyTorch and transformers.

    ``max_grad_norm`` of `None` does not clip. ``warmup_steps`` of ``max_steps`` optimizer steps raise the rate linearly.
    """

    max_steps: int
    learning_rate: float = 5e-5
    lr_scheduler_type: Schedule = "cosine"
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a run without steps or a warm-up longer than it."""
        if self.max_steps < 1 or not 0 <= self.warmup_steps <= self.max_steps:
            raise ConfigError(
                f"a finetuning job needs max_steps >= 1 and 0 <= warmup_steps <= max_steps, "
                f"not {self.max_steps} and {self.warmup_steps}"
            )

    def rate_at(self, step: int) -> float:
        """Learning rate of optimizer step ``step`` (the first one is 0), as `transformers.get_scheduler` has it."""
        warm, total = self.warmup_steps, self.max_steps
        if self.lr_scheduler_type == "constant":
            return self.learning_rate
        if step < warm:
            return self.learning_rate * step / max(1, warm)
        if self.lr_scheduler_type == "constant_with_warmup":
            return self.learning_rate
        done = (step - warm) / max(1, total - warm)
        if self.lr_scheduler_type == "linear":
            return self.learning_rate * max(0.0, 1.0 - done)
        return self.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))
