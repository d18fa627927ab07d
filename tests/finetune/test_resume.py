"""Jobs that are killed, and checkpoints that cannot be written: nothing is trained twice, skipped or lost."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from backends.cuda.finetune.checkpoint import CheckpointFolder, CheckpointWriter
from backends.cuda.finetune.job import prepare
from backends.cuda.finetune.job_file import read_job
from harli_core.errors import JobError
from tests.finetune.small_job import results, small_job
from tests.finetune.tiny import recipe, run_all, run_step, tiny_engine, tiny_feed, tiny_peft

KILLED_RUNS = Path(__file__).with_name("killed_runs.py")


def finish(path: Path) -> Path:
    """Run a job in this process to its end."""
    ready = prepare(read_job(path), "cpu")
    run_all(ready.engine)
    return ready.write_adapter()


def test_killed_at_random_points_it_comes_to_the_same_end(tmp_path: Path) -> None:
    """SIGKILL at random units and times: losses of all steps and adapter are bit-equal to those of a run left alone."""
    job = small_job(tmp_path, output_dir=str(tmp_path / "alone"))
    alone = results(finish(job))
    job = small_job(tmp_path, output_dir=str(tmp_path / "killed"), save_total_limit=2)
    command = [sys.executable, str(KILLED_RUNS), str(job), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2
    assert results(tmp_path / "killed") == alone
    steps = [json.loads(line)["current_steps"] for line in alone[0].splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    kept = sorted(path.name for path in (tmp_path / "killed").iterdir() if path.is_dir() and path.name[0] != ".")
    assert kept == ["checkpoint-5", "checkpoint-6"]


def test_a_finished_job_is_finished(tmp_path: Path) -> None:
    """Running it again trains nothing and writes the same adapter."""
    job = small_job(tmp_path, max_steps=2)
    first = results(finish(job))
    ready = prepare(read_job(job), "cpu")
    assert ready.engine.next_unit() is None
    assert results(finish(job)) == first


def test_another_job_is_not_resumed(tmp_path: Path) -> None:
    """A checkpoint of other settings is refused by name of the setting; overwriting begins anew."""
    finish(small_job(tmp_path, max_steps=2))
    other = small_job(tmp_path, max_steps=2, lora_rank=8)
    with pytest.raises(JobError, match=r"checkpoint-2 is of another job \(lora, lora_rank: 4 there, 8 now\)"):
        prepare(read_job(other), "cpu")
    finish(small_job(tmp_path, max_steps=2, lora_rank=8, overwrite_output_dir=True))
    assert CheckpointFolder(tmp_path / "out").read(2).facts["identity"]["lora"]["lora_rank"] == 8


def test_an_unreadable_checkpoint_is_named(tmp_path: Path) -> None:
    """Damage from outside is an error that says where, not a silent start from nothing."""
    job = small_job(tmp_path, max_steps=1)
    finish(job)
    (tmp_path / "out" / "checkpoint-1" / "optimizer.safetensors").write_bytes(b"nothing")
    with pytest.raises(JobError, match=r"checkpoint-1: cannot read the checkpoint"):
        prepare(read_job(job), "cpu")


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """The operating system refuses to write more into any file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_pauses_the_job_and_resuming_saves(tmp_path: Path) -> None:
    """The job says that it paused and why, keeps the good checkpoint, and goes on to the same end when there is room."""
    folder = CheckpointFolder(tmp_path)
    model = tiny_peft()
    writer = CheckpointWriter(folder, model, 1, lambda step: {})
    engine = tiny_engine(model, tiny_feed(), recipe(3), checkpoints=writer)
    run_step(engine)
    writer.finish()
    with files_of_at_most(1000):
        run_step(engine)
        writer.finish()
        assert engine.next_unit() is None
        state = engine.state
        assert state.status == "paused"
        assert state.reason is not None
        assert state.reason.startswith(f"checkpoint of step 2 cannot be written to {tmp_path}: File too large")
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
        engine.resume()
        assert engine.next_unit() is None  # still no room
    engine.resume()
    assert folder.steps() == [1, 2]
    run_all(engine)
    undisturbed = tiny_engine(tiny_peft(), tiny_feed(), recipe(3))
    run_all(undisturbed)
    expected = undisturbed.states.tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.states.tensors().items())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in folder.read(3).tensors.items())


def test_a_bad_step_is_never_saved(tmp_path: Path) -> None:
    """With a loss that is no number the last good checkpoint stays the newest."""
    model = tiny_peft()
    writer = CheckpointWriter(CheckpointFolder(tmp_path), model, 1, lambda step: {})
    engine = tiny_engine(model, tiny_feed(), recipe(4), checkpoints=writer)
    run_step(engine)
    engine.model.norm.module.weight.data[0] = float("inf")
    while (unit := engine.next_unit()) is not None:
        engine.run(unit)
    engine.close()
    assert engine.state.status == "failed"
    assert CheckpointFolder(tmp_path).steps() == [1]
