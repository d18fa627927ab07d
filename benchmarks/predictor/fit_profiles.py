"""Fit the shipped profiles to the shipped samples, and report the errors of every stage beside the paper's.

Run from the repository root: ``python benchmarks/predictor/fit_profiles.py``. Writes
``harli_cli/data/profile_h200_MODEL__FINETUNE_MODEL.json`` and ``benchmarks/predictor/results/errors.json``.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import timeit
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.record import provenance, write_json  # noqa: E402
from harli_core.predict.fit import fit_profile  # noqa: E402
from harli_core.predict.predictor import StepPredictor  # noqa: E402
from harli_core.predict.profile import Profile  # noqa: E402
from harli_core.predict.samples import Samples, parse_samples  # noqa: E402

DATA = ROOT / "harli_cli" / "data"
RESULTS = Path(__file__).resolve().parent / "results" / "errors.json"
MODELS = ("llama3-8b", "qwen2.5-7b")
PAPER = {
    "solo": {"mean": 0.02, "max": 0.06},
    "colocated": {"mean": 0.05},
    "prediction_us": 5.0,
    "where": "arXiv 2511.11729, figure 12 and the reported overhead; Ada6000 and A100, not an H200",
}


def read_samples(model: str) -> Samples:
    """The shipped samples of one served model."""
    name = f"operating_points_{model}.jsonl"
    with (DATA / name).open(encoding="utf-8") as lines:
        return parse_samples(lines, name)


def profile_path(model: str, finetune_model: str) -> Path:
    """Where the profile of a pair is shipped."""
    return DATA / f"profile_h200_{model}__{finetune_model}.json"


def prediction_us(profile: Profile, calls: int = 1000) -> dict[str, float]:
    """Microseconds of one `StepPredictor.predict` (all splits together): a batch size seen before, and a new one."""
    draw = random.Random(0)
    batches = [draw.randint(1, 384) for _ in range(calls)]
    steps = [(batch, batch * draw.randint(1, 4096)) for batch in batches]
    predictor = StepPredictor(profile)

    def known() -> None:
        for batch, kv_tokens in steps:
            predictor.predict(batch, kv_tokens)

    known()
    fresh = [StepPredictor(profile) for _ in range(calls)]
    first_s = timeit.timeit(lambda: [new.predict(*step) for new, step in zip(fresh, steps, strict=True)], number=1)
    known_s = min(timeit.repeat(known, number=1, repeat=50))
    return {"known_batch": known_s / calls * 1e6, "new_batch": first_s / calls * 1e6}


def main() -> None:
    """Fit the four pairs and write everything."""
    pairs: dict[str, object] = {}
    for model in MODELS:
        samples = read_samples(model)
        for finetune_model in MODELS:
            profile = fit_profile(samples, finetune_model)
            write_json(profile_path(model, finetune_model), profile.to_dict())
            median = profile.tail.colocated[len(profile.tail.colocated) // 2]
            pairs[f"{model}__{finetune_model}"] = {
                "errors": [dataclasses.asdict(error) for error in profile.errors],
                "prediction_us": prediction_us(profile),
                "tail_colocated": {"median": median, "max": profile.tail.colocated[-1]},
            }
            print(f"{model} beside {finetune_model}: {profile.solo.basis}, {profile.colocated.form}")
            for error in profile.errors:
                fit, left = error.in_sample, error.cross_validated
                mark = "*" if error.chosen else " "
                print(
                    f"  {mark} {error.stage:20} {error.candidate:22} in-sample {fit.mean:6.2%} max {fit.max:6.2%};"
                    f" left out {error.left_out}: {left.mean:6.2%} max {left.max:6.2%}"
                )
    write_json(
        RESULTS,
        {
            **provenance("python benchmarks/predictor/fit_profiles.py"),
            "samples_machine": "NVIDIA H200, 132 SMs (provenance in each profile)",
            "paper": PAPER,
            "pairs": pairs,
        },
    )


if __name__ == "__main__":
    main()
