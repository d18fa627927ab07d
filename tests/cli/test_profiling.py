"""``harli fit`` and ``harli run --profile``; ``harli profile`` where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Harli

SAMPLES = Path(__file__).parents[2] / "harli_cli" / "data" / "operating_points_llama3-8b.jsonl"
SHIPPED = SAMPLES.parent / "profile_h200_llama3-8b__llama3-8b.json"


def test_fit_of_the_shipped_samples_is_the_shipped_profile(harli: Harli, tmp_path: Path) -> None:
    """The command gives what ships, to the last digit."""
    out = tmp_path / "profile.json"
    assert harli("fit", SAMPLES, out, "--finetune-model", "llama3-8b").code == 0
    assert json.loads(out.read_text()) == json.loads(SHIPPED.read_text())


def test_run_with_a_profile_file_decides_as_with_the_shipped_one(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """The same profile from a file: the same summary, but for its name in the configuration."""
    assert harli("run", "--trace", trace, "--out", tmp_path / "a").code == 0
    assert harli("run", "--trace", trace, "--profile", SHIPPED, "--out", tmp_path / "b").code == 0
    shipped, given = (json.loads((tmp_path / name / "summary.json").read_text()) for name in "ab")
    assert given["config"].pop("profile") == str(SHIPPED)
    assert shipped["config"].pop("profile") is None
    assert given == shipped


def test_several_finetuned_models_have_to_be_told_apart(harli: Harli, tmp_path: Path) -> None:
    """The shipped samples hold two."""
    assert "--finetune-model" in harli("fit", SAMPLES, tmp_path / "out.json").error()


def test_profile_of_another_pair_is_refused(harli: Harli, trace: Path) -> None:
    """Both pairs are named."""
    message = harli("run", "--trace", trace, "--model", "qwen2.5-7b", "--profile", SHIPPED).error()
    assert "a profile of llama3-8b beside llama3-8b, not of qwen2.5-7b beside qwen2.5-7b" in message


def test_file_that_is_no_profile_is_refused(harli: Harli, trace: Path) -> None:
    """Samples are not a profile."""
    assert "not a profile" in harli("run", "--trace", trace, "--profile", SAMPLES).error()


def test_profile_without_a_gpu_says_what_is_missing(harli: Harli, tmp_path: Path) -> None:
    """One line, nothing written."""
    message = harli("profile", tmp_path / "samples.jsonl").error()
    assert "--backend cuda cannot run here" in message
    assert not list(tmp_path.iterdir())
