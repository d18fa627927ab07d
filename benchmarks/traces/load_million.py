"""Measure how long a million-row CSV takes to load, and how much memory, each in a fresh process.

Run from the repository root: ``python benchmarks/traces/load_million.py``. Writes ``results/load_million.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.record import provenance, write_json  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
LIMITS = {"load_s": 3.0, "peak_mib": 400.0}

CHILD = """
import json, sys, time
started_s = time.perf_counter()
from traces import load_trace
trace = load_trace(sys.argv[1], seed=0).trace
print(json.dumps({"load_s": time.perf_counter() - started_s, "requests": len(trace), "span_s": trace.span_s}))
"""
"""Imports are inside the time; the start of the interpreter is not."""

Row = Callable[[int, float, int, int], str]


def _azure(zone: str) -> Row:
    def row(_index: int, at_s: float, prompt: int, output: int) -> str:
        minutes, second = divmod(at_s, 60.0)
        hours, minute = divmod(int(minutes), 60)
        day, hour = divmod(hours, 24)
        return f"2024-05-{10 + day:02} {hour:02}:{minute:02}:{second:09.6f}{zone},{prompt},{output}\n"

    return row


def _burstgpt(index: int, at_s: float, prompt: int, output: int) -> str:
    model = "GPT-4" if index % 5 == 0 else "ChatGPT"
    return f"{at_s:.3f},{index % 9973},{output / 50:.3f},{model},{prompt},{output},{prompt + output},Conversation log\n"


FILES: dict[str, tuple[str, Row]] = {
    "harli-csv": ("arrival_s,prompt_tokens,output_tokens\n", lambda _i, at_s, p, o: f"{at_s!r},{p},{o}\n"),
    "azure-2023": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", _azure("")),
    "azure-2024": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", _azure("+00:00")),
    "vidur": (
        "arrived_at,num_prefill_tokens,num_decode_tokens\n",
        lambda _i, at_s, p, o: f"{at_s:.6f},{p},{o}\n",
    ),
    "burstgpt": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        _burstgpt,
    ),
}
"""Header and row of each kind of file."""


def write_file(path: Path, name: str, rows: int) -> None:
    """Draw a file of Poisson arrivals, 4 a second, seeded."""
    rng = np.random.Generator(np.random.PCG64(0))
    arrival_s = np.cumsum(rng.standard_exponential(rows) / 4.0).tolist()
    prompts, outputs = (rng.integers(1, most, rows).tolist() for most in (8000, 1000))
    header, row = FILES[name]
    with path.open("w", encoding="ascii", newline="") as file:
        file.write(header)
        file.writelines(map(row, range(rows), arrival_s, prompts, outputs))


def measure(path: Path) -> dict[str, float]:
    """Load it in a fresh process; the peak is what the operating system counted for that process."""
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None, "it was asked for"
    with process.stdout:
        said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"loading {path} failed")
    found: dict[str, float] = json.loads(said)
    return {**found, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}


def main() -> None:
    """Measure every kind of file several times; medians beside the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    results: dict[str, object] = {}
    for name in FILES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.dat"
            write_file(path, name, asked.rows)
            runs = [measure(path) for _ in range(asked.repeats)]
            medians = {key: median(run[key] for run in runs) for key in runs[0]}
            results[name] = {"file_mib": path.stat().st_size / (1 << 20), "median": medians, "runs": runs}
        print(
            f"{name:11} load {medians['load_s']:5.2f} s (limit {LIMITS['load_s']:g}), cpu {medians['cpu_s']:5.2f} s, "
            f"peak {medians['peak_mib']:4.0f} MiB (limit {LIMITS['peak_mib']:g})"
        )
    command = f"python benchmarks/traces/load_million.py --rows {asked.rows} --repeats {asked.repeats}"
    write_json(RESULTS / "load_million.json", {**provenance(command), "limits": LIMITS, "files": results})


if __name__ == "__main__":
    main()
