"""What Harli costs where it does nothing for finetuning, and what finetuning adds to a step's launch. See README.md.

    python benchmarks/colocation/overheads.py                       # every variant, each in a process of its own
    python benchmarks/colocation/overheads.py --variant harli       # one of them, in this process

Parts that ``results/overheads.json`` has are not measured again; it is written after each part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import backends.cuda.memory  # noqa: F401  the installed packages, before the checkout's folders come into reach
import harli_cli  # noqa: F401
import harli_core  # noqa: F401
import policies  # noqa: F401
import traces  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks.*, ahead of other packages' folders

from backends.cuda.serving import decode_attention, sglang_version
from benchmarks.allocator.measuring import commit, machine
from benchmarks.colocation.overhead_parts import HarliParts, Part, SglangParts
from benchmarks.colocation.overhead_summary import summary
from benchmarks.colocation.process import process_options, run_settings
from benchmarks.record import results_folder, write_json
from harli_cli.scenario import Scenario
from harli_core.config import RunConfig

VARIANTS: dict[str, tuple[Part, ...]] = {
    "sglang": ("startup", "decode"),
    "sglang_overlap": ("startup", "decode"),
    "sglang_same_attention": ("decode",),
    "harli": ("startup", "decode", "job", "decisions", "launch"),
    "one_graph_set": ("startup", "decode"),
}
"""SGLang's own pool with either of its loops, the first one also with decode attention launched as Harli does (on a GPU);
Harli with all graph sets, and Harli without any set of a split.
"""

NOT_MEASURED_BY = ("variant", "again", "command")
"""Options that change no figure."""


class Results:
    """The result file; figures of different settings are not mixed in it."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Read what is there; with ``--again`` without the variant that is measured now."""
        name = "overheads" + ("" if options.device == "cuda" else "_on_a_cpu")
        self.path = results_folder(__file__) / f"{name}.json"
        self.settings = {
            key: value.name if isinstance(value, Path) else value
            for key, value in sorted(vars(options).items())
            if key not in NOT_MEASURED_BY
        }
        document = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}
        same = document.get("settings", self.settings) == self.settings
        if not same and not options.again:
            raise SystemExit(f"{self.path} was measured with other settings: --again drops it, HARLI_RESULTS leaves it")
        self.variants: dict[str, dict[str, Any]] = document.get("variants", {}) if same else {}
        if options.again:
            self.variants.pop(options.variant, None)

    def missing(self, variant: str) -> list[Part]:
        """Parts that are yet to be measured."""
        return [part for part in VARIANTS[variant] if part not in self.variants.get(variant, {})]

    def add(self, variant: str, part: str, figures: dict[str, Any]) -> None:
        """Write a part, and what follows from all of them."""
        command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        self.variants.setdefault(variant, {})[part] = {**figures, "commit": commit(), "command": command}
        document = {
            "benchmark": "overheads",
            "machine": machine(),
            "sglang": sglang_version.installed(),
            "settings": self.settings,
            "summary": summary(self.variants),
            "variants": self.variants,
            "not_measured": {name: absent for name in VARIANTS if (absent := self.missing(name))},
        }
        write_json(self.path, document)


def measure(options: argparse.Namespace) -> None:
    """The missing parts of one variant, in this process."""
    results, variant = Results(options), options.variant
    missing = results.missing(variant)
    if not missing:
        return
    if options.device == "cpu":
        import torch

        torch.set_num_threads(1)  # the tensors are tiny
    shared = not options.no_sharing and options.pair[0] == options.pair[1]
    scenario = Scenario(RunConfig(**run_settings(options, shared=shared)))
    parts: SglangParts | HarliParts
    if variant.startswith("sglang"):
        if variant == "sglang_same_attention":
            sglang_version.prepare(options.device)  # before anything of SGLang is imported, and before CUDA is begun
            decode_attention.register(decode_attention.capability_here())
        parts = SglangParts(scenario, options, overlap=variant == "sglang_overlap")
    else:
        parts = HarliParts(scenario, options, shared=shared, partitioned=variant == "harli")
    for part in missing:
        begin_s = time.perf_counter()
        measured: Callable[[], dict[str, Any]] = getattr(parts, part)
        figures = measured()
        results.add(variant, part, {**figures, "took_s": round(time.perf_counter() - begin_s, 2)})
        print(json.dumps({f"{variant} {part}": parts.brief(part, figures)}), flush=True)


def measure_all(options: argparse.Namespace) -> int:
    """Every variant with missing parts, one process after another; the number of those that failed."""
    failed = []
    for variant in VARIANTS:
        if not options.again and not Results(options).missing(variant):
            continue
        done = subprocess.run([sys.executable, *sys.argv, "--variant", variant], check=False)
        if done.returncode:
            failed.append(variant)
    results = Results(argparse.Namespace(**{**vars(options), "again": False}))
    print(json.dumps({"summary": summary(results.variants), "failed": failed, "written": str(results.path)}))
    return len(failed)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variant", choices=tuple(VARIANTS), default=None, help="measure this one, in this process")
    add("--again", action="store_true", help="measure anew what the results have")
    add("--batches", type=int, nargs="+", default=[8, 32, 64], help="requests that decode together")
    add("--prompt-tokens", type=int, default=512)
    add("--output-tokens", type=int, default=160)
    add("--skip-steps", type=int, default=20, help="steps at the beginning of each run that are not counted")
    add("--rounds", type=int, default=2, help="how often every batch has its turn")
    add("--policy", default="hybrid", help="what finetunes beside decode where that is timed")
    add("--launch-batch", type=int, default=32, help="requests whose steps' launches are timed")
    add("--load", type=int, default=1600, help="offered decode tokens/s while decisions are timed")
    add("--load-s", type=float, default=15.0)
    add("--trace", type=Path, default=None, help="trace of that load [default: Azure]")
    add("--trace-skip-s", type=float, default=60.0)
    process_options(parser)
    parser.set_defaults(runtime_gb=24.0)
    return parser.parse_args()


def main() -> int:
    """One variant, or all of them."""
    options = parsed()
    if options.variant is None:
        return 1 if measure_all(options) else 0
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
