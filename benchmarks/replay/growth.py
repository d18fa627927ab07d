"""How do CPU time and memory of a run grow with GPUs, and with requests?

Run from the repository root: ``python benchmarks/replay/growth.py``. The load of each GPU stays that of the trace on four.
GPUs: the same hour on more of them, with as many more requests an hour (copies of the trace, sped up). Requests: copies of
the trace one behind the other on four GPUs. Writes ``results/growth_POLICY.json`` beside this file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.record import azure_conv, provenance, write_json  # noqa: E402
from benchmarks.replay.fresh_run import fresh_run  # noqa: E402
from traces import load_trace  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
UNIT_GPUS = 4
"""Decode GPUs that the trace is for, with one prefill GPU."""


def on_gpus(gpus: int, requests: int) -> list[str]:
    """Options for ``gpus`` GPUs and the load of the first ``requests`` requests of the trace on four."""
    options = ["--gpus", str(gpus), "--prefill-gpus", str(max(1, gpus // UNIT_GPUS))]
    options += ["--rate-scale", f"{gpus / UNIT_GPUS:g}"]
    if gpus < UNIT_GPUS:
        return [*options, "--limit", str(max(1, requests * gpus // UNIT_GPUS))]
    return [*options, "--limit", str(requests), "--repeat", str(gpus // UNIT_GPUS)]


def copies_of(requests: int, copies: int) -> list[str]:
    """Options for the first ``requests`` requests of the trace, ``copies`` times in a row, on four GPUs."""
    return ["--gpus", str(UNIT_GPUS), "--limit", str(requests), "--repeat", str(copies)]


def measure(trace: Path, policy: str, options: list[str]) -> dict[str, Any]:
    """One run in a fresh process, its results thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        run = fresh_run(["--trace", str(trace), "--policy", policy, *options], Path(folder))
    return {
        **{name: run[name] for name in ("requests", "steps", "cpu_s", "peak_mib")},
        "cpu_us_a_request": run["cpu_s"] / run["requests"] * 1e6,
        "measured": f"harli run --trace {trace.name} --policy {policy} {' '.join(options)}",
    }


def table(heading: str, rows: list[dict[str, Any]], key: str) -> str:
    """Rows as Markdown."""
    lines = [[heading, "requests", "steps", "CPU s", "CPU us a request", "peak MiB"]]
    lines += [["---:"] * len(lines[0])]
    for row in rows:
        shares = (f"{row['cpu_s']:,.1f}", f"{row['cpu_us_a_request']:,.0f}", f"{row['peak_mib']:,.0f}")
        lines.append([str(row[key]), f"{row['requests']:,}", f"{row['steps']:,}", *shares])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure every size, print the tables, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="hybrid")
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 4, 16, 64], metavar="N", help="[default: 1 4 16 64]")
    parser.add_argument(
        "--copies", type=int, nargs="*", default=[1, 5, 52], metavar="N", help="of the trace in a row [default: 1 5 52]"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N requests for the trace [default: all]")
    parser.add_argument("--trace", type=Path, help="default: the Azure 2023 conversation trace below HARLI_SHARED")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="[default: results]")
    asked = parser.parse_args()
    for gpus in asked.gpus:
        if gpus < 1 or (gpus > UNIT_GPUS and gpus % UNIT_GPUS):
            parser.error(f"--gpus {gpus}: expected less than {UNIT_GPUS}, or a multiple of it")
    trace: Path = asked.trace.resolve() if asked.trace else azure_conv()
    requests = len(load_trace(str(trace), seed=0).trace)
    requests = requests if asked.limit is None else min(requests, asked.limit)
    command = ["python benchmarks/replay/growth.py --policy", asked.policy]
    for name, values in (("--gpus", asked.gpus), ("--copies", asked.copies)):
        command += [name, *map(str, values)]
    command += [] if asked.limit is None else ["--limit", str(asked.limit)]
    document: dict[str, Any] = {**provenance(" ".join(command)), "trace": trace.name}
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    document["gpus"] = [{"gpus": gpus, **measure(trace, asked.policy, on_gpus(gpus, requests))} for gpus in asked.gpus]
    print(table("GPUs", document["gpus"], "gpus"), end="\n\n", flush=True)
    document["requests"] = [
        {"copies": copies, **measure(trace, asked.policy, copies_of(requests, copies))} for copies in asked.copies
    ]
    print(table("copies", document["requests"], "copies"))
    write_json(asked.results / f"growth_{asked.policy.replace(':', '.')}.json", document)


if __name__ == "__main__":
    main()
