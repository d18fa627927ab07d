"""Before anything is served every finetune stream has run a whole step, and head + loss once more."""

from __future__ import annotations

import time
from typing import Any

import pytest

from backends.cuda.serving.hosted_job import Job
from backends.cuda.serving.job_warm_up import warm_up_job
from backends.cuda.serving.partitions import Lane, host_partitions
from backends.cuda.serving.timeline import HostTimeline
from backends.cuda.serving.unit_pump import UnitPump
from harli_core.types import Split
from tests.finetune.tiny import recipe, tiny_engine, tiny_feed, tiny_peft

pytestmark = pytest.mark.filterwarnings("ignore")

SPLITS = (Split(20, 112), Split(68, 64))


class Recorded:
    """An engine that remembers which unit was to run on which stream."""

    def __init__(self, engine: Any, fails_at: int | None = None) -> None:
        """Wrap ``engine``, whose ``fails_at``-th unit raises."""
        self._engine, self._fails_at = engine, fails_at
        self.ran: list[tuple[int, str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        """The engine's."""
        return getattr(self._engine, name)

    def run(self, unit: Any, stream: Any = None, host_ms: float | None = None) -> None:
        """The engine's, on the host."""
        if len(self.ran) == self._fails_at:
            raise RuntimeError("a unit failed")
        self.ran.append((self._engine.state.step, unit.kind, stream))
        self._engine.run(unit, None, host_ms)


def warmed_up(engine: Recorded) -> tuple[Job, list[str]]:
    """The job after its warm-up on three lanes, and what was called in which order."""
    pump = UnitPump(engine, host_partitions(SPLITS, 132), HostTimeline(time.perf_counter), lambda *_: 1.0)
    job = Job("job-0", pump, None, 24, engine)  # type: ignore[arg-type]
    lanes = [Lane(split, None, f"stream {index}") for index, split in enumerate((*SPLITS, Split(132, 132)))]
    calls: list[str] = []
    warm_up_job(job, lanes, lambda: calls.append("wait"), lambda: calls.append("give back"))
    return job, calls


def test_each_stream_runs_a_step_and_then_head_and_loss() -> None:
    """A whole optimizer step on each stream, what was freed given back, then units on all until each had head + loss."""
    engine = Recorded(tiny_engine(tiny_peft(), tiny_feed(4, 24), recipe()))
    job, calls = warmed_up(engine)
    by_step = [{stream for step, _, stream in engine.ran if step == wanted} for wanted in range(3)]
    assert by_step == [{"stream 0"}, {"stream 1"}, {"stream 2"}]
    later = [(kind, stream) for step, kind, stream in engine.ran if step > 2]
    assert {stream for kind, stream in later if kind == "head_loss"} == {"stream 0", "stream 1", "stream 2"}
    assert {stream for kind, stream in later if kind == "forward"} == {"stream 0", "stream 1", "stream 2"}
    assert later[-1][0] == "head_loss"
    assert calls == ["wait", "wait", "wait", "give back", "wait"]
    assert job.pump.failure is None


def test_a_job_that_fails_is_stopped_with_the_reason() -> None:
    """Serving begins without it."""
    job, _ = warmed_up(Recorded(tiny_engine(tiny_peft(), tiny_feed(4, 24), recipe()), fails_at=3))
    assert job.pump.failure == "RuntimeError: a unit failed"


def test_a_job_that_is_over_early_is_no_harm() -> None:
    """Fewer steps than streams: the warm-up ends with the job."""
    engine = Recorded(tiny_engine(tiny_peft(), tiny_feed(4, 24), recipe(max_steps=2)))
    job, calls = warmed_up(engine)
    assert job.pump.finished
    assert calls[-1] == "wait"
