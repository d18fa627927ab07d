"""How much of a step is lost where decode ends and its turn begins? The GPU loop on streams of arithmetic. See README.md.

    python benchmarks/colocation/turn_edges.py        # no GPU, a minute or two; needs the extension

`Interleaving`, `UnitPump` and `Turn` are the ones of a server; what they launch takes as long as in a measured cell of
``results``, by kind of unit and SMs. Writes ``results/turn_edges.json``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from loky import ProcessPoolExecutor  # noqa: E402
from rich.progress import track  # noqa: E402

from backends.cuda.serving.interleaving import Interleaving  # noqa: E402
from backends.cuda.serving.unit_pump import UnitPump  # noqa: E402
from benchmarks.record import provenance, results_folder, write_json  # noqa: E402
from harli_core.types import UnitKind  # noqa: E402
from tests.native.software_gpu import SoftwareGpu, Stream, Streams, UnitWork  # noqa: E402

CELLS = tuple(f"llama3-8b__llama3-8b_{load}tps_40ms" for load in (400, 1600, 3200))
ACCUMULATED = 4
MICRO_BATCH: dict[UnitKind, int] = {"forward": 32, "head_loss": 1, "backward": 32}
OPTIMIZER_STEP: list[UnitKind] = [
    *[kind for kind, count in MICRO_BATCH.items() for _ in range(count)] * ACCUMULATED,
    "optimizer",
]

HOST_MS = 0.3
"""Results of a step, and then admission and plan, take the host so long each."""

LOOK_MS = 0.02
"""The host looks this often at what is in flight."""

GRAPH_LAUNCHED = 0.85
"""The part of a step's launch after which its graph is enqueued."""

STEADY_FROM = 20


class MeasuredCell:
    """Durations of one cell under `hybrid`, on the split that it was on most."""

    def __init__(self, path: Path) -> None:
        """Reads a file that `cells.py` wrote."""
        cell = json.loads(path.read_text("utf-8"))["cells"]["hybrid"]
        splits = cell["by_decode_sms"]
        decode_sms, split = max(splits.items(), key=lambda item: item[1]["steps"])
        self.name = path.stem
        self.decode_sms, self.finetune_sms = int(decode_sms), 132 - int(decode_sms)
        self.decode_ms, self.turn_budget_ms = split["decode_ms"], split["turn_budget_ms"]
        self.edge_ms = split["latency_ms"] - split["decode_ms"] - split["turn_ms"]
        self.launch_ms = cell["launch_ms"]["mean"]
        self.launch_spread_ms = (cell["launch_ms"]["p90"] - cell["launch_ms"]["p50"]) / 1.28
        finetune = cell["finetune"]
        self.unit_launch_ms: dict[UnitKind, float] = {
            kind: times["mean_ms"] for kind, times in finetune["unit_launches"].items()
        }
        self._unit_ms = {(row["kind"], row["sms"]): row["mean_ms"] for row in finetune["units"]}

    def unit_ms(self, kind: UnitKind, _tokens: int, sms: int) -> float:
        """How long a unit took there."""
        return float(self._unit_ms[kind, sms])

    def micro_batch_ms(self, sms: int) -> float:
        """All units of a micro-batch, and its share of the optimizer's."""
        return sum(self.unit_ms(kind, 0, sms) for kind in OPTIMIZER_STEP) / ACCUMULATED


class NoisyWork(UnitWork):
    """Units that take as long as in the cell, one in a hundred more or less."""

    def __init__(self, gpu: SoftwareGpu, streams: Streams, cell: MeasuredCell, noise: random.Random) -> None:
        """None has run."""
        super().__init__(gpu, streams, OPTIMIZER_STEP)
        self.launch_ms = dict(cell.unit_launch_ms)
        self._cell, self._noise = cell, noise

    def took_ms(self, kind: UnitKind, sms: int) -> float:
        """See `UnitWork`."""
        return self._cell.unit_ms(kind, 0, sms) * self._noise.gauss(1.0, 0.01)


