"""What all tests share: the folder of public data that some of them read, small traces, and a policy's context."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from backends.sim.simulation import SimOutcome
from harli_cli.package_data import shipped_profile
from harli_cli.scenario import Scenario
from harli_core.config import RunConfig
from harli_core.decision_log import DecisionRecord, encode_record
from harli_core.memory.reservation import Reservation
from harli_core.policy import PolicyContext
from harli_core.predict.predictor import StepPredictor
from harli_core.predict.profile import Profile
from traces import LoadedTrace, Repairs, RequestTrace

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "search"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder named by HARLI_SHARED; without it the test is skipped, or fails where HARLI_REQUIRE_SHARED=1."""
    setting = os.environ.get("HARLI_SHARED")
    if setting and Path(setting).is_dir():
        return Path(setting)
    reason = f"HARLI_SHARED names no folder ({setting!r})" if setting else "HARLI_SHARED is not set"
    reason += ": public traces and measurements are not here"
    if os.environ.get("HARLI_REQUIRE_SHARED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class RecordList:
    """A decision sink that keeps records, and their lines as a log would have them."""

    def __init__(self) -> None:
        """Start empty."""
        self.records: list[DecisionRecord] = []

    def write(self, record: DecisionRecord) -> None:
        """Keep one record."""
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        """All records encoded."""
        return [encode_record(record) for record in self.records]


@dataclass(frozen=True)
class Requests:
    """Columns of a small trace."""

    arrival_s: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]

    def scenario(self, **config: Any) -> Scenario:
        """These requests under ``config`` (one decode GPU and no prefill unless it says otherwise)."""
        columns = (self.arrival_s, self.prompt_tokens, self.output_tokens)
        trace = RequestTrace.of(*columns, source="a test")
        settings = RunConfig(**{"gpus": 1, "prefill_gpus": 0, **config})
        return Scenario(settings, LoadedTrace(trace, "a test", Repairs()))

    def simulate(
        self, policy: str, options: dict[str, Any] | None = None, sink: RecordList | None = None, **config: Any
    ) -> SimOutcome:
        """Run them to the end; the audit is part of the run."""
        outcome, _ = self.scenario(**config).run(policy, options or {}, sink)
        return outcome


@pytest.fixture(scope="session")
def requests_of() -> type[Requests]:
    """A small trace from its columns: ``requests_of(arrival_s, prompt_tokens, output_tokens)``."""
    return Requests


@pytest.fixture(scope="session")
def conversation() -> Callable[[int, float], Requests]:
    """``conversation(count, rate_rps)``: requests with lengths like those of a chat, arrivals at random; seeded."""

    def draw(count: int, rate_rps: float, seed: int = 0) -> Requests:
        rng = np.random.Generator(np.random.PCG64(seed))
        gaps_s = rng.standard_exponential(count) / rate_rps
        arrival_s = np.cumsum(gaps_s) - gaps_s[0]
        prompts, outputs = rng.integers(20, 2000, count), rng.integers(1, 300, count)
        return Requests(arrival_s.tolist(), prompts.tolist(), outputs.tolist())

    return draw


@pytest.fixture(scope="session")
def record_list() -> type[RecordList]:
    """A decision sink in memory."""
    return RecordList


@pytest.fixture(scope="session")
def profile() -> Profile:
    """The profile that ships for LLaMA3-8B beside itself on an H200."""
    return shipped_profile("h200", "llama3-8b", "llama3-8b")


@pytest.fixture(scope="session")
def context_of(profile: Profile) -> Callable[..., PolicyContext]:
    """``context_of(qos_ms=40.0, instance=0, gpus=2)``: what a policy is made from."""
    predictor = StepPredictor(profile)

    def make(qos_ms: float = 40.0, instance: int = 0, gpus: int = 2) -> PolicyContext:
        reservation = Reservation.measured(1024, 30.0, 4.7, 8192)
        return PolicyContext(instance, gpus, qos_ms, profile.capabilities, predictor, reservation)

    return make
