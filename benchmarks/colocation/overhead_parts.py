"""The parts of the overhead benchmark, for SGLang alone and for Harli; each is measured once in a process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from backends.cuda.serving.instance import Instance
from backends.cuda.serving.serving_loop import LoopLimits, ServingLoop
from benchmarks.colocation.load import Load
from benchmarks.colocation.process import job_settings, serving_settings
from benchmarks.colocation.sglang_alone import SglangAlone
from benchmarks.colocation.start_up import Stage, gpu_used_gib, graphs_of, process_age_s, stages
from benchmarks.record import azure_conv
from harli_cli.scenario import Scenario
from harli_core.predict.predictor import StepPredictor
from harli_core.records import RequestBook, StepBook
from harli_core.requests import RequestSpec
from harli_core.summary import distribution

Part = Literal["startup", "decode", "job", "decisions", "launch"]

GRAPH_SET_STAGES = ("attention backends", "graphs")

ALONE = "inference_only"
"""The policy that never finetunes."""

LAST_STEPS = 2
"""Steps at the end that are not counted: an overlapping loop launches one more than it needs, and requests leave."""


def steady(values: Sequence[float] | NDArray[np.float64], skip: int) -> NDArray[np.float64]:
    """Without the first ``skip`` steps and the last ones; raises `SystemExit` where nothing is left."""
    kept = np.asarray(values, dtype=np.float64)[skip : len(values) - LAST_STEPS]
    if not len(kept):
        raise SystemExit(f"{len(values)} steps, of which {skip + LAST_STEPS} do not count: more --output-tokens needed")
    return kept


def decoded(rounds: Sequence[dict[int, NDArray[np.float64]]]) -> dict[str, Any]:
    """Steps of each batch: all rounds together, and each round's median."""
    return {
        "batches": {
            str(batch): {
                "step_ms": distribution(np.concatenate([found[batch] for found in rounds])),
                "median_ms_of_each_round": [float(np.median(found[batch])) for found in rounds],
            }
            for batch in rounds[0]
        }
    }


def started(scheduler: Any, found: dict[str, Stage], options: argparse.Namespace, sets: int) -> dict[str, Any]:
    """How the start went, of a process that is ready now."""
    total_s = process_age_s()
    batch_sizes, graphs = graphs_of(scheduler)
    memory = [found[name].gib for name in GRAPH_SET_STAGES]
    return {
        "total_s": total_s,
        "stages_s": {name: stage.seconds for name, stage in found.items()},
        "stages_gib": {name: stage.gib for name, stage in found.items()},
        "graph_sets": sets,
        "batch_sizes": batch_sizes,
        "graphs": graphs,
        "graph_sets_s": sum(found[name].seconds for name in GRAPH_SET_STAGES),
        "graph_sets_gib": sum(each for each in memory if each is not None) if None not in memory else None,
        "gpu_used_gib": gpu_used_gib(options.device),
    }


def short(part: str, figures: dict[str, Any]) -> Any:
    """What one looks at while it runs."""
    if part == "decode":
        return {batch: round(found["step_ms"]["p50"], 3) for batch, found in figures["batches"].items()}
    names = ("total_s", "graphs", "graph_sets_gib", "decide_us_a_step", "added_us", "end_unseen_added_us")
    return {name: figures[name] for name in names if name in figures}


class SglangParts:
    """SGLang's own loop and pool, at the settings that Harli gives it."""

    def __init__(self, scenario: Scenario, options: argparse.Namespace, *, overlap: bool) -> None:
        """Load and capture."""
        self._options = options
        settings = serving_settings(scenario, options, unified=False, overlap=overlap)
        with stages(options.device) as self._stages:
            self._sglang = SglangAlone(settings)
        self._sglang.step_ms(1, 16, 3)
        self._sglang.settle()
        self._startup = started(self._sglang.scheduler, self._stages, options, 1)

    def startup(self) -> dict[str, Any]:
        """Until the first request was served."""
        return {"loop": self._sglang.loop, **self._startup}

    def decode(self) -> dict[str, Any]:
        """From result to result; and, in a run of its own, what of that is the GPU's."""
        options = self._options
        length = (options.prompt_tokens, options.output_tokens)
        rounds = [
            {batch: steady(self._sglang.step_ms(batch, *length), options.skip_steps) for batch in options.batches}
            for _ in range(options.rounds)
        ]
        on_gpu = {batch: self._sglang.decode_ms(batch, *length) for batch in options.batches}
        parts = {
            str(batch): {"decode_ms": [float(np.median(steady(ms, options.skip_steps)))]}
            for batch, ms in on_gpu.items()
            if ms
        }
        return {**decoded(rounds), "median_parts_of_each_round": parts}

    brief = staticmethod(short)


