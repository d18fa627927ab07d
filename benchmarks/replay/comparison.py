"""Measure ``harli compare`` of all six policies, from the start of the process to the written result: wall and CPU time.

Run from the repository root: ``python benchmarks/replay/comparison.py``. Writes ``results/comparison.json`` beside this
file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.record import azure_conv, provenance, write_json  # noqa: E402
from benchmarks.replay.fresh_run import fresh_process  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
LIMIT_S = 90.0


def compared(arguments: list[str]) -> dict[str, float]:
    """One comparison in a process of its own, and its workers; `SystemExit` with its message if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        counted = fresh_process(["compare", *arguments, "--out", folder])
        document = json.loads((Path(folder) / "compare.json").read_text("utf-8"))
    counted["largest_process_mib"] = counted.pop("peak_mib")
    return {**counted, "policies": len(document["rows"])}


def main() -> None:
    """Measure several times and write the medians beside the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    asked = parser.parse_args()
    trace = azure_conv()
    options = ["--gpus", str(asked.gpus), "--seeds", str(asked.seeds)]
    runs = [compared(["--trace", str(trace), *options]) for _ in range(asked.repeats)]
    medians = {name: median(run[name] for run in runs) for name in runs[0]}
    document = {
        **provenance(f"python benchmarks/replay/comparison.py {' '.join(options)} --repeats {asked.repeats}"),
        "measured": f"harli compare --trace {trace.name} {' '.join(options)}, a fresh process and its workers",
        "cores": len(os.sched_getaffinity(0)),
        "limit_wall_s": LIMIT_S,
        "median": medians,
        "runs": runs,
    }
    write_json(asked.results / "comparison.json", document)
    print(
        f"{medians['policies']:.0f} policies, {asked.seeds} seeds: wall {medians['wall_s']:.1f} s (limit {LIMIT_S:g}), "
        f"cpu {medians['cpu_s']:.1f} s, largest process {medians['largest_process_mib']:.0f} MiB"
    )


if __name__ == "__main__":
    main()
