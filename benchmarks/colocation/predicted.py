"""Would the simulator have said so? Every measured cell, simulated at the same load, target and memory. See README.md.

    HARLI_SHARED=FOLDER python benchmarks/colocation/predicted.py                  # no GPU, a minute or two
    HARLI_SHARED=FOLDER python benchmarks/colocation/predicted.py --samples FILE   # on the GPU that 'harli profile' measured

Reads the cells of ``results``, writes ``results/predicted.json`` (``predicted_from_FILE.json``) and prints it as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.progress import track  # noqa: E402

from benchmarks.colocation.load import Load  # noqa: E402
from benchmarks.colocation.plan import PLAN, RUN_AS, WARM_UP_S, Group, Point, gains_of, result_name  # noqa: E402
from benchmarks.colocation.process import process_options, run_settings  # noqa: E402
from benchmarks.record import azure_conv, provenance, results_folder, write_json  # noqa: E402
from harli_cli.scenario import Scenario  # noqa: E402
from harli_core.config import RunConfig  # noqa: E402
from harli_core.errors import ConfigError, SampleError  # noqa: E402
from traces import LoadedTrace  # noqa: E402
from traces.schema import Repairs, RequestTrace  # noqa: E402

Cell = dict[str, Any]


def measured_cells(results: Path) -> Iterator[tuple[Group, Point, Cell]]:
    """Points that were measured, with their result files."""
    for group, points in PLAN.items():
        for point in points:
            path = results / f"{result_name(group, point)}.json"
            if path.exists():
                yield group, point, json.loads(path.read_text("utf-8"))


class Simulated:
    """One point of the plan, in simulation."""

    def __init__(self, options: argparse.Namespace, group: Group, point: Point, target_ms: float) -> None:
        """The settings that the GPU had."""
        given = argparse.Namespace(
            **{
                **vars(options),
                "pair": [group.served, group.finetuned],
                "memory_gb": group.memory_gb,
                "qos_ms": target_ms,
            }
        )
        self._shared = group.shared and group.served == group.finetuned
        self._point, self._options, self._given = point, options, given
        self._end_s = WARM_UP_S + point.window_s

    def cell(self, policy: str) -> Cell:
        """Finetune tokens/s, and the step latency, in the window that was measured on the GPU."""
        named = RUN_AS.get(policy, policy)
        load = Load(self._options.trace or azure_conv(), self._point.offered_tokens_per_s(policy), self._end_s, 1000)
        first_s = float(load.arrival_s[0])
        trace = RequestTrace.of(
            load.arrival_s - first_s, load.prompt_tokens, load.output_tokens, source="Azure conversation"
        )
        apart = {"gpus": 2, "serving_gpus": 1} if named == "separate" else {}
        config = RunConfig(
            **{**run_settings(self._given, shared=self._shared), **apart},
            horizon_s=self._end_s - first_s,
            policy=named,
        )
        scenario = Scenario(config, LoadedTrace(trace, "azure", Repairs()))
        outcome, _ = scenario.run(named, {"serving_gpus": 1} if apart else {})
        steps = outcome.steps
        if policy == "separate_finetuning":
            tokens = sum(state.finetune_tokens for state in outcome.instances)
            return {"finetune_tokens_per_s": tokens / outcome.duration_s}
        late = steps.ends_s() > WARM_UP_S - first_s
        latency_ms = np.frombuffer(steps.latency_ms)[late]
        at_s, progress = steps.span_column("start_s"), steps.span_column("finetune_tokens")
        begin_s, end_s = WARM_UP_S - first_s, min(self._end_s - first_s, float(at_s[-1]))
        first, last = np.interp((begin_s, end_s), at_s, progress)
        return {
            "finetune_tokens_per_s": float(last - first) / (end_s - begin_s),
            "p50_ms": float(np.quantile(latency_ms, 0.5)),
            "p99_ms": float(np.quantile(latency_ms, 0.99)),
            "steps_over_target": int((latency_ms > config.qos_ms).sum()),
        }


def of_gpu(cell: Cell) -> Cell:
    """The same figures of a measured cell."""
    latency = cell.get("step_latency_ms") or {}
    return {
        "finetune_tokens_per_s": (cell.get("finetune") or {}).get("tokens_per_s"),
        "p50_ms": latency.get("p50"),
        "p99_ms": latency.get("p99"),
        "steps_over_target": cell.get("steps_over_target"),
    }


def gains(cells: dict[str, Cell]) -> dict[str, float]:
    """Over `separate`, by policy."""
    return gains_of({policy: cell.get("finetune_tokens_per_s") for policy, cell in cells.items()})


def table(points: list[Cell]) -> str:
    """Measured and simulated side by side."""
    lines = [
        "| served, finetuned | load, tokens/s | target, ms | policy | finetune tokens/s: H200 / simulated "
        "| over `separate` | step latency p50, ms | p99, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        named = (point["pair"].replace("__", ", "), f"{point['load_tokens_per_s']:,}", f"{point['target_ms']:g}")
        for policy, both in point["policies"].items():
            gpu, simulated = both["h200"], both["simulated"]
            gains = both["gain_over_separate"]
            columns = (
                *named, f"`{policy}`",
                pair(gpu, simulated, "finetune_tokens_per_s", ",.0f"),
                "" if None in gains else f"{gains[0]:+.0%} / {gains[1]:+.0%}",
                pair(gpu, simulated, "p50_ms", ".1f"), pair(gpu, simulated, "p99_ms", ".1f"),
            )  # fmt: skip
            lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def pair(gpu: Cell, simulated: Cell, name: str, form: str) -> str:
    """Two figures, or nothing where one of them means nothing."""
    first, second = gpu.get(name), simulated.get(name)
    return f"{first:{form}} / {second:{form}}" if first and second else ""


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    process_options(parser)
    parser.add_argument("--trace", type=Path, default=None, help="the trace that was replayed [default: Azure]")
    parser.set_defaults(runtime_gb=24.0)
    return parser.parse_args()


def main() -> None:
    """Simulate, compare, write."""
    options = parsed()
    points, left_out = [], []
    for group, point, document in track(list(measured_cells(results_folder(__file__))), description="points"):
        simulated = Simulated(options, group, point, document["target_ms"])
        try:
            cells = {policy: simulated.cell(policy) for policy in document["cells"]}
        except (ConfigError, SampleError) as error:
            if options.samples is None:
                raise
            left_out.append(f"{group.name}, {point.name}: {error}")  # samples are of one pair of models
            continue
        gpu = {policy: of_gpu(cell) for policy, cell in document["cells"].items()}
        gains_on_gpu = document["gain_over_separate"]
        points.append(
            {
                "pair": group.name,
                "load_tokens_per_s": point.load_tokens_per_s,
                "target_ms": document["target_ms"],
                "policies": {
                    policy: {
                        "h200": gpu[policy],
                        "simulated": cells[policy],
                        "gain_over_separate": [gained.get(policy) for gained in (gains_on_gpu, gains(cells))],
                    }
                    for policy in cells
                },
            }
        )
    if left_out and not points:
        raise SystemExit("\n".join(f"left out: {line}" for line in left_out))  # and a result that is there stays
    name = "predicted" if options.samples is None else f"predicted_from_{Path(options.samples).stem}"
    target = results_folder(__file__) / f"{name}.json"
    write_json(
        target,
        {
            "benchmark": "predicted",
            **provenance(" ".join(["python", *sys.argv])),
            "samples": options.samples and Path(options.samples).name,
            "points": points,
        },
    )
    print(table(points))
    for line in left_out:
        print(f"left out: {line}")
    print(f"\nwritten: {target}")


if __name__ == "__main__":
    main()
