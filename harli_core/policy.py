"""The seam for policies: what a policy is given once, and what it must answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from harli_core.errors import ConfigError
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


def option(name: str, value: object, least: float, most: float) -> float:
    """An option of a policy, checked: a number from ``least`` to ``most`` (else `ConfigError`)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(f"policy option {name} = {value!r}: expected a number from {least:g} to {most:g}")
    return value


def count_option(name: str, value: object, least: int = 1) -> int:
    """An option of a policy that counts something: a whole number, ``least`` or more (else `ConfigError`)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"policy option {name} = {value!r}: expected a whole number, {least} or more")
    return value


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
        """Learn what steps under the last plan took; called once for each batch that decoded under it."""
        ...
