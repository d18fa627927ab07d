"""Memory, window, batch and latency through a light, a heavy and a medium phase (the paper's Fig. 13). See README.md.

    python benchmarks/colocation/phases.py --backend cuda        # one H200; --backend sim needs no GPU

Writes ``results/phases_<backend>.json``, and the run with its ``report.html`` into ``--out``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import backends.cuda  # noqa: F401  the installed packages, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import policies  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.*, ahead of other packages' folders

import numpy as np
from numpy.typing import NDArray

from benchmarks.colocation.step_tables import slow_launches, worst
from benchmarks.record import azure_conv, provenance, results_folder, write_json
from harli_cli.report.columns import ResultColumns, columns_of
from harli_cli.report.digest import digest
from harli_cli.report.pages import run_report
from harli_cli.results import write_results
from harli_cli.run import sections
from harli_cli.scenario import Scenario
from harli_core.config import RunConfig
from harli_core.memory.reservation import Reservation
from harli_core.records import RequestBook, StepBook
from harli_core.summary import distribution
from traces import LoadedTrace, load_trace
from traces.generators import PHASE_BATCHES, Recipe, generate
from traces.registry import seeded
from traces.schema import RepairOptions, Repairs, RequestTrace

SERIES = ("batch", "rows_kv", "rows_lent", "window_layers", "latency_ms", "latency_max_ms", "finetune_tokens_per_s")
Books = tuple[dict[str, Any], RequestBook, StepBook]

RUNTIME_GB = {"sim": 6.0, "cuda": 16.0}
"""Kept from the pool: in simulation a job's embeddings and activations lie in lent rows, on the GPU in torch's memory."""


def trace_of(options: argparse.Namespace, lengths: RequestTrace) -> RequestTrace:
    """Arrivals of the phases, with the lengths of a real trace."""
    recipe = Recipe(
        options.duration_s, batches=tuple(options.batches), step_ms=options.step_ms or options.qos_ms, lengths=lengths
    )
    return generate("phases", seeded(options.seed), recipe)


def simulated(scenario: Scenario) -> tuple[Books, dict[str, Any]]:
    """The run on the device model."""
    config = scenario.config
    outcome, device = scenario.run(config.policy, {})
    summary = {"config": config.model_dump(), **sections(scenario, outcome, device)}
    return (summary, outcome.requests, outcome.steps), {"reclaims": None, "serving": None}


def measured(scenario: Scenario, options: argparse.Namespace) -> tuple[Books, dict[str, Any]]:
    """The run on this machine, and each row that came back."""
    from backends.cuda.serving import sglang_version
    from benchmarks.allocator.measuring import commit, machine
    from benchmarks.colocation.process import instance_of
    from harli_cli.gpu_run import GpuOptions, run_on

    instance = instance_of(scenario, options, shared=False)
    assert instance.job is not None
    given = GpuOptions(None, "dummy", options.prefill, None, options.device)
    serve, loops = instance.serve, []

    def served(*arguments: Any, **options: Any) -> Any:
        made = serve(*arguments, **options)
        loops.append(made[0])
        return made

    instance.serve = served  # type: ignore[method-assign]
    before = instance.stalls.look()
    books = run_on(instance, scenario.config, given, scenario, None, quiet)
    stalls = instance.stalls.since(before)
    zero_ms = books[0]["gpu"]["began_s"] * 1e3
    rows = [((row.asked_ms - zero_ms) / 1e3, row.took_ms) for row in instance.job.memory.reclaims]
    return books, {
        "machine": machine(),
        "commit": commit(),
        "sglang": sglang_version.installed(),
        "partitions": instance.partitions.kind,
        "startup_s": instance.startup_s,
        "layers": options.layers,
        "gpu_memory_gb": memory_gb(options.device),
        "host_stalls": stalls,
        "unit_graphs": graph_counters(instance),
        "slow_launches": slow_launches(instance.job.pump.times, zero_ms / 1e3),
        "finetune_stopped": books[0]["finetune"]["stopped"],
        "serving": loops[0],
        "reclaims": [row for row in rows if row[0] >= 0.0],
    }


def graph_counters(instance: Any) -> dict[str, Any] | None:
    """Captures of finetune units; those of the warm-up are among them."""
    counters = getattr(instance.engine.runner, "counters", None) if instance.engine is not None else None
    return None if counters is None else asdict(counters)


def memory_gb(device: str) -> dict[str, Any] | None:
    """What is taken of the GPU now, by whoever; what torch holds of it, and what of that is in use. The pool is neither."""
    if device != "cuda":
        return None
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    held, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    by_stream: dict[int, float] = {}
    in_pools = 0.0
    for segment in torch.cuda.memory_snapshot():
        size_gb = segment["total_size"] / 1e9
        if tuple(segment["segment_pool_id"]) == (0, 0):
            by_stream[segment["stream"]] = by_stream.get(segment["stream"], 0.0) + size_gb
        else:
            in_pools += size_gb
    return {
        "used": (total_bytes - free_bytes) / 1e9,
        "torch_holds": held / 1e9,
        "torch_uses": used / 1e9,
        "held_by_graphs": round(in_pools, 2),
        "held_by_stream": [round(size_gb, 2) for size_gb in sorted(by_stream.values(), reverse=True)],
    }


def keep(out: Path, books: Books) -> None:
    """The result files and their report, as far as this machine has the packages for them."""
    if find_spec("pyarrow") is None:
        print(f"no pyarrow here: nothing is kept in {out}")
        return
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, *books)
    if find_spec("plotly") is not None:
        run_report(out)  # elsewhere: 'harli report'


def quiet(_name: str, _total: int) -> Any:
    """Nobody watches."""
    return lambda _count: None


def by_phase(result: ResultColumns, waiting: NDArray[Any], duration_s: float, phases: int) -> list[dict[str, Any]]:
    """Steps that end in the second half of each phase, when its batch has come about."""
    steps, target_ms = result.steps, float(result.summary["config"]["qos_ms"])
    found = []
    for number in range(phases):
        begin_s, end_s = (number + 0.5) * duration_s / phases, (number + 1) * duration_s / phases
        chosen = (steps["end_s"] >= begin_s) & (steps["end_s"] < end_s)
        weights = steps["latency_ms"][chosen]
        means = {
            name: float(np.average(steps[name][chosen], weights=weights)) if chosen.any() else None
            for name in ("batch", "rows_kv", "rows_lent", "window_layers")
        }
        tokens = steps["finetune_tokens"][chosen]
        found.append(
            {
                "from_s": begin_s,
                "to_s": end_s,
                **means,
                "latency_ms": distribution(weights.astype(np.float64)),
                "steps_over_target": int((weights > target_ms).sum()),
                "steps_with_requests_waiting": int((waiting[chosen] > 0).sum()),
                "finetune_tokens_per_s": float(tokens[-1] - tokens[0]) / (end_s - begin_s) if len(tokens) > 1 else None,
            }
        )
    return found


def reclaiming(rows: list[tuple[float, float]], end_s: NDArray[Any], reservation: Reservation) -> dict[str, Any]:
    """How long rows took to come back, in time and in steps, against what the reservation holds back for."""
    asked_s = np.array([asked for asked, _ in rows])
    took_ms = np.array([took for _, took in rows])
    steps = np.searchsorted(end_s, asked_s + took_ms / 1e3) - np.searchsorted(end_s, asked_s)
    reserved = -(-reservation.give_back_ms // reservation.step_ms)
    return {
        "rows": len(rows),
        "took_ms": distribution(took_ms),
        "steps": distribution(steps.astype(np.float64)),
        "reserved_ms": reservation.give_back_ms,
        "reserved_steps": reserved,
        "rows_later_than_reserved_ms": int((took_ms > reservation.give_back_ms).sum()),
        "rows_later_than_reserved_steps": int((steps > reserved).sum()),
        "each": [
            [round(asked, 4), round(took, 3), int(count)] for (asked, took), count in zip(rows, steps, strict=True)
        ],
    }


def parsed() -> argparse.Namespace:
    """The command line."""
    from benchmarks.colocation.process import process_options

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    process_options(parser)
    parser.add_argument("--backend", choices=("sim", "cuda"), required=True)
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--duration-s", type=float, default=120.0, help="all phases together")
    parser.add_argument("--batches", type=float, nargs="+", default=list(PHASE_BATCHES))
    parser.add_argument(
        "--step-ms", type=float, default=None, help="step that batches are meant at [default: the target]"
    )
    parser.add_argument("--lengths", type=Path, default=None, help="trace whose lengths are replayed [default: Azure]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for the run and report.html [default: none kept]"
    )
    parser.set_defaults(memory_gb=48.0, runtime_gb=None, no_sharing=True)
    return parser.parse_args()


def main() -> None:
    """Run, digest, write."""
    from benchmarks.colocation.process import run_settings

    options = parsed()
    options.runtime_gb = RUNTIME_GB[options.backend] if options.runtime_gb is None else options.runtime_gb
    given = load_trace(str(options.lengths or azure_conv()), seed=0, repairs=RepairOptions(sort=True)).trace
    trace = trace_of(options, given)
    settings = {**run_settings(options, shared=False), "policy": options.policy}
    config = RunConfig(**settings, seed=options.seed, horizon_s=options.duration_s)
    scenario = Scenario(config, LoadedTrace(trace, "generated", Repairs()))
    books, found = simulated(scenario) if options.backend == "sim" else measured(scenario, options)
    if options.out is not None:
        keep(options.out, books)
    summary, _, steps = books
    result, reservation = columns_of(*books), scenario.contexts.reservation
    drawn = digest(result)
    rows, serving = found.pop("reclaims"), found.pop("serving")
    document = {
        "benchmark": "phases",
        "backend": options.backend,
        **provenance(" ".join(["python", *sys.argv])),
        **found,
        "config": {**config.model_dump(), "trace": f"phases, lengths of {Path(given.source).name}"},
        "batches": options.batches,
        "pool": {name: summary["memory"][name] for name in ("rows", "row_bytes", "rows_lent", "rows_reclaimed")},
        "requests": summary["requests"],
        "worst_steps": worst(steps, np.ones(len(steps), dtype=bool), serving),
        "violations": summary["steps"]["violations"],
        "ttft_ms": summary["ttft_ms"],
        "finetune_tokens_per_s": summary["finetune"]["tokens_per_s"],
        "phases": by_phase(result, steps.spread("waiting"), options.duration_s, len(options.batches)),
        "reclaiming": None if rows is None else reclaiming(rows, result.steps["end_s"], reservation),
        "series": {"time_s": drawn["time_s"], **{name: drawn["series"][name] for name in SERIES}},
    }
    name = f"phases_{options.backend}" + ("" if options.device == "cuda" else "_on_a_cpu")
    target = results_folder(__file__) / f"{name}.json"
    write_json(target, document)
    print(json.dumps({"phases": document["phases"], "written": str(target)}, indent=1))


if __name__ == "__main__":
    main()
