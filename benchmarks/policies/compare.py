"""Run every built-in policy on one trace and tabulate what finetuning got and what requests paid.

Run from the repository root: ``python benchmarks/policies/compare.py``. Writes ``results/TRACE.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.record import azure_conv, provenance, write_json  # noqa: E402
from policies import POLICIES  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = (
    ("gpus", "gpus", "d"),
    ("policy", "policy", "s"),
    ("finetune tok/s", "finetune_tokens_per_s", ",.0f"),
    ("gain", "gain_over_separate", "+.1%"),
    ("p50 ms", "step_p50_ms", ".1f"),
    ("p99", "step_p99_ms", ".1f"),
    ("p99.9", "step_p99_9_ms", ".1f"),
    ("max", "step_max_ms", ".1f"),
    ("over: solo", "violations_solo", ",d"),
    ("finetune", "violations_finetune_caused", ",d"),
    ("excess", "violations_above_inference_only", ",d"),
    ("TTFT p99", "ttft_p99_ms", ",.0f"),
    ("TPOT p99", "tpot_p99_ms", ".1f"),
    ("SLO", "slo_attainment", ".2%"),
)


def compare(trace: Path, qos_ms: float, policy: str, gpus: int) -> dict[str, Any]:
    """One policy on ``gpus`` decode GPUs, with the baselines; raises `SystemExit` with its message when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--trace", str(trace), "--policy", policy, "--gpus", str(gpus), "--qos-ms", str(qos_ms)]
        command = [sys.executable, "-m", "harli_cli", "run", *options, "--out", folder, "--json", "--baselines"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{policy} on {gpus} GPUs ended with {done.returncode}: {done.stderr}")
    summary = json.loads(done.stdout)
    requests, steps, baselines = summary["requests"], summary["steps"], summary["baselines"]
    latency_ms = steps["latency_ms"]
    return {
        "policy": policy,
        "gpus": gpus,
        "qos_ms": qos_ms,
        "completed": requests["completed"],
        "rejected": requests["rejected"],
        "output_tokens": requests["output_tokens_produced"],
        "preemptions": requests["preemptions"],
        "finetune_tokens_per_s": summary["finetune"]["tokens_per_s"],
        "finetune_gpus": summary["finetune"]["gpus"],
        "gain_over_separate": baselines["separate"]["gain"],
        "separate_serving_gpus": baselines["separate"]["serving_gpus"],
        "separate_tokens_per_s": baselines["separate"]["finetune_tokens_per_s"],
        "steps": steps["count"],
        "step_p50_ms": latency_ms["p50"],
        "step_p99_ms": latency_ms["p99"],
        "step_p99_9_ms": latency_ms["p99.9"],
        "step_max_ms": latency_ms["max"],
        "violations_solo": steps["violations"]["solo"],
        "violations_finetune_caused": steps["violations"]["finetune_caused"],
        "violations_above_inference_only": baselines["inference_only"]["excess_violations"],
        "ttft_p99_ms": summary["ttft_ms"]["p99"],
        "tpot_p99_ms": summary["tpot_ms"]["p99"],
        "slo_attainment": summary["slo_attainment"],
        "goodput_rps": summary["goodput_rps"],
        "prediction_error_mean": steps["prediction_error"] and steps["prediction_error"]["mean"],
        "extrapolated": summary["device_model"]["extrapolated"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [[title for title, _, _ in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [["-" if row[key] is None else format(row[key], shape) for _, key, shape in COLUMNS] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run everything, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--qos-ms", type=float, default=40.0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--trace", type=Path, help="default: the Azure 2023 conversation trace below HARLI_SHARED")
    asked = parser.parse_args()
    trace: Path = asked.trace.resolve() if asked.trace else azure_conv()
    cases = [(policy, gpus) for gpus in asked.gpus for policy in asked.policies]
    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = list(pool.map(lambda case: compare(trace, asked.qos_ms, case[0], case[1]), cases))
    gpus = " ".join(str(count) for count in asked.gpus)
    made_by = f"python benchmarks/policies/compare.py --gpus {gpus} --qos-ms {asked.qos_ms:g}"
    if asked.policies != list(POLICIES):
        made_by += f" --policies {' '.join(asked.policies)}"
    name = f"{trace.stem}_{asked.qos_ms:g}ms.json"
    write_json(RESULTS / name, {**provenance(made_by), "trace": trace.name, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
