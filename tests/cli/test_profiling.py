"""``harli fit`` and ``harli run --profile``; ``harli profile`` where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Harli

SAMPLES = Path(__file__).parents[2] / "harli_cli" / "data" / "operating_points_llama3-8b.jsonl"
PREFILL = SAMPLES.parent / "prefill_llama3-8b.jsonl"
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


def test_run_on_the_shipped_samples_from_a_file_is_the_shipped_gpu(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """The same device, and a profile fitted to it on the spot: the same results."""
    samples = tmp_path / "samples.jsonl"
    samples.write_text(SAMPLES.read_text() + PREFILL.read_text())
    assert harli("run", "--trace", trace, "--out", tmp_path / "a").code == 0
    assert harli("run", "--trace", trace, "--samples", samples, "--out", tmp_path / "b").code == 0
    assert (tmp_path / "a" / "requests.parquet").read_bytes() == (tmp_path / "b" / "requests.parquet").read_bytes()
    given = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert given["config"]["samples"] == str(samples)


def test_slower_samples_are_a_slower_gpu(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """Decode steps that take twice as long in the samples do so in the run."""
    samples = tmp_path / "samples.jsonl"
    lines = [json.loads(line) for line in (SAMPLES.read_text() + PREFILL.read_text()).splitlines()]
    for line in lines:
        if line["kind"] == "decode_solo":
            line["ms"] = [2.0 * ms for ms in line["ms"]]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for name, given in (("a", ()), ("b", ("--samples", samples, "--profile", SHIPPED))):
        run = harli("run", "--trace", trace, "--policy", "inference_only", *given, "--out", tmp_path / name)
        assert run.code == 0
        found.append(json.loads((tmp_path / name / "summary.json").read_text())["steps"]["latency_ms"]["p50"])
    assert 1.7 < found[1] / found[0] < 2.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a line of JSON"),
        (SAMPLES.read_text(), "no prefill samples in it"),
        (PREFILL.read_text(), "samples of no model named, not of llama3-8b"),
        ((SAMPLES.parent / "operating_points_qwen2.5-7b.jsonl").read_text(), "samples of qwen2.5-7b, not of llama3-8b"),
    ],
)
def test_samples_that_do_not_fit_are_refused(
    harli: Harli, trace: Path, tmp_path: Path, text: str, message: str
) -> None:
    """One line that names the file."""
    samples = tmp_path / "samples.jsonl"
    samples.write_text(text)
    error = harli("run", "--trace", trace, "--samples", samples).error()
    assert message in error
    assert "samples.jsonl" in error


def altered(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> str:
    """The shipped samples of llama3-8b, changed."""
    lines = [json.loads(line) for line in (SAMPLES.read_text() + PREFILL.read_text()).splitlines()]
    return "".join(json.dumps(line) + "\n" for line in change(lines))


def one_split(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Only what was measured on the whole chip and on 36 + 96 SMs."""
    kept = []
    for line in lines:
        if line["kind"] == "device":
            line["splits"] = [[36, 96]]
        sms = {line[name] for name in ("sm", "sm_infer") if name in line}
        if sms <= ({96, 132} if line["kind"] == "finetune_unit" else {36, 132}):
            kept.append(line)
    return kept


def without_solo(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """No decode alone on 36 SMs."""
    return [line for line in lines if not (line["kind"] == "decode_solo" and line["sm"] == 36)]


def without_beside(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """No decode beside finetuning on 36 SMs."""
    return [line for line in lines if not (line["kind"] == "colocated" and line["sm_infer"] == 36)]


def short_sequences(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """No sequence in which the clocks have settled."""
    return [{**line, "ms": line["ms"][:250]} if line["kind"].endswith("sequence") else line for line in lines]


def one_batch(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Decode beside finetuning at one batch size."""
    return [line for line in lines if line["kind"] != "colocated" or line["batch"] == 64]


@pytest.mark.parametrize(
    ("change", "profile", "message"),
    [
        (one_split, False, "missing for a fit: colocated on a second split"),
        (one_split, True, "a profile of 132 SMs in 7 splits, and samples of 132 SMs in 1 ("),
        (one_batch, False, "missing for a fit: colocated with 'llama3-8b' at a second batch size"),
        (without_solo, True, "no decode_solo samples on 36 SMs"),
        (without_beside, True, "no co-located samples on 36+96 SMs"),
        (short_sequences, True, "no recorded step sequences of more than 250 steps"),
    ],
)
def test_samples_that_do_not_suffice_are_refused(
    harli: Harli, trace: Path, tmp_path: Path, change: Any, profile: bool, message: str
) -> None:
    """What is missing to simulate the GPU, or to fit a profile to it, is said in one line."""
    samples = tmp_path / "samples.jsonl"
    samples.write_text(altered(change))
    error = harli("run", "--trace", trace, "--samples", samples, *(("--profile", SHIPPED) if profile else ())).error()
    assert message in error
    assert "samples.jsonl" in error


def test_short_sequences_and_repeats_do_no_harm(harli: Harli, trace: Path, tmp_path: Path) -> None:
    """A sequence too short to settle is left out; prefill samples of one length, or of part of the chip, are no puzzle."""

    def change(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        sequences = [{**line, "ms": line["ms"][:100]} for line in lines if line["kind"].endswith("sequence")]
        first = min((line for line in lines if line["kind"] == "prefill"), key=lambda line: line["tokens"])
        return [*lines, *sequences, first, {**first, "sm": 36, "ms": [1e3]}]

    samples = tmp_path / "samples.jsonl"
    samples.write_text(altered(change))
    short = tmp_path / "short.csv"
    short.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,2,44\n")
    for name, given in (("a", ()), ("b", ("--samples", samples))):
        assert harli("run", "--trace", short, *given, "--out", tmp_path / name).code == 0
    assert (tmp_path / "a" / "requests.parquet").read_bytes() == (tmp_path / "b" / "requests.parquet").read_bytes()


def test_samples_are_not_for_a_real_gpu(harli: Harli, trace: Path) -> None:
    """A GPU is served on as it is; the way to a profile of it is told."""
    run = ("run", "--backend", "cuda", "--load-format", "dummy", "--trace", trace, "--samples", SAMPLES)
    assert "they make a simulated GPU" in harli(*run).error()


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
    """One line that speaks of this command and of what can be done without a GPU; nothing written."""
    message = harli("profile", tmp_path / "samples.jsonl").error()
    assert message.startswith("harli: harli profile, which measures a GPU, cannot run here: ")
    assert "--backend" not in message
    assert "harli run --samples FILE, harli fit FILE PROFILE" in message
    assert not list(tmp_path.iterdir())


def test_profile_into_a_place_that_takes_no_file_is_refused_before_measuring(harli: Harli, tmp_path: Path) -> None:
    """Also where nothing could be measured: the place is looked at first."""
    assert f"cannot write {tmp_path}: it is a folder" in harli("profile", tmp_path).error()
    assert "No such file or directory" in harli("profile", tmp_path / "missing" / "samples.jsonl").error()