def run(cell: MeasuredCell, steps: int, seed: int) -> dict[str, Any]:
    """``steps`` steps under one plan; means in ms, and finetuning as a part of what it does alone."""
    noise = random.Random(seed)
    gpu = SoftwareGpu()
    work = NoisyWork(gpu, Streams(gpu), cell, noise)
    pump = UnitPump(work, work.streams, gpu, cell.unit_ms)  # type: ignore[arg-type]
    decoder: Any = SimpleNamespace(stream=Stream(gpu), launched_end=None, began_ms=0.0)
    decoder.done = lambda: gpu.passed(decoder.launched_end)
    plans: Any = SimpleNamespace(boundary_ms=0.0, turn_begun=False)
    interleaving = Interleaving(decoder, work.streams, gpu, plans, SimpleNamespace(pump=pump))  # type: ignore[arg-type]
    plan = SimpleNamespace(jobs=(1,), decode_sms=cell.decode_sms, hold=SimpleNamespace(max_step_ms=None))
    held: Any = SimpleNamespace(
        plan=plan, turn_budget_ms=cell.turn_budget_ms, elapsed_ms=0.0, finetune_sms=cell.finetune_sms, steps_left=9
    )

    def look(_due_ms: float | None) -> bool:
        gpu.now += LOOK_MS
        return True

    def host() -> None:
        gpu.now += max(0.1, noise.gauss(HOST_MS, 0.1))

    rows = []
    for _ in range(steps):
        while not interleaving.take_turn(held, lambda _until_ms: False):
            gpu.now += LOOK_MS
        ready_ms = gpu.now
        launch_ms = max(0.5, noise.gauss(cell.launch_ms, cell.launch_spread_ms))
        gpu.now += GRAPH_LAUNCHED * launch_ms
        behind = interleaving.behind(cell.decode_sms)
        if behind is not None:
            decoder.stream.wait_event(behind)
        begin, decoder.began_ms = gpu.mark(decoder.stream), gpu.now_ms()
        begin_ms, end_ms = decoder.stream.run(noise.gauss(cell.decode_ms, 0.15))
        decoder.launched_end = gpu.mark(decoder.stream)
        gpu.now += (1 - GRAPH_LAUNCHED) * launch_ms
        interleaving.lead.add(gpu.now - ready_ms)
        interleaving.beside(held, look)
        now_ms = gpu.now
        host()
        turn_ms = interleaving.over(held, now_ms, SimpleNamespace(decode_ms=end_ms - begin_ms, begin=begin))  # type: ignore[arg-type]
        rows.append((now_ms - plans.boundary_ms, end_ms - begin_ms, turn_ms))
        plans.boundary_ms = now_ms
        host()
    latency_ms, decode_ms, turn_ms = np.array(rows[STEADY_FROM:]).T
    edge_ms, mean_ms = latency_ms - decode_ms - turn_ms, float(latency_ms.mean())
    alone_ms, beside_ms = cell.micro_batch_ms(132), cell.micro_batch_ms(cell.finetune_sms)
    decoding = float(decode_ms.mean())
    done = len(work.ran) / len(OPTIMIZER_STEP) * ACCUMULATED * alone_ms
    return {
        "cell": cell.name,
        "decode_sms": cell.decode_sms,
        "steps": steps,
        "latency_ms": mean_ms,
        "edge_ms": {"mean": float(edge_ms.mean()), "p50": float(np.median(edge_ms)), "measured": cell.edge_ms},
        "of_finetuning_alone": done / gpu.now,
        "without_edges": (mean_ms - decoding + decoding * alone_ms / beside_ms) / mean_ms,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [
        "| cell | SMs for decode | step, ms | lost at the edge, ms: mean / p50 / mean on the H200 "
        "| of finetuning alone | without edges |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        edge = row["edge_ms"]
        lines.append(
            f"| {row['cell']} | {row['decode_sms']} | {row['latency_ms']:.1f} | {edge['mean']:.2f} / {edge['p50']:.2f} / "
            f"{edge['measured']:.2f} | {row['of_finetuning_alone']:.1%} | {row['without_edges']:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each cell [default: 1000]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="turn_edges", help="name of the result file [default: turn_edges]")
    options = parser.parse_args()
    cells = [MeasuredCell(Path(__file__).parent / "results" / f"{name}.json") for name in CELLS]
    with ProcessPoolExecutor() as pool:
        under_way = [pool.submit(run, cell, options.steps, options.seed) for cell in cells]
        rows = [one.result() for one in track(under_way, description="cells")]
    target = results_folder(__file__) / f"{options.out}.json"
    write_json(target, {"benchmark": "turn_edges", **provenance(" ".join(["python", *sys.argv])), "cells": rows})
    print(table(rows))
    print(f"\nwritten: {target}")


if __name__ == "__main__":
    main()
