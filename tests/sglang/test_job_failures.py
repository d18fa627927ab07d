"""Jobs from files that cannot begin or go on: requests get their tokens, rows come back, and why is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.cuda.finetune.job import prepare
from backends.cuda.finetune.job_file import read_job
from harli_cli.remarks import job_lines
from tests.sglang import processes, scenes
from tests.sglang.test_gpu_run import run

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPE = scenes.Shape(layers=3, hidden=32, heads=2, kv_heads=2, intermediate=48, vocab=263)
CHECKPOINT = Path("adapter") / "checkpoint-2"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job of four steps that stopped after two."""
    path = processes.job_file(tmp_path, SHAPE, max_steps=4, save_steps=2)
    engine = prepare(read_job(path), "cpu").engine
    while (unit := engine.next_unit()) is not None and engine.state.step < 2:
        engine.run(unit)
    engine.close()
    assert (tmp_path / CHECKPOINT).is_dir()
    return path


def cut_short(folder: Path) -> None:
    """Half of the tensors is missing."""
    path = folder / CHECKPOINT / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_state(folder: Path) -> None:
    """The state is no JSON."""
    (folder / CHECKPOINT / "trainer_state.json").write_text("{")


def half_a_state(folder: Path) -> None:
    """The state says nothing of the job."""
    path = folder / CHECKPOINT / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["identity"]
    path.write_text(json.dumps(state))


def other_shapes(folder: Path) -> None:
    """Tensors of another model."""
    path = folder / CHECKPOINT / "optimizer.safetensors"
    save_file({name: tensor.flatten()[:-1].clone() for name, tensor in load_file(path).items()}, path)


def no_numbers(folder: Path) -> None:
    """Every value is NaN."""
    path = folder / CHECKPOINT / "optimizer.safetensors"
    save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in load_file(path).items()}, path)


def no_data(folder: Path) -> None:
    """The data went away."""
    (folder / "data" / "counts.json").unlink()


DAMAGES: dict[Callable[[Path], None], tuple[str, str]] = {
    cut_short: ("refused", "checkpoint-2: cannot read the checkpoint"),
    no_state: ("refused", "checkpoint-2: cannot read the checkpoint"),
    half_a_state: ("refused", "checkpoint-2: cannot read the checkpoint (its state has no identity)"),
    other_shapes: ("refused", "was it written with another model or LoRA setting?"),
    no_numbers: ("failed", "step 3: the loss is nan; no parameter was changed by that step or after it"),
    no_data: ("refused", "counts.json"),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_job_never_reaches_the_requests(
    instance: Any, job: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Whatever is damaged: all requests complete, no row stays lent, and summary and terminal have the reason."""
    ending, reason = DAMAGES[damage]
    damage(tmp_path)
    instance.add_job_file(read_job(job))
    try:
        summary = run(instance, tmp_path, "hybrid")
        assert summary["requests"]["completed"] == summary["requests"]["arrivals"] == 8
        told = json.loads((tmp_path / "summary.json").read_text())["finetune"]
        assert told["job"]["ending"] == ending
        assert reason in told["job"]["reason"] == told["stopped"]
        (line,) = job_lines(summary)
        assert line.startswith(f"finetuning {ending}")
        assert reason in line
        assert instance.decoder.memory.allocator.view().rows_lent == 0
        assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    finally:
        instance.remove_job()
        instance.refused = None


def test_a_sound_job_goes_on_from_its_checkpoint(instance: Any, job: Path, tmp_path: Path) -> None:
    """The same without damage: it finishes, its rows come back, the adapter is that of the job alone."""
    goes_on = read_job(job)
    alone = processes.job_file(tmp_path, SHAPE, max_steps=4, output_dir=str(tmp_path / "alone"))
    ready = prepare(read_job(alone), "cpu")
    while (unit := ready.engine.next_unit()) is not None:
        ready.engine.run(unit)
    ready.engine.close()
    expected = (ready.write_adapter() / "adapter_model.safetensors").read_bytes()
    instance.add_job_file(goes_on)
    try:
        told = run(instance, tmp_path, "hybrid")["finetune"]["job"]
        assert (told["ending"], told["step"], told["reason"]) == ("finished", 4, None)
        assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == expected
        assert instance.decoder.memory.allocator.view().rows_lent == 0
    finally:
        instance.remove_job()


def test_job_too_large_for_the_pool_is_refused(instance: Any, tmp_path: Path) -> None:
    """Two layers do not fit: nothing stays lent, and the message says how much is missing."""
    large = scenes.Shape(layers=3, hidden=256, heads=4, kv_heads=4, intermediate=512, vocab=263)
    instance.add_job_file(read_job(processes.job_file(tmp_path, large)))
    try:
        assert "raise --memory-gb" in instance.refused
        assert instance.decoder.memory.allocator.view().rows_lent == 0
        assert run(instance, tmp_path, "hybrid")["requests"]["completed"] == 8
    finally:
        instance.refused = None


@pytest.mark.parametrize("fault", [scenes.unit_raises, scenes.out_of_memory])
def test_memory_comes_back_to_serving_in_the_middle_of_a_run(
    instance: Any, job: Path, tmp_path: Path, fault: Callable[[], None]
) -> None:
    """A unit fails while requests decode: rows are back before the run ends, with the first cause as the reason."""
    instance.add_job_file(read_job(job))
    lent = instance.job.memory.rows_held
    instance.job.pump.work = scenes.FaultyWork(instance.engine, 3, fault)
    try:
        summary = run(instance, tmp_path, "hybrid")
        assert summary["requests"]["completed"] == 8
        assert "failed: " in summary["finetune"]["stopped"]
        assert summary["memory"]["rows_lent"] == summary["memory"]["rows_reclaimed"] >= lent > 0
    finally:
        instance.remove_job()
