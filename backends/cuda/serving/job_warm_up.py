"""What a finetuning job has to do before anything is served beside it, so that none of it holds up a decode step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backends.cuda.serving.hosted_job import Job, describe
from backends.cuda.serving.partitions import Lane


def warm_up_job(job: Job, lanes: Sequence[Lane], wait: Callable[[], None], give_back: Callable[[], None]) -> None:
    """One optimizer step on the finetune stream of each lane; then units on all of them until each had head + loss.

    As many layers should be resident as may be, since graphs are captured for places. ``give_back`` frees what only loading
    and these first passes needed; what units go on needing is each stream's own, and the driver may take long to find it:
    the second pass is for that. ``wait`` waits for the GPU. A job that fails here is stopped.
    """
    try:
        for lane in lanes:
            _step_on(job, lane)
            wait()
        give_back()
        _heads_on(job, lanes)
        wait()
    except Exception as error:  # whatever it is, serving goes on
        job.pump.stop(describe(error))


def _step_on(job: Job, lane: Lane) -> None:
    engine = job.engine
    assert engine is not None, "the job was just built"
    target = engine.state.step + 1
    while engine.state.step < target and (unit := job.pump.next_unit()) is not None:
        engine.run(unit, lane.finetune_stream)


def _heads_on(job: Job, lanes: Sequence[Lane]) -> None:
    engine = job.engine
    assert engine is not None, "the job was just built"
    without, count = list(lanes), 0
    while without and (unit := job.pump.next_unit()) is not None:
        lane = without.pop() if unit.kind == "head_loss" else lanes[count % len(lanes)]
        engine.run(unit, lane.finetune_stream)
        count += 1
