"""The overhead benchmark on a CPU: all of its variants, SGLang's own loops among them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.colocation.overhead_summary import summary
from tests.sglang.processes import environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "colocation" / "overheads.py"
BATCHES = (2, 4)
ROUNDS, OUTPUT_TOKENS, SKIPPED = 2, 16, 4

OPTIONS = [
    "--device", "cpu", "--layers", "2", "--max-rows", "48", "--max-batch", "8", "--context-tokens", "1024",
    "--micro-batches", "1", "--no-sharing", "--qos-ms", "150", "--policy", "harli", "--prompt-tokens", "16",
    "--batches", *map(str, BATCHES), "--output-tokens", str(OUTPUT_TOKENS), "--skip-steps", str(SKIPPED),
    "--rounds", str(ROUNDS), "--launch-batch", "4", "--load", "100", "--load-s", "4", "--trace-skip-s", "0",
]  # fmt: skip


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command of the README, small."""
    lengths = folder / "lengths.csv"
    rows = [f"{index / 10:.1f},100,{12 + index % 9}" for index in range(200)]
    lengths.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return subprocess.run(
        [sys.executable, str(SCRIPT), *OPTIONS, "--trace", str(lengths), *more],
        env={**environment(), "HARLI_RESULTS": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def result(folder: Path) -> dict[str, Any]:
    """The result file."""
    found: dict[str, Any] = json.loads((folder / "overheads_on_a_cpu.json").read_text())
    return found


def test_every_variant_is_measured_once_and_only_missing_parts_again(tmp_path: Path) -> None:
    """SGLang's two loops and Harli's serve every step asked for; a second call runs only the part that was taken out."""
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = result(tmp_path)
    assert found["not_measured"] == {}
    variants = found["variants"]
    assert variants["sglang"]["startup"]["loop"] == "event_loop_normal"
    assert variants["sglang_overlap"]["startup"]["loop"] == "event_loop_overlap"
    assert set(variants["sglang_same_attention"]) == {"decode"}
    for parts in variants.values():
        steps = {batch: figures["step_ms"]["count"] for batch, figures in parts["decode"]["batches"].items()}
        assert list(steps) == [str(batch) for batch in BATCHES]
        assert all(ROUNDS * (OUTPUT_TOKENS - SKIPPED - 4) <= count < ROUNDS * OUTPUT_TOKENS for count in steps.values())
        assert all(part["command"][0] == "overheads.py" for part in parts.values())
    for parts in (parts for parts in variants.values() if "startup" in parts):
        assert set(parts["startup"]["stages_s"]) == {"weights", "KV pool", "attention backends", "graphs"}
    harli = variants["harli"]
    assert harli["startup"]["graph_sets"] > variants["one_graph_set"]["startup"]["graph_sets"] == 1
    assert harli["decisions"]["decide_us"]["count"] > 0
    assert harli["decisions"]["units"] > 0
    assert harli["launch"]["units"] > 0
    assert harli["launch"]["launch_ms"]["beside"]["count"] >= ROUNDS * (OUTPUT_TOKENS - SKIPPED - 4)
    assert all(ratio > 0.0 for ratio in found["summary"]["decode_over_sglang_overlap"].values())

    del variants["one_graph_set"]["decode"]
    (tmp_path / "overheads_on_a_cpu.json").write_text(json.dumps(found))
    assert run(tmp_path).returncode == 0
    second = result(tmp_path)
    assert second["variants"].keys() == variants.keys()
    taken_out = second["variants"]["one_graph_set"].pop("decode")
    assert set(taken_out["batches"]) == {str(batch) for batch in BATCHES}
    assert second["variants"] == variants


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    """A result file of another batch is left alone, with a message that says what to do."""
    path = tmp_path / "overheads_on_a_cpu.json"
    path.write_text(json.dumps({"settings": {"batches": [3]}, "variants": {}}))
    before = path.read_bytes()
    done = run(tmp_path)
    assert done.returncode != 0
    assert "other settings: --again drops it" in done.stderr
    assert path.read_bytes() == before


def start(sets: int, gib: float, used_gib: float) -> dict[str, Any]:
    """A start on a GPU."""
    return {
        "total_s": 40.0, "graph_sets": sets, "batch_sizes": 17, "graphs": 17 * sets, "graph_sets_gib": gib,
        "graph_sets_s": 2.0 * sets, "gpu_used_gib": used_gib,
    }  # fmt: skip


def test_summary_sets_medians_and_graph_sets_against_each_other() -> None:
    """Ratios are ours over theirs; what all graph sets take more is told; what is missing is `None`."""
    decode = {name: {"batches": {"8": {"step_ms": {"p50": p50}}}} for name, p50 in (("harli", 6.3), ("sglang", 6.0))}
    variants = {
        "harli": {"startup": start(8, 3.0, 120.0), "decode": decode["harli"]},
        "one_graph_set": {"startup": start(1, 0.5, 117.25)},
        "sglang": {"decode": decode["sglang"]},
    }
    found = summary(variants)
    assert found["decode_over_sglang"] == {"8": 1.05}
    assert found["decode_over_sglang_overlap"] is None
    assert found["graph_sets"] == {
        "graph_sets": 8, "batch_sizes": 17, "graphs": 136, "graph_sets_gib": 3.0, "graph_sets_s": 16.0,
        "one_graph_sets_gib": 0.5, "one_graph_sets_s": 2.0, "gpu_used_gib_more": 2.75,
    }  # fmt: skip
    assert found["launch_added_us"] is None
