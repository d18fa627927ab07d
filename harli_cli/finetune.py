"""Running a finetuning job alone, from its file to its adapter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from backends.cuda.finetune.job_file import read_job
from backends.cuda.requirements import require_finetuning
from harli_core.errors import ConfigError, JobError

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60


def run_job(path: Path, device: str, stage: Callable[[str, int], Callable[[int], None]]) -> dict[str, Any]:
    """Train to the end and write the adapter; returns what to report. Raises `ConfigError` or `JobError`."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {device!r}: known devices are cpu, cuda")
    job = read_job(path)
    require_finetuning(device)
    from backends.cuda.finetune.job import prepare  # noqa: PLC0415  (needs torch)
    from backends.cuda.finetune.step_report import StepReport  # noqa: PLC0415

    _quiet_libraries()
    losses: list[float] = []
    progress: Callable[[int], None] = _nobody

    def on_step(report: StepReport) -> None:
        losses.append(report.loss)
        progress(report.step)

    ready = prepare(job, device, on_step)
    engine = ready.engine
    stream = None
    if device == "cuda":
        import torch  # noqa: PLC0415

        stream = torch.cuda.Stream()
    progress = stage("finetuning", engine.recipe.max_steps)
    progress(ready.resumed_step)
    tokens, begin_s = engine.tokens, perf_counter()
    while (unit := engine.next_unit()) is not None:
        engine.run(unit, stream)
    engine.close()
    wall_s = perf_counter() - begin_s
    state = engine.state
    if state.status != "finished":
        done = f"{state.step} of {state.max_steps} steps are done"
        raise JobError(f"the job {state.status}: {state.reason} ({done}; {_way_on(state.status)})")
    folder = ready.write_adapter()
    history = [float(entry["loss"]) for entry in ready.log.restored] + losses
    return {
        "adapter": str(folder),
        "steps": state.max_steps,
        "resumed_step": ready.resumed_step,
        "tokens": state.tokens,
        "tokens_per_s": (state.tokens - tokens) / wall_s if wall_s > 0.0 and losses else None,
        "loss_first": history[0],
        "loss_last": history[-1],
        "loss_curve": curve(history),
        "micro_batch_tokens": engine.feed.fingerprint()["micro_batch_tokens"],
        "unit": None if ready.fit is None else {"layer_ms": ready.fit.layer_ms, "kept": ready.fit.kept},
    }


def report_lines(result: dict[str, Any]) -> list[str]:
    """What a person reads at the end."""
    lines = []
    if result["resumed_step"]:
        lines.append(f"went on after step {result['resumed_step']}")
    rate = result["tokens_per_s"]
    speed = "" if rate is None else f", {rate:,.0f} tokens/s"
    lines.append(f"{result['steps']:,} steps, {result['tokens']:,} tokens{speed}")
    lines.append(f"loss {result['loss_first']:.4f} -> {result['loss_last']:.4f}  {result['loss_curve']}")
    unit = result["unit"]
    if unit is not None and not unit["kept"]:
        lines.append(
            f"a unit of one sequence takes {unit['layer_ms']:.1f} ms, more than unit_ms; lower cutoff_len or raise unit_ms"
        )
    lines.append(f"adapter: {result['adapter']}")
    return lines


def curve(losses: list[float], width: int = CURVE_WIDTH) -> str:
    """The losses as a line of bars, each a mean of consecutive steps, between the lowest and the highest."""
    columns = min(width, len(losses))
    edges = [len(losses) * column // columns for column in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / span * len(BARS)))] for mean in means)


def _quiet_libraries() -> None:
    """What transformers prints while loading is not for whoever runs a job."""
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _way_on(status: str) -> str:
    if status == "paused":
        return "run the same command again to go on from the last good checkpoint"
    return "the last good checkpoint is kept"


def _nobody(_step: int) -> None:
    """Nobody watches yet."""
