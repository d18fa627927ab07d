"""Finetuning alone on a GPU: against a plain loop, by window size, unit lengths, and on part of the chip. See README.md."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.* and the packages of the checkout

import numpy as np
import torch

from backends.cuda.finetune.assembly import build_engine
from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.layer_graphs import GraphRunner
from backends.cuda.finetune.layer_runner import EagerRunner
from backends.cuda.finetune.optimizer_step import UnitSettings
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.unit_fit import fit_units
from benchmarks.allocator.measuring import commit, machine
from benchmarks.finetune.breakdown import (
    against_plain,
    plain_breakdown,
    products_tflop,
    stage_copy_ms,
    unit_breakdown,
)
from benchmarks.finetune.partition import partition_stream
from benchmarks.finetune.random_model import PlainLoop, random_feed, random_model, seconds_a_step, shape_of
from benchmarks.finetune.timing import (
    chip_sms,
    finish,
    peak_gib,
    percentiles,
    plain_step,
    reset_peak,
    run_step,
    unit_lengths,
)
from benchmarks.record import results_folder, write_json

PARTS = ("alone", "breakdown", "window", "units", "partitions")
PARTITIONS_SMS = (32, 64, 96, 112, 120)
ENDLESS = 1_000_000


class Bench:
    """One model, its engine built once, and the results file that grows part by part."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        """Read what is there already."""
        self.name, self.options = name, options
        self.shape = shape_of(name)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.path = results_folder(__file__) / f"{name}_{options.targets}.json"
        self.figures: dict[str, Any] = {}
        self.made_by: dict[str, Any] = {}
        self.measured: set[str] = set()
        if self.path.exists():
            earlier = json.loads(self.path.read_text())
            self.figures = earlier["parts"]
            self.made_by = {part: earlier.get("made_by", {}).get(part, earlier["commit"]) for part in self.figures}
        self.model: Any = None
        self.engine: FinetuneEngine | None = None
        self.stream = torch.cuda.Stream() if self.device == "cuda" else None

    def missing(self, part: str) -> bool:
        """Whether ``part`` is asked for and not there, or there from an earlier run and asked for again."""
        there = self.measured if self.options.again else self.figures
        return part in self.options.parts and part not in there

    def save(self, part: str, figures: Any) -> None:
        """Add a part to the results file, at once or not at all."""
        self.figures[part] = figures
        self.made_by[part] = commit()
        self.measured.add(part)
        record = {
            "benchmark": f"finetune {self.name}",
            "machine": machine(),
            "commit": commit(),
            "made_by": self.made_by,
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "lora": {"targets": self.options.targets, "rank": self.options.rank},
            "parts": self.figures,
        }
        write_json(self.path, record, sort_keys=False)
        print(json.dumps({self.name: {part: figures}}), flush=True)

    def build_model(self) -> Any:
        """The model, on the GPU as a plain loop has it."""
        if self.model is None:
            self.model = random_model(self.name, self.options.targets, self.options.rank, self.device, self.dtype)
        return self.model

    def build_engine(self) -> FinetuneEngine:
        """The engine, all layers resident; the model moves to the host first."""
        if self.engine is None:
            self.build_model().to("cpu")
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            window = self.shape.layers
            self.engine = build_engine(
                self.model,
                random_feed(self.shape.vocab, self.options.length, 1, 2),
                Recipe(max_steps=ENDLESS, learning_rate=1e-5, lr_scheduler_type="constant"),
                device=self.device,
                window_layers=window,
                settings=UnitSettings(),
            )
        return self.engine

    def steps(
        self, rows: int, accumulation: int, settings: UnitSettings, stream: Any, length: int | None = None
    ) -> float:
        """Tokens a second of the engine, every step the same batch shape."""
        engine, options = self.build_engine(), self.options
        length = length or options.length
        engine.feed = random_feed(self.shape.vocab, length, rows, accumulation)
        engine.recut(settings)
        times = seconds_a_step(lambda _: run_step(engine, stream), options.steps, options.warm_up)
        return rows * accumulation * length / float(np.median(times))

    def alone(self) -> None:
        """The whole chip against the plain loop at the same batches, memory included."""
        options = self.options
        found: dict[str, Any] = {}
        for rows in options.rows:
            feed = random_feed(self.shape.vocab, options.length, rows, options.accumulation)
            for autocast in (False, True) if self.device == "cuda" else (False,):
                loop = PlainLoop(self.build_model(), autocast=autocast)
                reset_peak(self.device)
                times = seconds_a_step(partial(plain_step, loop, feed), options.steps, options.warm_up)
                name = "plain_autocast" if autocast else "plain_bf16"
                found.setdefault(f"rows_{rows}", {})[name] = {
                    "tokens_per_s": rows * options.accumulation * options.length / float(np.median(times)),
                    "peak_gib": peak_gib(self.device),
                }
                loop.close()
        self.build_engine()
        for rows in options.rows:
            for name, settings in (("harli", self.cut(rows)), ("harli_group_1", self.cut(rows, group=1))):
                reset_peak(self.device)
                rate = self.steps(rows, options.accumulation, settings, self.stream)
                found[f"rows_{rows}"][name] = {"tokens_per_s": rate, "peak_gib": peak_gib(self.device)}
            entry = found[f"rows_{rows}"]
            fastest = max(value["tokens_per_s"] for key, value in entry.items() if key.startswith("plain"))
            entry["over_fastest_plain"] = entry["harli"]["tokens_per_s"] / fastest
        found["batch"] = {"length": options.length, "accumulation": options.accumulation}
        self.save("alone", found)

    def breakdown(self) -> None:
        """Where a step's time goes, kind by kind: the plain loop, units as graphs, and units kernel after kernel."""
        options = self.options
        if self.engine is not None:  # it has the model
            self.forget()
        found: dict[str, Any] = {}
        for rows in options.rows:
            feed = random_feed(self.shape.vocab, options.length, rows, options.accumulation)
            loop = PlainLoop(self.build_model(), autocast=False)
            found[f"rows_{rows}"] = {
                "plain_bf16": plain_breakdown(loop, feed.batch, options.steps, options.warm_up),
                "products_tflop_a_step": {"plain": products_tflop(partial(plain_step, loop, feed, 0))},
            }
            loop.close()
        engine = self.build_engine()
        graphs, eager = engine.runner, EagerRunner(engine.model.layers, engine.states.layers, engine.device)
        for rows in options.rows:
            entry = found[f"rows_{rows}"]
            for name, runner in (("harli", graphs), ("harli_eager", eager)):
                engine.runner = runner
                engine.feed = random_feed(self.shape.vocab, options.length, rows, options.accumulation)
                engine.recut(self.cut(rows))
                entry[name] = unit_breakdown(
                    engine, partial(run_step, engine, self.stream), self.stream, options.steps, options.warm_up
                )
                entry[f"{name}_against_plain"] = against_plain(entry[name], entry["plain_bf16"])
            entry["products_tflop_a_step"]["harli"] = products_tflop(partial(run_step, engine, self.stream))
            engine.runner = graphs
            entry["stage_copy_ms_a_unit"] = stage_copy_ms(engine, rows, options.length, self.stream)
        found["batch"] = {"length": options.length, "accumulation": options.accumulation}
        self.save("breakdown", found)

    def forget(self) -> None:
        """Let the engine and its model go."""
        assert self.engine is not None
        self.engine.close()
        self.engine = self.model = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def cut(self, rows: int, group: int | None = None) -> UnitSettings:
        """Head + loss in parts of at most 2,048 tokens."""
        return UnitSettings(group=group, head_parts=max(1, rows * self.options.length // 2048))

    def window(self) -> None:
        """Full, half and four layers resident, at few and at many micro-batches a step."""
        engine, layers = self.build_engine(), self.shape.layers
        found = []
        for accumulation in self.options.window_accumulation:
            for size in sorted({layers, layers // 2, min(4, layers)}, reverse=True):
                engine.shrink_window(size)
                engine.grow_window(size)
                swapped = engine.weights.swapped_bytes  # type: ignore[attr-defined]  # windowed here
                reset_peak(self.device)
                begin_s = perf_counter()
                rate = self.steps(1, accumulation, self.cut(1), self.stream)
                wall_s = perf_counter() - begin_s
                moved = engine.weights.swapped_bytes - swapped  # type: ignore[attr-defined]
                found.append(
                    {
                        "window_layers": size,
                        "layers": layers,
                        "micro_batches": accumulation,
                        "micro_batch_tokens": self.options.length,
                        "tokens_per_s": rate,
                        "swapped_gib_per_s": moved / wall_s / 2**30,
                        "peak_gib": peak_gib(self.device),
                    }
                )
        engine.grow_window(layers)
        for entry in found:
            full = next(
                e["tokens_per_s"]
                for e in found
                if e["micro_batches"] == entry["micro_batches"] and e["window_layers"] == layers
            )
            entry["over_full_window"] = entry["tokens_per_s"] / full
        self.save("window", found)

    def units(self) -> None:
        """Unit lengths against ``unit_ms``, the micro-batch chosen for it."""
        engine = self.build_engine()
        found = []
        for unit_ms, length in ((10.0, self.options.length), (2.0, self.options.length // 2)):
            feed = random_feed(self.shape.vocab, length, 32, 2)
            engine.feed = feed
            engine.recut(UnitSettings())
            fit = fit_units(engine, feed, unit_ms, length, self.stream)
            for _ in range(2):
                run_step(engine, self.stream)
            lengths = unit_lengths(engine, self.stream, self.options.steps)
            every = [value for values in lengths.values() for value in values]
            found.append(
                {
                    "unit_ms": unit_ms,
                    "length": length,
                    "micro_batch_tokens": fit.micro_batch_tokens,
                    "head_parts": fit.head_parts,
                    "all": percentiles(every),
                    "share_over": float(np.mean(np.asarray(every) > unit_ms)),
                    **{kind: percentiles(values) for kind, values in lengths.items()},
                }
            )
        self.save("units", found)

    def partitions(self) -> None:
        """Tokens a second on part of the chip over the same part of the whole chip's."""
        rows = max(self.options.rows)
        settings = self.cut(rows)
        accumulation = min(2, self.options.accumulation)
        total = chip_sms()
        whole = self.steps(rows, accumulation, settings, self.stream)
        found: dict[str, Any] = {"sms": total, "tokens_per_s": whole, "rows": rows, "partitions": []}
        runner = self.build_engine().runner
        assert isinstance(runner, GraphRunner)
        for sms in PARTITIONS_SMS:
            stream, has = partition_stream(sms)
            rate = self.steps(rows, accumulation, settings, stream)
            told = {key: value for key, value in runner.counters.targeted.items() if key.startswith(f"{has} SMs")}
            finish(self.device)
            runner.forget(stream)
            found["partitions"].append(
                {
                    "sms": has,
                    "tokens_per_s": rate,
                    "share_of_proportional": rate / whole * total / has,
                    "cublas_told_sms": told,
                }
            )
        self.save("partitions", found)


def main() -> None:
    """Measure what is asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["llama3-8b", "qwen2.5-7b"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--again", action="store_true", help="measure parts anew that the results have")
    parser.add_argument("--targets", choices=("qv", "all"), default="qv")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="samples of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--window-accumulation", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        options.parts = [part for part in options.parts if part != "partitions"]
    for name in options.models:
        bench = Bench(name, options)
        for part in options.parts:
            if bench.missing(part):
                begin_s = perf_counter()
                getattr(bench, part)()
                print(f"{name} {part}: {perf_counter() - begin_s:.1f} s", flush=True)
        del bench
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
