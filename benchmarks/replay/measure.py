"""Measure whole runs of the command line, each in a fresh process on one core: CPU time, wall time, peak memory.

Run from the repository root: ``python benchmarks/replay/measure.py [POLICY ...]``. Writes ``results/POLICY.json``
beside this file (``POLICY_html.json`` with ``--html``).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.record import azure_conv, provenance, write_json  # noqa: E402
from benchmarks.replay.fresh_run import fresh_run  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
LIMITS = {"wall_s": 10.0, "peak_mib": 300.0}


def measure(arguments: list[str]) -> dict[str, float]:
    """One fresh process, its results thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        return fresh_run(arguments, Path(folder))


def main() -> None:
    """Measure each policy several times and write the medians beside the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="*", default=["harli"], metavar="POLICY")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--html", action="store_true", help="with report.html; into results/POLICY_html.json")
    parser.add_argument("--trace", type=Path, help="default: the Azure 2023 conversation trace below HARLI_SHARED")
    asked = parser.parse_args()
    trace: Path = asked.trace.resolve() if asked.trace else azure_conv()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    for policy in asked.policies:
        options = ["--gpus", str(asked.gpus), "--policy", policy, *(["--html"] if asked.html else [])]
        runs = [measure(["--trace", str(trace), *options]) for _ in range(asked.repeats)]
        medians = {name: median(run[name] for run in runs) for name in runs[0]}
        made_by = f"python benchmarks/replay/measure.py {policy} --gpus {asked.gpus} --repeats {asked.repeats}"
        made_by += " --html" if asked.html else ""
        document = {
            **provenance(made_by),
            "measured": f"harli run --trace {trace.name} {' '.join(options)}, a fresh process on one core",
            "limits": LIMITS,
            "median": medians,
            "runs": runs,
        }
        write_json(RESULTS / f"{policy.replace(':', '_')}{'_html' if asked.html else ''}.json", document)
        print(
            f"{policy:16} wall {medians['wall_s']:6.2f} s (limit {LIMITS['wall_s']:g}), cpu {medians['cpu_s']:6.2f} s, "
            f"peak {medians['peak_mib']:5.0f} MiB (limit {LIMITS['peak_mib']:g}), {medians['steps']:,.0f} steps"
        )


if __name__ == "__main__":
    main()
