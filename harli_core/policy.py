"""The seam for policies: what a policy is given once, and what it must answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from harli_core.memory.reservation import Reservation
from harli_core.predict.predictor import StepPredictor
from harli_core.types import Capabilities, StepPlan, StepResult, StepView


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What is known before the first step and never changes in a run.

    ``instance`` is the decode instance (0 .. ``gpus`` - 1) that this policy object will serve.
    """

    instance: int
    gpus: int
    qos_ms: float
    capabilities: Capabilities
    predictor: StepPredictor
    reservation: Reservation


class Policy(Protocol):
    """One policy object serves one decode instance; equal contexts and views must give equal plans.

    A policy class is called as ``P(context, **options)``; unknown options raise `ConfigError`.
    """

    @property
    def serves(self) -> bool:
        """Whether requests may be routed to this instance."""
        ...

    @property
    def finetunes(self) -> bool:
        """Whether this instance hosts a finetuning job at all."""
        ...

    def plan(self, view: StepView) -> StepPlan:
        """Say what to do next."""
        ...

    def observe(self, result: StepResult) -> None:
        """Learn what the steps under the last plan took."""
        ...