class HarliParts:
    """Harli's loop; without ``partitioned`` SGLang has its one graph set on the whole chip."""

    def __init__(self, scenario: Scenario, options: argparse.Namespace, *, shared: bool, partitioned: bool) -> None:
        """Load, capture, warm up; no job yet."""
        self._scenario, self._options, self._shared = scenario, options, shared
        self._job: dict[str, Any] | None = None
        settings = serving_settings(scenario, options)
        with stages(options.device) as found:
            self._instance = Instance(settings, StepPredictor(scenario.profile), "local", partitioned=partitioned)
        self._instance.warm_up()
        sets = self._instance.partitions.groups if partitioned else 1
        self._startup = started(self._instance.decoder.scheduler, found, options, sets)
        self._startup |= {"instance_s": dict(self._instance.startup_s), "partitions": self._instance.partitions.kind}

    def startup(self) -> dict[str, Any]:
        """Until every graph set has run; a job is not there yet."""
        return self._startup

    def decode(self) -> dict[str, Any]:
        """From emission to emission under `inference_only`, without a job.

        Of each step also the time between the marks around it on the GPU, and what the host needed to launch it.
        """
        rounds = []
        parts: dict[str, dict[str, list[float]]] = {str(batch): {} for batch in self._options.batches}
        self._instance.decoder.prefill = "local"
        for _ in range(self._options.rounds):
            found = {}
            for batch in self._options.batches:
                serving, steps = self._together(ALONE, batch)
                full = steps.spread("batch") == batch
                # The first step has the prompts in it, as SGLang's has not: both are skipped.
                found[batch] = steady(np.frombuffer(steps.latency_ms)[full], self._options.skip_steps)
                of_step = {
                    "decode_ms": np.frombuffer(steps.decode_ms),
                    "launch_ms": np.asarray(serving.launch_delay_ms),
                }
                for name, values in of_step.items():
                    kept = parts[str(batch)].setdefault(name, [])
                    kept.append(float(np.median(steady(values[full], self._options.skip_steps))))
            rounds.append(found)
        return {**decoded(rounds), "median_parts_of_each_round": parts}

    def job(self) -> dict[str, Any]:
        """What a job adds to the start: it is built, and one optimizer step runs on each finetune stream."""
        if self._job is not None:
            return self._job
        begin_s = time.perf_counter()
        self._instance.add_job(job_settings(self._scenario, self._options, shared=self._shared))
        built_s = time.perf_counter() - begin_s
        self._instance.warm_up()
        total_s = time.perf_counter() - begin_s
        self._job = {
            "total_s": total_s,
            "build_s": built_s,
            "warm_up_s": total_s - built_s,
            "weights_shared": self._shared,
        }
        return self._job

    def decisions(self) -> dict[str, Any]:
        """Plan and predict beside a job, under a trace's load; from the first request on, while the batch grows."""
        self.job()
        options, instance, units = self._options, self._instance, self._units()
        instance.decoder.prefill = options.prefill
        load = Load(options.trace or azure_conv(), options.load, options.load_s, instance.vocab, options.trace_skip_s)
        serving, steps = self._serve(options.policy, load.book(), load.specs(), load, options.load_s)
        instance.settle()
        decide_us = np.asarray(serving.decide_ms) * 1e3
        return {
            "policy": options.policy,
            "offered_tokens_per_s": options.load,
            "steps": len(steps),
            "mean_batch": float(steps.spread("batch").mean()),
            "decide_us": distribution(decide_us),
            "decide_us_a_step": float(decide_us.sum()) / len(steps),
            "launch_ms": distribution(np.asarray(serving.launch_delay_ms)),
            "units": self._units(units),
        }

    def launch(self) -> dict[str, Any]:
        """Launches of the same batch without and with finetuning beside it, in turns; and how late an end is seen."""
        self.job()
        units = self._units()
        self._instance.decoder.prefill = self._options.prefill
        launch_ms: dict[str, list[NDArray[np.float64]]] = {"alone": [], "beside": []}
        unseen_ms: dict[str, list[NDArray[np.float64]]] = {"alone": [], "beside": []}
        for _ in range(self._options.rounds):
            for kind, policy in (("alone", ALONE), ("beside", self._options.policy)):
                with looks(self._instance) as gaps:
                    serving, _ = self._together(policy, self._options.launch_batch)
                launch_ms[kind].append(steady(serving.launch_delay_ms, self._options.skip_steps))
                unseen_ms[kind].append(steady(gaps, self._options.skip_steps))
        launches = {name: distribution(np.concatenate(parts)) for name, parts in launch_ms.items()}
        unseen = {name: distribution(np.concatenate(parts)) for name, parts in unseen_ms.items()}
        return {
            "policy": self._options.policy,
            "batch": self._options.launch_batch,
            "launch_ms": launches,
            "added_us": added(launches),
            "end_unseen_ms": unseen,
            "end_unseen_added_us": added(unseen),
            "units": self._units(units),
        }

    brief = staticmethod(short)

    def _together(self, policy: str, batch: int) -> tuple[ServingLoop, StepBook]:
        """``batch`` requests that come and go together."""
        prompt_tokens, output_tokens = self._options.prompt_tokens, self._options.output_tokens
        specs = [RequestSpec(index, 0.0, prompt_tokens, output_tokens) for index in range(batch)]
        book = RequestBook(np.full(batch, prompt_tokens), np.full(batch, output_tokens))
        return self._serve(policy, book, specs, None, None)

    def _serve(
        self, policy: str, book: RequestBook, specs: list[RequestSpec], load: Load | None, seconds: float | None
    ) -> tuple[ServingLoop, StepBook]:
        options, instance = self._options, self._instance
        made = self._scenario.contexts.policies(policy, {})[0]
        limits = LoopLimits(options.max_batch, seconds)
        prompt = [7] * options.prompt_tokens
        prompt_of = load.prompt if load is not None else lambda _: prompt
        serving, steps = instance.serve(made, book, iter(specs), prompt_of, options.qos_ms, limits)
        with instance.on_stream():
            serving.run()
        return serving, steps

    def _units(self, before: int | None = None) -> int:
        """Units launched, since there were ``before``; a job that stands still is no load to measure beside."""
        job = self._instance.job
        assert job is not None
        if job.pump.failure is not None:
            raise SystemExit(f"the finetuning job stopped: {job.pump.failure}")
        if before is None:
            return job.pump.launched
        if job.pump.launched == before:
            raise SystemExit(f"no unit fitted beside decode within {self._options.qos_ms:g} ms: raise --qos-ms")
        return job.pump.launched - before


@contextmanager
def looks(instance: Instance) -> Iterator[list[float]]:
    """For each step, milliseconds between the look that saw its end and what came before: how long it may have been over.

    What came before is the last look that did not see it, or the launch.
    """
    decoder, gaps = instance.decoder, []
    launch, done = decoder.launch, decoder.done
    last_s = 0.0

    def launched(group: int, behind: Any = None) -> bool:
        nonlocal last_s
        some = launch(group, behind)
        last_s = time.perf_counter()
        return some

    def looked() -> bool:
        nonlocal last_s
        over = done()
        now_s = time.perf_counter()
        if over:
            gaps.append((now_s - last_s) * 1e3)
        last_s = now_s
        return over

    decoder.launch, decoder.done = launched, looked  # type: ignore[method-assign]
    try:
        yield gaps
    finally:
        del decoder.launch, decoder.done


def added(found: dict[str, Any]) -> dict[str, float]:
    """What finetuning adds to the quantiles, in microseconds."""
    alone, beside = found["alone"], found["beside"]
    return {name: round((beside[name] - alone[name]) * 1e3, 1) for name in ("p50", "p99", "max")}
