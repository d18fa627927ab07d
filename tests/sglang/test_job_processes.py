"""Serving with a job from a file, in processes of their own: ends, signals, and jobs that cannot go on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from backends.cuda.finetune.checkpoint import CheckpointFolder
from backends.cuda.finetune.job import prepare
from backends.cuda.finetune.job_file import read_job
from tests.sglang import processes

pytestmark = pytest.mark.filterwarnings("ignore")


def trained_alone(job: Path) -> bytes:
    """The adapter of the job run to its end by itself."""
    ready = prepare(read_job(job), "cpu")
    while (unit := ready.engine.next_unit()) is not None:
        ready.engine.run(unit)
    ready.engine.close()
    return (ready.write_adapter() / "adapter_model.safetensors").read_bytes()


def test_sigterm_drains_checkpoints_and_exits_0(tmp_path: Path) -> None:
    """Requests that arrived complete, the job's last complete step is on disk, and the job can go on from it."""
    job = processes.job_file(tmp_path)
    trace = processes.trace_of(tmp_path / "trace.csv", 2000, 0.5)
    process = processes.start(tmp_path, processes.command(tmp_path, trace, "--finetune-job", str(job)))
    log = tmp_path / "adapter" / "trainer_log.jsonl"
    processes.wait_for(lambda: log.exists() and log.read_text().count("\n") > 5, process)
    process.send_signal(signal.SIGTERM)
    code, summary, out, err = processes.ended(process, tmp_path)
    assert code == 0, err
    requests = summary["requests"]
    assert requests["completed"] == requests["arrivals"] > 0
    assert requests["not_arrived"] > 0
    told = summary["finetune"]["job"]
    steps = CheckpointFolder(tmp_path / "adapter").steps()
    assert told["ending"] == "stopped"
    assert steps == [told["step"]]
    assert told["step"] > 5
    assert told["checkpoint"] == str(tmp_path / "adapter" / f"checkpoint-{told['step']}")
    assert f"it goes on from {told['checkpoint']}" in " ".join(out.split())
    ready = prepare(read_job(job), "cpu")
    assert ready.resumed_step == told["step"]
    history = [json.loads(line)["current_steps"] for line in log.read_text().splitlines()]
    assert history == list(range(1, told["step"] + 1))


def test_interrupted_serving_and_resumed_gives_the_adapter_of_the_job_alone(tmp_path: Path) -> None:
    """Stopped in the middle by SIGINT, then served again to the job's end: the same bits as without any server."""
    alone = trained_alone(processes.job_file(tmp_path, max_steps=400, output_dir=str(tmp_path / "alone")))
    job = processes.job_file(tmp_path, max_steps=400)
    trace = processes.trace_of(tmp_path / "trace.csv", 2000, 0.5)
    arguments = processes.command(tmp_path, trace, "--finetune-job", str(job))
    log, adapter = tmp_path / "adapter" / "trainer_log.jsonl", tmp_path / "adapter" / "adapter_model.safetensors"
    process = processes.start(tmp_path, arguments)
    processes.wait_for(lambda: log.exists() and log.read_text().count("\n") > 5, process)
    process.send_signal(signal.SIGINT)
    code, first, _, err = processes.ended(process, tmp_path)
    assert (code, first["finetune"]["job"]["ending"]) == (0, "stopped"), err
    assert not adapter.exists()
    process = processes.start(tmp_path, arguments)
    processes.wait_for(adapter.exists, process)
    process.send_signal(signal.SIGTERM)
    code, second, out, err = processes.ended(process, tmp_path)
    assert code == 0, err
    told = second["finetune"]["job"]
    assert (told["ending"], told["step"], told["adapter"]) == ("finished", 400, str(tmp_path / "adapter"))
    assert "finetuning finished after step 400 of 400" in " ".join(out.split())
    assert second["memory"]["rows_lent"] == second["memory"]["rows_reclaimed"] > 0
    assert adapter.read_bytes() == alone


def test_damaged_checkpoint_is_told_on_the_terminal_and_serving_goes_on(tmp_path: Path) -> None:
    """Exit code 0, every request complete, the reason on standard error at once and below the table."""
    job = processes.job_file(tmp_path)
    (tmp_path / "adapter" / "checkpoint-7").mkdir(parents=True)
    trace = processes.trace_of(tmp_path / "trace.csv", 3, 0.1)
    process = processes.start(tmp_path, processes.command(tmp_path, trace, "--finetune-job", str(job)))
    code, summary, out, err = processes.ended(process, tmp_path)
    assert code == 0, err
    assert summary["requests"]["completed"] == 3
    reason = f"{tmp_path / 'adapter' / 'checkpoint-7'}: cannot read the checkpoint"
    assert reason in summary["finetune"]["stopped"]
    assert f"finetuning refused, serving went on: {reason}" in out
    assert f"the finetuning job was refused, serving goes on without it: {reason}" in err
