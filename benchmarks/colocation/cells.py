"""Co-location on one GPU: all cells of a pair of models in one process. See README.md; `plan.py` lists the cells.

    python benchmarks/colocation/cells.py --group llama3-8b__llama3-8b      # all its loads and targets, in order
    python benchmarks/colocation/cells.py --pair llama3-8b llama3-8b --load 1600 --qos-ms 40      # one of them

Each policy at a load and a target is a cell. Cells that the results have are not measured again, results are written after
each, and no cell is begun that ``--budget-s`` has no time for. Nothing is measured where the results have an asked-for cell
under other ``--samples``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed packages, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import policies  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.*, ahead of other packages' folders

import numpy as np

from backends.cuda.serving import sglang_version
from backends.cuda.serving.instance import Instance
from backends.cuda.serving.serving_loop import LoopLimits
from benchmarks.allocator.measuring import commit, machine
from benchmarks.colocation.earlier_cells import cells_of, of_other_samples
from benchmarks.colocation.load import Load
from benchmarks.colocation.plan import (
    HEADLINE,
    PLAN,
    POLICIES,
    RUN_AS,
    SOLO_FACTOR,
    WARM_UP_S,
    WINDOW_S,
    Group,
    Point,
    gains_of,
    group_of,
    result_name,
)
from benchmarks.colocation.process import instance_of, on_graphs, process_options, run_settings
from benchmarks.colocation.step_tables import brief_of, by_decode_sms, slow_launches, worst
from benchmarks.record import azure_conv, results_folder, write_json
from harli_cli.scenario import Scenario
from harli_core.config import RunConfig
from harli_core.records import COMPLETED, RequestBook, StepBook
from harli_core.summary import distribution

SERVE_ONLY = ("inference_only", "separate_serving")
"""Cells without finetuning."""

WORST_OF_WARM_UP = 5
"""Steps of the warm-up that are kept one by one."""

LEAST_STEPS = 3
"""Optimizer steps that a rate is made of, at least."""


def measured(
    instance: Instance,
    serving: Any,
    steps: StepBook,
    book: RequestBook,
    warm_up_s: float,
    duration_s: float,
    qos_ms: float,
) -> dict[str, Any]:
    """What happened after the warm-up."""
    latency_ms = np.frombuffer(steps.latency_ms)
    late = steps.ends_s() > warm_up_s
    counts = steps.span_steps()
    batch = steps.spread("batch")[late]
    launch_ms = np.asarray(serving.launch_delay_ms)
    window_s = duration_s - warm_up_s
    found: dict[str, Any] = {
        "duration_s": duration_s,
        "window_s": window_s,
        "steps": int(late.sum()),
        "step_latency_ms": distribution(latency_ms[late]),
        "decode_ms": distribution(np.frombuffer(steps.decode_ms)[late]),
        "turn_ms": distribution(np.frombuffer(steps.turn_ms)[late]),
        "steps_over_target": int((latency_ms[late] > qos_ms).sum()),
        "violations_whole_run": {"solo": steps.solo_violations, "finetune_caused": steps.finetune_violations},
        "mean_batch": float(batch.mean()) if late.any() else None,
        "decode_tokens_per_s": float(batch.sum()) / window_s,
        "requests": {
            "completed": int((book.state == COMPLETED).sum()),
            "rejected": len(book.reasons),
            "arrived": int(np.isfinite(book.arrival_s).sum()),
            "preemptions": int(book.preemptions.sum()),
        },
        "decide_ms": distribution(np.asarray(serving.decide_ms)) if serving.decide_ms else None,
        "decide_us_per_step": 1e3 * sum(serving.decide_ms) / max(1, len(latency_ms)),
        "launch_ms": distribution(launch_ms) if len(launch_ms) else None,
        "start_gap_ms": distribution(gap_ms) if len(gap_ms := np.asarray(serving.interleaving.start_gap_ms)) else None,
        "by_decode_sms": by_decode_sms(steps, late) if late.any() else {},
        "worst_steps": worst(steps, late, serving) if late.any() else [],
        "worst_steps_of_warm_up": worst(steps, ~late, serving)[:WORST_OF_WARM_UP] if not late.all() else [],
        "rows_lent": float(np.mean(steps.span_column("rows_lent"))) if counts.size else None,
    }
    job = serving.job
    if job is not None:
        found["finetune"] = finetune_rate(instance, job, serving, warm_up_s)
    return found


def finetune_rate(instance: Instance, job: Any, serving: Any, warm_up_s: float) -> dict[str, Any]:
    """Tokens of whole optimizer steps over the time from the first to the last that began in the window."""
    seen = [(ms, tokens) for ms, tokens in job.pump.progress if ms / 1e3 >= serving.zero_s + warm_up_s]
    rate = None
    if len(seen) > 1:
        rate = (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0]) * 1e3
    state = instance.engine.state if instance.engine is not None else None
    return {
        "tokens_per_s": rate,
        "optimizer_steps_in_window": max(0, len(seen) - 1),
        "window_layers": job.memory.window_layers,
        "loss": state.loss if state is not None else None,
        "failure": job.pump.failure,
        "units": [{"kind": kind, "sms": sms, **brief_of(times)} for (kind, sms), times in job.pump.times.run.items()],
        "gaps_before_units": [{"sms": sms, **brief_of(times)} for sms, times in job.pump.times.gap.items()],
        "unit_launches": {kind: brief_of(times) for kind, times in job.pump.times.launch.items()},
        "slow_launches": slow_launches(job.pump.times, serving.zero_s),
        "rows_lent_total": job.memory.lent_total,
        "rows_reclaimed_total": job.memory.reclaimed_total,
        "reclaim_ms": distribution(np.asarray(job.memory.reclaim_ms)) if job.memory.reclaim_ms else None,
    }


@dataclass(slots=True)
class Process:
    """What all cells of one process share: the models on this GPU, and the cell of finetuning alone on it."""

    instance: Instance | None = None
    alone: dict[str, Any] | None = None


class Cells:
    """One point of a group."""

    def __init__(self, options: argparse.Namespace, group: Group, point: Point, process: Process) -> None:
        """Nothing is loaded before a cell is missing."""
        self.options, self.group, self.point, self.process = options, group, point, process
        self.path = results_folder(__file__) / f"{result_name(group, point)}.json"
        self.cells = cells_of(results_folder(__file__), group, point)
        if options.again:
            self.cells = {policy: cell for policy, cell in self.cells.items() if policy not in options.policies}
        self.shared = group.shared and group.served == group.finetuned
        self.qos_ms = target_ms(group, point)
        settings = argparse.Namespace(**{**vars(options), "qos_ms": self.qos_ms})
        self.config = RunConfig(**run_settings(settings, shared=self.shared))
        self.scenario = Scenario(self.config)
        on_graphs(self.scenario, options)

    def make(self) -> Instance:
        """Load everything once."""
        if self.process.instance is None:
            self.process.instance = instance_of(self.scenario, self.options, shared=self.shared)
        return self.process.instance

    def seconds(self, policy: str) -> float:
        """How long a cell takes, loading apart; the first one that finetunes, with finetuning alone."""
        options = self.options
        alone_s = options.finetune_only_s if self.process.alone is None and policy not in SERVE_ONLY else 0.0
        own_s = 0.0 if policy == "separate_finetuning" else options.warm_up_s + self.point.window_s
        return float(alone_s + own_s)

    def run(self, policy: str) -> None:
        """Measure one cell."""
        options = self.options
        instance = self.make()
        tokens_per_s = self.point.offered_tokens_per_s(policy)
        seconds = options.warm_up_s + self.point.window_s
        named = RUN_AS.get(policy, policy)
        load = Load(options.trace or azure_conv(), tokens_per_s, seconds, instance.vocab, options.skip_s)
        if policy == "separate_finetuning":
            cell = dict(self.alone(instance))
        else:
            made = self.scenario.contexts.policies(named, {})[0]
            book = load.book()
            limits = LoopLimits(options.max_batch, seconds)
            if instance.job is not None:
                instance.job.pump.forget_times()
            serving, steps = instance.serve(made, book, iter(load.specs()), load.prompt, self.qos_ms, limits)
            with instance.on_stream():
                before = instance.stalls.look()
                duration_s = serving.run()
                stalls = instance.stalls.since(before)
                cell = measured(instance, serving, steps, book, options.warm_up_s, duration_s, self.qos_ms)
                instance.settle()
            cell["host_stalls"] = stalls
            if "finetune" in cell:
                cell["finetune_alone_tokens_per_s"] = self.alone(instance)["finetune"]["tokens_per_s"]
        cell |= {"offered_tokens_per_s": tokens_per_s, "commit": commit(), "command": command()}
        if options.samples is not None:
            cell["samples"] = Path(options.samples).name
        self.cells[policy] = cell
        self.save()
        print(json.dumps({policy: brief(cell)}), flush=True)

    def alone(self, instance: Instance) -> dict[str, Any]:
        """Finetuning alone on this GPU, measured once a process: another GPU may be some percent faster."""
        if self.process.alone is None:
            self.process.alone = self.finetune_only(instance)
        return self.process.alone

    def finetune_only(self, instance: Instance) -> dict[str, Any]:
        """The job alone on the whole chip, the window as large as it gets."""
        import torch

        engine = instance.engine
        assert engine is not None
        assert instance.job is not None
        memory = instance.job.memory
        with instance.on_stream():
            memory.grow(memory.needs.rows_wanted)
        stream = instance.partitions.whole.finetune_stream
        times: list[tuple[float, int]] = []
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < self.options.finetune_only_s or len(times) < LEAST_STEPS:
            step = engine.state.step
            while engine.state.step == step and (unit := engine.next_unit()) is not None:
                while not engine.ready():  # which lets copies of layers go on
                    pass
                engine.run(unit, stream)
            if stream is not None:
                torch.cuda.synchronize()
            times.append((time.perf_counter(), engine.state.tokens))
        rate = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
        return {
            "finetune": {"tokens_per_s": rate, "optimizer_steps_in_window": len(times) - 1, "loss": engine.state.loss}
        }

    def save(self) -> None:
        """Write what there is."""
        instance = self.process.instance
        assert instance is not None
        document = {
            "benchmark": "colocation",
            "machine": machine(),
            "target_ms": self.qos_ms,
            "sglang": sglang_version.installed(),
            "pair": {"served": self.config.model, "finetuned": self.config.finetuned, "weights_shared": self.shared},
            "partitions": instance.partitions.kind,
            "prefill": self.options.prefill,
            "startup_s": instance.startup_s,
            "layers": self.options.layers,
            "cells": self.cells,
            "not_measured": [policy for policy in self.point.policies if policy not in self.cells],
            "gain_over_separate": gains(self.cells),
        }
        write_json(self.path, document, sort_keys=False)


def command() -> list[str]:
    """What measures now."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def target_ms(group: Group, point: Point) -> float:
    """The point's target; one relative to solo needs ``inference_only`` measured at the same load."""
    if point.target_ms is not None:
        return point.target_ms
    cells = cells_of(results_folder(__file__), group, Point(point.load_tokens_per_s, HEADLINE.target_ms))
    if "inference_only" not in cells:
        raise SystemExit(f"{point.name}: measure inference_only at {point.load_tokens_per_s} tokens/s and 40 ms first")
    return round(SOLO_FACTOR * float(cells["inference_only"]["step_latency_ms"]["p50"]), 2)


