"""Is a run whose equal steps advance together the same, byte for byte, as one with an event for each step?

Run from the repository root: ``python benchmarks/replay/exact.py [TRACE ...]``. Each case is run twice, as it is and with
``--exact-steps``, and the two ``requests.parquet`` are compared. Writes ``results/exact_TRACE.json`` beside this file;
exit code 1 if any two differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.record import TRACES, provenance, public_trace, write_json  # noqa: E402
from benchmarks.replay.fresh_run import fresh_run  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"


def compare(arguments: list[str]) -> dict[str, Any]:
    """Run both ways; the digests of what they wrote, whether it is the same, and what each took."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"together": Path(scratch) / "together", "exact": Path(scratch) / "exact"}
        runs = {
            "together": fresh_run(arguments, folders["together"]),
            "exact": fresh_run([*arguments, "--exact-steps"], folders["exact"]),
        }
        tables = {way: (folder / "requests.parquet").read_bytes() for way, folder in folders.items()}
        summaries = [_summary(folder) for folder in folders.values()]
    return {
        "requests": runs["exact"]["requests"],
        "steps": runs["exact"]["steps"],
        "requests_parquet_sha256": {way: hashlib.sha256(table).hexdigest() for way, table in tables.items()},
        "requests_parquet_identical": tables["together"] == tables["exact"],
        "summary_identical": summaries[0] == summaries[1],
        "cpu_s": {way: run["cpu_s"] for way, run in runs.items()},
    }


def _summary(folder: Path) -> dict[str, Any]:
    """All of it but the option that tells the two runs apart."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    del summary["config"]["exact_steps"]
    return summary


def main() -> None:
    """Compare under each policy on each trace; write a result for each trace as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"of {', '.join(TRACES)} [default: all]")
    parser.add_argument("--policies", nargs="+", default=["hybrid", "harli"], metavar="POLICY")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--horizon-s", type=float, help="stop at this simulated time [default: all done]")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="[default: results]")
    asked = parser.parse_args()
    unknown = [name for name in asked.traces if name not in TRACES]
    if unknown:
        parser.error(f"unknown trace {unknown[0]!r}: known traces are {', '.join(TRACES)}")
    paths = {name: public_trace(name) for name in asked.traces or TRACES}
    options = ["--gpus", str(asked.gpus)]
    if asked.horizon_s is not None:
        options += ["--horizon-s", f"{asked.horizon_s:g}"]
    made_by = f"python benchmarks/replay/exact.py {{}} --policies {' '.join(asked.policies)} {' '.join(options)}"
    origins = {name: provenance(made_by.format(name)) for name in paths}  # before a result changes the tree
    same = True
    for name, path in paths.items():
        rows = []
        for policy in asked.policies:
            rows.append({"policy": policy, **compare(["--trace", str(path), "--policy", policy, *options])})
            row = rows[-1]
            said = "identical" if row["requests_parquet_identical"] else "DIFFERENT"
            took = ", ".join(f"{way} {cpu_s:.1f} s" for way, cpu_s in row["cpu_s"].items())
            print(f"{name:11} {policy:8} requests.parquet {said}; {row['steps']:,} steps; CPU {took}", flush=True)
        same = same and all(row["requests_parquet_identical"] for row in rows)
        document = {**origins[name], "trace": path.name, "gpus": asked.gpus, "rows": rows}
        write_json(asked.results / f"exact_{name}.json", document)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
