"""Serving with finetuning on a GPU, checked: ``python tests/cuda/run_on_gpu.py CHECK ... [--out FILE]``.

Each check prints one line; ``--out`` collects what was found as JSON, in one step after each check, and checks that are
in it already are not run again. Exit code 1 if one fails. ``--device cpu`` runs the same checks on SGLang's CPU path with a
tiny model, where splits have names and no SMs (the deterministic mode needs the GPU). One instance a process:

    right_answers            fast mode: tokens and KV checksums on each split, teacher-forced logits across splits, losses
    right_answers_exact      deterministic mode: tokens equal whatever finetuning, splits and memory do
    right_answers_exact_remap    the same with `remap` lending
    failures                 units that raise, NaN, out of memory: serving goes on, memory comes back
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed packages, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import policies  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and tests.*, ahead of other packages' folders

import numpy as np

from backends.cuda.serving.instance import Instance
from backends.cuda.serving.kv_pool import KvSettings
from backends.cuda.serving.scheduler_factory import ServingSettings
from benchmarks.allocator.measuring import commit, machine
from benchmarks.record import write_json
from harli_cli.package_data import shipped_profile
from harli_core.predict.predictor import StepPredictor
from tests.cuda.teacher import Teacher
from tests.sglang import scenes


@dataclass(frozen=True, slots=True)
class Size:
    """What a check runs on, and how much of it."""

    device: str
    shape: scenes.Shape
    dtype: str
    rows: int
    block_bytes: int
    unit_tokens: int
    requests: int
    longest_prompt: int
    output_tokens: int

    @property
    def kv_tokens(self) -> int:
        """Token slots of the pool."""
        entry_bytes = self.shape.kv_heads * self.shape.head_dim * (2 if self.dtype == "bfloat16" else 4)
        return self.rows * (self.block_bytes // entry_bytes)


GPU = Size(
    "cuda",
    scenes.Shape(layers=6, hidden=2048, heads=16, kv_heads=8, head_dim=128, intermediate=5632, vocab=32000, std=0.05),
    "bfloat16", rows=96, block_bytes=2 << 20, unit_tokens=512, requests=48, longest_prompt=600, output_tokens=120,
)  # fmt: skip
CPU = Size(
    "cpu", scenes.Shape(), "float32", rows=96, block_bytes=4096, unit_tokens=32, requests=12, longest_prompt=60,
    output_tokens=24,
)  # fmt: skip
SIZES = {"cuda": GPU, "cpu": CPU}


def predictor() -> StepPredictor:
    """The splits of the machine, from the shipped profile."""
    return StepPredictor(shipped_profile("h200", "llama3-8b", "llama3-8b"))


def small_instance(size: Size, *, deterministic: bool, lending: str = "alias") -> tuple[Instance, dict[str, Any]]:
    """A model that loads in seconds, random weights that make tokens differ, poison in what comes back."""
    folder = Path(tempfile.gettempdir()) / f"harli_check_model_{size.device}"
    config = scenes.random_folder(folder, size.shape, size.dtype)
    settings = ServingSettings(
        folder,
        size.kv_tokens,
        64,
        4096,
        device=size.device,
        dtype=size.dtype,
        deterministic=deterministic,
        graph_batches=(1, 4, 8, 16, 32, 48, 64),
        kv=KvSettings(
            "remap" if lending == "remap" else "alias", "poison" if lending != "remap" else "zero", size.block_bytes
        ),
    )
    return Instance(settings, predictor(), "local"), config


def churn(instance: Instance, *, finetunes: bool, hold: int = 2) -> scenes.Scripted:
    """The policy that changes everything all the time."""
    return scenes.Scripted(instance.predictor, scenes.CHURN, finetunes=finetunes, hold=hold)


def right_answers_exact(size: Size, lending: str = "alias") -> dict[str, Any]:
    """Greedy tokens are the same with finetuning off and on, through lend / reclaim / compact cycles and split changes."""
    instance, config = small_instance(size, deterministic=size.device == "cuda", lending=lending)
    instance.add_job(scenes.job_of(config, size.unit_tokens))
    instance.warm_up()
    times = 6 if size.device == "cuda" else 2
    given = scenes.prompts(times * size.requests, size.shape.vocab, size.longest_prompt)
    output_tokens = size.output_tokens * 5 // 3
    alone = scenes.serve(instance, churn(instance, finetunes=False), given, output_tokens, gap_s=0.004)
    assert instance.job is not None
    beside = scenes.serve(instance, churn(instance, finetunes=True), given, output_tokens, gap_s=0.004)
    memory = instance.job.memory
    assert instance.job.pump.failure is None, instance.job.pump.failure
    differing = [index for index in alone.tokens if alone.tokens[index] != beside.tokens[index]]
    distinct = len({token for tokens in alone.tokens.values() for token in tokens})
    assert distinct > 50, f"the model says only {distinct} different tokens: the check could not fail"
    found = {
        "requests": len(given),
        "requests_that_differ": len(differing),
        "distinct_tokens": distinct,
        "steps": len(beside.steps),
        "plans": beside.policy.asked,
        "units": instance.job.pump.launched,
        "rows_lent": memory.lent_total,
        "rows_reclaimed": memory.reclaimed_total,
        "loss": instance.engine.state.loss if instance.engine is not None else None,
    }
    assert not differing, found
    assert memory.reclaimed_total > (1000 if size.device == "cuda" else 10), found
    instance.decoder.memory.provider.check_integrity()
    return found


def right_answers_exact_remap(size: Size) -> dict[str, Any]:
    """The same while lent rows are unmapped from the KV view: a stray access would fault."""
    return right_answers_exact(size, "remap")


def right_answers(size: Size) -> dict[str, Any]:
    """Fast mode: on one split and one schedule, tokens and KV are bit-identical with finetuning off and on.

    Across splits, teacher-forced logits are no further apart than they are from batch to batch without finetuning.
    """
    return answers_on(*small_instance(size, deterministic=False), size)


def answers_on(instance: Instance, config: dict[str, Any], size: Size) -> dict[str, Any]:
    """The same on an instance that is there."""
    losses: list[float] = []
    instance.add_job(scenes.job_of(config, size.unit_tokens))
    assert instance.engine is not None
    instance.engine.on_step = lambda report: losses.append(report.loss)
    instance.warm_up()
    given = scenes.prompts(size.requests, size.shape.vocab, size.longest_prompt)
    found: dict[str, Any] = {"requests": len(given), "splits": {}}
    tokens: dict[int, list[int]] = {}
    splits = (None, *range(len(instance.partitions.lanes)))
    for split in splits:
        off, on = (on_split(instance, size, given, split, finetunes=finetunes) for finetunes in (False, True))
        tokens = tokens or off.tokens
        found["splits"][str(split)] = {
            "same_schedule": off.schedule == on.schedule,
            "bit_identical": sum(off.tokens[index] == on.tokens[index] for index in off.tokens),
            "kv_checksums_equal": sum(off.sums[name] == on.sums.get(name) for name in off.sums),
            "kv_checksums": len(off.sums),
            "share_of_tokens_as_on_whole_chip": float(
                np.mean([np.mean(np.equal(on.tokens[index], tokens[index])) for index in tokens])
            ),
        }
    found["logits"] = logits_across(instance, size, given, tokens, splits)
    beside = list(losses)
    instance.engine.close()
    alone_losses = losses_alone(instance, config, size, len(beside))
    apart = np.abs(np.array(beside[: len(alone_losses)]) / np.array(alone_losses) - 1.0)
    found["losses"] = {"steps": len(alone_losses), "max_relative_difference": float(apart.max())}
    for entry in found["splits"].values():
        assert entry["same_schedule"], found
        assert entry["bit_identical"] == len(given), found
        assert entry["kv_checksums_equal"] == entry["kv_checksums"] > 0, found
    assert within_noise(found["logits"]), found
    assert apart.max() < 0.02, found
    return found


@dataclass(slots=True)
class OnSplit:
    """A run on one split: tokens, the batch of each step, KV checksums of each request in the middle of it."""

    tokens: dict[int, list[int]]
    schedule: list[tuple[str, ...]]
    sums: dict[str, str]


def on_split(instance: Instance, size: Size, given: Any, split: int | None, *, finetunes: bool) -> OnSplit:
    """Serve everything on one split; memory moves all the time beside it."""
    schedule: list[tuple[str, ...]] = []
    sums: dict[str, str] = {}

    def keep(loop: Any) -> None:
        schedule.append(tuple(request.rid for request in instance.decoder.running))
        if len(schedule) == size.output_tokens // 2:
            sums.update(scenes.kv_checksums(instance))

    choices = [(split, 3.0, 1.0), (split, 0.0, 0.0), (split, 1.0, 0.5)]
    policy = scenes.Scripted(instance.predictor, choices, finetunes=finetunes, hold=3)
    served = scenes.serve(instance, policy, given, size.output_tokens, each_step=keep)
    return OnSplit(served.tokens, schedule, sums)


NOISE = ("mean", "p99.9")
"""What must stay within the noise; the largest of all differences is reported too."""

SAMPLING = 1.1
"""How much larger a figure of the same distribution may come out."""


def logits_across(
    instance: Instance, size: Size, given: Any, tokens: dict[int, list[int]], splits: Sequence[int | None]
) -> dict[str, Any]:
    """How far teacher-forced logits are apart: from batch to batch without finetuning, and from split to split with it."""
    teacher = Teacher(instance, given, tokens)
    with teacher.forcing():
        on_split(instance, size, given, None, finetunes=False)
    found: dict[str, Any] = {"from_batch_to_batch": {}, "on_split": {}}
    for batch in (len(given), len(given) // 2, len(given) // 6):
        for first in range(0, len(given), batch):
            with teacher.forcing(first):
                on_split(instance, size, given[first : first + batch], None, finetunes=False)
        found["from_batch_to_batch"][str(batch)] = teacher.apart()
    for split in splits:
        with teacher.forcing():
            on_split(instance, size, given, split, finetunes=True)
        found["on_split"][str(split)] = teacher.apart()
    return found


def within_noise(found: dict[str, Any]) -> bool:
    """Whether no split's logits are further from the reference than other batches' are."""
    return all(
        apart[name] <= SAMPLING * max(noise[name] for noise in found["from_batch_to_batch"].values())
        for apart in found["on_split"].values()
        for name in NOISE
    )


def losses_alone(instance: Instance, config: dict[str, Any], size: Size, steps: int) -> list[float]:
    """The same job with nobody beside it."""
    import torch

    from backends.cuda.finetune.assembly import build_engine
    from backends.cuda.finetune.recipe import Recipe
    from backends.cuda.serving.job_source import ENDLESS_STEPS
    from backends.cuda.serving.random_job import random_feed, random_peft_model

    losses: list[float] = []
    engine = build_engine(
        random_peft_model(config, 4, size.device, getattr(torch, size.dtype)),
        random_feed(config["vocab_size"], size.unit_tokens, 2),
        Recipe(max_steps=ENDLESS_STEPS, learning_rate=1e-5, lr_scheduler_type="constant"),
        device=size.device,
        on_step=lambda report: losses.append(report.loss),
    )
    stream = instance.partitions.whole.finetune_stream
    while engine.state.step < min(steps, 60) and (unit := engine.next_unit()) is not None:
        engine.run(unit, stream)
    engine.close()
    return losses


def failures(size: Size) -> dict[str, Any]:
    """Whatever happens to the job, serving goes on, the reason is told, and the rows come back."""
    instance, config = small_instance(size, deterministic=False)
    given = scenes.prompts(size.requests // 2, size.shape.vocab, size.longest_prompt // 2)
    found = {}
    kinds: dict[str, Callable[[], None]] = {
        "unit raises": scenes.unit_raises,
        "out of memory": scenes.out_of_memory,
        "NaN in the adapter": lambda: scenes.nan_in_adapter(instance),
    }
    for name, fault in kinds.items():
        instance.add_job(scenes.job_of(config, size.unit_tokens))
        assert instance.job is not None
        instance.job.pump.work = scenes.FaultyWork(instance.engine, 20 if size.device == "cuda" else 6, fault)
        served = scenes.serve(instance, churn(instance, finetunes=True), given, size.output_tokens * 5 // 4)
        wait_for_rows(instance)
        found[name] = {
            "completed": len(served.tokens),
            "reason": instance.job.pump.failure,
            "rows_still_lent": instance.decoder.memory.allocator.view().rows_lent,
        }
        assert len(served.tokens) == len(given), found
        assert instance.job.pump.failure, found
        assert found[name]["rows_still_lent"] == 0, found
    return found


def wait_for_rows(instance: Instance) -> None:
    """Let fences pass after the last request."""
    assert instance.job is not None
    until_s = time.perf_counter() + 10.0
    while instance.job.memory.under_way and time.perf_counter() < until_s:
        instance.job.memory.poll(0.0)


CHECKS: dict[str, Callable[[Size], dict[str, Any]]] = {
    check.__name__: check for check in (right_answers, right_answers_exact, right_answers_exact_remap, failures)
}


def main() -> int:
    """Run the checks that are asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", choices=tuple(CHECKS))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    options = parser.parse_args()
    if options.device == "cpu":
        import torch

        torch.set_num_threads(1)  # the tensors are tiny
    found: dict[str, Any] = {}
    if options.out is not None and options.out.exists():
        found = json.loads(options.out.read_text())["checks"]
    failed = 0
    for name in options.checks:
        if found.get(name, {}).get("passed"):
            continue
        begin_s = time.perf_counter()
        try:
            found[name] = {"passed": True, **CHECKS[name](SIZES[options.device])}
        except Exception as error:
            traceback.print_exc()
            found[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
            failed += 1
        found[name]["took_s"] = time.perf_counter() - begin_s
        sys.stdout.write(json.dumps({name: found[name]}) + "\n")
        sys.stdout.flush()
        if options.out is not None:
            command = [Path(sys.argv[0]).name, *options.checks, "--out", options.out.name]
            document = {"machine": machine(), "commit": commit(), "command": command}
            write_json(options.out, {**document, "checks": found}, sort_keys=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
