"""Python's share of a step: deciding, and the loop around SGLang's own work, on a CPU with hardly any model. See README.md.

    python benchmarks/colocation/loop_overhead.py        # no GPU; SGLang 0.5.16 and the extension

The calls into SGLang are timed where the loop makes them, so that the rest of a step is the loop's own. On a CPU the model's
pass is inside ``launch``; it is timed by itself. Writes ``results/loop_overhead.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed packages, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import policies  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.*, ahead of other packages' folders

import numpy as np

from backends.cuda.serving.instance import Instance
from backends.cuda.serving.serving_loop import LoopLimits
from benchmarks.colocation.load import Load
from benchmarks.colocation.process import instance_of, process_options, run_settings
from benchmarks.record import azure_conv, provenance, results_folder, write_json
from harli_cli.scenario import Scenario
from harli_core.config import RunConfig


class Stopwatch:
    """Time inside one method of an object."""

    def __init__(self, owner: Any, name: str, within: Stopwatch | None = None) -> None:
        """Replace the method until `remove`; ``within``: only calls from inside that one count."""
        self.seconds, self.running = 0.0, False
        self._owner, self._name = owner, name
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            if within is not None and not within.running:
                return inner(*arguments, **options)
            begin_s, self.running = time.perf_counter(), True
            try:
                return inner(*arguments, **options)
            finally:
                self.seconds, self.running = self.seconds + time.perf_counter() - begin_s, False

        setattr(owner, name, timed)

    def remove(self) -> None:
        """Leave the method as it was."""
        delattr(self._owner, self._name)


def watched(instance: Instance) -> dict[str, Stopwatch]:
    """Everything of a step that is not the loop's own."""
    decoder, scheduler = instance.decoder, instance.decoder.scheduler
    admit, launch, finish = (Stopwatch(decoder, name) for name in ("admit", "launch", "finish"))
    batch = Stopwatch(scheduler, "run_batch", launch)
    return {
        "admit": admit,
        "get_next_batch": Stopwatch(scheduler, "get_next_batch_to_run", admit),
        "launch": launch,
        "run_batch": batch,
        "model": Stopwatch(scheduler.tp_worker.model_runner, "forward", batch),
        "finish": finish,
        "process_result": Stopwatch(scheduler, "process_batch_result", finish),
    }


def measure(instance: Instance, scenario: Scenario, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run under ``policy``."""
    load = Load(options.trace or azure_conv(), options.load, options.seconds, instance.vocab)
    load.prompt_tokens = np.minimum(load.prompt_tokens, options.longest_prompt)
    made = scenario.contexts.policies(policy, {})[0]
    book = load.book()
    limits = LoopLimits(options.max_batch, options.seconds)
    loop, steps = instance.serve(made, book, iter(load.specs()), load.prompt, options.qos_ms, limits)
    clocks = watched(instance)
    duration_s = loop.run()
    for clock in clocks.values():
        clock.remove()
    instance.settle()
    count = len(steps)
    seconds = {name: clock.seconds for name, clock in clocks.items()}
    turns_s = float(np.sum(np.frombuffer(steps.turn_ms))) / 1e3
    busy_s = float(np.sum(np.frombuffer(steps.latency_ms))) / 1e3
    units_s = turns_s if made.finetunes else 0.0
    loop_s = busy_s - units_s - seconds["admit"] - seconds["launch"] - seconds["finish"]
    decide_us = np.asarray(loop.decide_ms) * 1e3

    def each(value_s: float) -> float:
        return round(value_s / count * 1e6, 1)

    return {
        "steps": count,
        "mean_batch": float(np.dot(steps.span_column("batch"), steps.span_steps()) / count),
        "duration_s": duration_s,
        "decisions": len(decide_us),
        "decide_us": {
            "mean": float(decide_us.mean()),
            "p50": float(np.median(decide_us)),
            "max": float(decide_us.max()),
        },
        "decide_us_a_step": round(float(decide_us.sum()) / count, 2),
        "us_a_step": {
            "loop itself": each(loop_s) if not made.finetunes else None,
            "admit, ours": each(seconds["admit"] - seconds["get_next_batch"]),
            "admit, SGLang": each(seconds["get_next_batch"]),
            "launch, before the model's batch": each(seconds["launch"] - seconds["run_batch"]),
            "launch, SGLang around the model": each(seconds["run_batch"] - seconds["model"]),
            "model": each(seconds["model"]),
            "finish, ours": each(seconds["finish"] - seconds["process_result"]),
            "finish, SGLang": each(seconds["process_result"]),
        },
    }


def main() -> None:
    """All policies that decide differently often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    process_options(parser)
    parser.add_argument("--load", type=int, default=150, help="offered decode tokens/s")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--longest-prompt", type=int, default=32, help="prompts are cut to this")
    parser.add_argument("--trace", type=Path, default=None)
    # A target that this slow a device keeps: otherwise the guard ends plans, which is no subject here.
    parser.set_defaults(
        qos_ms=250.0, device="cpu", layers=2, max_rows=160, max_batch=64, micro_batches=1, micro_batch_tokens=1024
    )
    options = parser.parse_args()
    if options.device == "cpu":
        import torch

        torch.set_num_threads(1)
    scenario = Scenario(RunConfig(**run_settings(options, shared=False)))
    instance = instance_of(scenario, options, shared=False)
    found = {policy: measure(instance, scenario, policy, options) for policy in ("inference_only", "hybrid", "harli")}
    target = results_folder(__file__) / "loop_overhead.json"
    write_json(target, {"benchmark": "loop overhead", **provenance(" ".join(["python", *sys.argv])), "policies": found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
