"""Simulated GPUs for tests: the measured one, and one on which everything takes a constant time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from backends.sim.curve import Curve
from backends.sim.device_model import BatchPoint, DeviceModel
from backends.sim.noise import RecordedNoise
from harli_cli.package_data import shipped_samples
from harli_core.predict.samples import Samples
from harli_core.types import Split, UnitKind

STEP_MS = 10.0
BESIDE_MS = 12.5
UNIT_MS = 1.0
PREFILL_MS = 30.0


class ConstantDevice(DeviceModel):
    """A step takes 10 ms (12.5 beside finetuning), a finetune unit 1 ms on any SMs, a prompt 30 ms; no noise.

    All of these are binary fractions, so that sums in tests are exact.
    """

    def at(self, decode_sms: int, beside: Split | None, batch: int) -> BatchPoint:
        """The same for every step; units do not suffer."""
        level = Curve((0.0,), (STEP_MS if beside is None else BESIDE_MS,))
        return replace(
            super().at(decode_sms, beside, batch), noise=RecordedNoise([1.0], 0, 0), step_ms=level, unit_slowdown=1.0
        )

    def alone_ms(self, instance: int, step: int, batch: int, kv_tokens: int) -> float:
        """The same for every step."""
        return STEP_MS

    def unit_ms(self, kind: UnitKind, sms: int) -> float:
        """The same for every unit."""
        return UNIT_MS

    def turn_noise(self, instance: int, step: int, count: int) -> list[float]:
        """Turns take what they should."""
        return [1.0] * count

    def prefill_ms(self, tokens: int) -> float:
        """The same for every prompt."""
        return PREFILL_MS


@pytest.fixture(scope="session")
def constant_device() -> Callable[[], Any]:
    """``with constant_device():`` scenarios run on a `ConstantDevice`."""

    @contextmanager
    def replaced(**methods: Any) -> Iterator[None]:
        device = type("Device", (ConstantDevice,), methods)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("harli_cli.scenario.DeviceModel", device)
            yield

    return replaced


@pytest.fixture(scope="session")
def samples() -> Samples:
    """What was measured for LLaMA3-8B on an H200."""
    return shipped_samples("h200", "llama3-8b")


@pytest.fixture
def device(samples: Samples) -> DeviceModel:
    """The measured device, with fresh counters."""
    return DeviceModel(samples, "llama3-8b", 1024, seed=0)


@pytest.fixture
def policy_named(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], str]:
    """Gives a policy class of a test a name by which a scenario finds it."""

    def name(policy: type) -> str:
        module = ModuleType("policies_of_a_test")
        setattr(module, policy.__name__, policy)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return f"{module.__name__}:{policy.__name__}"

    return name