def gains(cells: dict[str, Any]) -> dict[str, float]:
    """Of the cells measured so far, each over finetuning alone in the same process; see `plan.gains_of`."""
    rates = {name: (cell.get("finetune") or {}).get("tokens_per_s") for name, cell in cells.items()}
    found: dict[str, float] = {}
    for name, rate in rates.items():
        alone = cells[name].get("finetune_alone_tokens_per_s", rates.get("separate_finetuning"))
        found |= gains_of({name: rate, "separate_finetuning": alone})
    return found


def brief(cell: dict[str, Any]) -> dict[str, Any]:
    """The figures that one looks at while it runs."""
    latency = cell.get("step_latency_ms") or {}
    return {
        "finetune_tokens_per_s": (cell.get("finetune") or {}).get("tokens_per_s"),
        "p50": latency.get("p50"),
        "p99": latency.get("p99"),
        "max": latency.get("max"),
        "over": cell.get("steps_over_target"),
        "batch": cell.get("mean_batch"),
        "decode_tokens_per_s": cell.get("decode_tokens_per_s"),
        "failure": (cell.get("finetune") or {}).get("failure"),
    }


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", default=None, help="measure all points of this group of plan.py, in order")
    parser.add_argument("--load", type=int, default=1600, help="offered decode tokens/s per co-located GPU")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no cell that would end later")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--warm-up-s", type=float, default=WARM_UP_S)
    parser.add_argument("--window-s", type=float, default=WINDOW_S)
    parser.add_argument("--finetune-only-s", type=float, default=15.0)
    parser.add_argument("--skip-s", type=float, default=60.0)
    parser.add_argument("--trace", type=Path, default=None)
    parser.add_argument("--again", action="store_true", help="measure asked-for cells anew that the results have")
    process_options(parser)
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> tuple[Group, tuple[Point, ...]]:
    """The group and its points, from ``--group`` or from the single options."""
    if options.group is None:
        group = Group(options.pair[0], options.pair[1], options.memory_gb, not options.no_sharing)
        return group, (Point(options.load, options.qos_ms, options.window_s),)
    try:
        group = group_of(options.group)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    options.pair, options.memory_gb = [group.served, group.finetuned], group.memory_gb
    return group, PLAN[group]


def main() -> None:
    """Measure what is asked for and not there yet."""
    begin_s = time.perf_counter()
    options = parsed()
    group, points = chosen(options)
    folder = results_folder(__file__)
    if not options.again and (
        lines := list(of_other_samples(folder, group, points, options.policies, options.samples))
    ):
        raise SystemExit("\n".join(lines))
    process = Process()
    for point in points:
        cells = Cells(options, group, point, process)
        for policy in (policy for policy in point.policies if policy in options.policies):
            if policy in cells.cells:
                continue
            if time.perf_counter() - begin_s + cells.seconds(policy) > options.budget_s:
                print(json.dumps({"no time left for": [point.name, policy]}), flush=True)
                return
            cells.run(policy)
        print(json.dumps({point.name: gains(cells.cells), "written": str(cells.path)}), flush=True)


if __name__ == "__main__":
    main()
