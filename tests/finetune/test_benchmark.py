"""The finetune benchmark as a program, on the CPU: every part runs through, and its figures add up."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import benchmarks.finetune.measure as measure
from backends.cuda.finetune.assembly import build_engine
from benchmarks.finetune.breakdown import PARTS
from tests.finetune.test_graphs import FixedAddresses, graphs_of


@pytest.fixture(autouse=True)
def own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results go into a folder of the test's."""
    monkeypatch.setenv("HARLI_RESULTS", str(tmp_path))


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What the program writes for the tiny model."""
    sizes = ("--models", "tiny", "--length", "16", "--accumulation", "2", "--steps", "2", "--warm-up", "1")
    monkeypatch.setattr(sys, "argv", ["measure.py", *sizes, *arguments])
    measure.main()
    written: dict[str, Any] = json.loads((tmp_path / "tiny_qv.json").read_text())
    return written


def test_breakdown_adds_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every layer, head and optimizer of both loops is timed once each way, and the parts are the whole step."""
    found = run(monkeypatch, tmp_path, "--parts", "breakdown", "--rows", "1", "2")["parts"]["breakdown"]
    for rows in ("rows_1", "rows_2"):
        for name in ("plain_bf16", "harli", "harli_eager"):
            figures = found[rows][name]
            assert set(figures["part_ms_a_step"]) == set(PARTS)
            pieces = figures["pieces_a_step"]
            assert (pieces["embedding"], pieces["forward"], pieces["backward"]) == (2, 2 * 4, 2 * 4), name
            assert min(figures["part_ms_a_step"].values()) > 0.0
        assert found[rows]["plain_bf16"]["pieces_a_step"]["head_loss"] == 2 * 2  # forward, backward
        assert found[rows]["harli"]["pieces_a_step"]["head_loss"] == 2
        more = found[rows]["harli_against_plain"]["more_ms_a_step"]
        ours, plain = (found[rows][name]["part_ms_a_step"] for name in ("harli", "plain_bf16"))
        assert all(more[part] == ours[part] - plain[part] for part in PARTS)
        products = found[rows]["products_tflop_a_step"]
        assert 0.0 < products["harli"] <= products["plain"]
        assert set(found[rows]["stage_copy_ms_a_unit"]) == {"forward", "backward"}


def test_parts_share_a_file_and_are_measured_again_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The part after `alone` gets a fresh model; measuring a part again keeps the others as they were."""
    both = run(monkeypatch, tmp_path, "--parts", "alone", "breakdown", "--rows", "1")
    assert set(both["parts"]) == set(both["made_by"]) == {"alone", "breakdown"}
    again = run(monkeypatch, tmp_path, "--parts", "breakdown", "--rows", "2", "--again")
    assert again["parts"]["alone"] == both["parts"]["alone"]
    assert set(again["parts"]["breakdown"]) == {"rows_2", "batch"}


@pytest.mark.parametrize("model", ["tiny", "qwen2-tiny"])
def test_partitions_run_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str) -> None:
    """Each partition's stream has graphs of its own, forgotten afterwards; what was told to cuBLAS is in the figures."""
    capture = FixedAddresses()
    bench = measure.Bench(
        model,
        Namespace(
            parts=["partitions"],
            again=False,
            targets="qv",
            rank=4,
            length=16,
            rows=[1, 2],
            accumulation=4,
            steps=1,
            warm_up=2,
        ),
    )

    def partition(sms: int) -> tuple[Any, int]:
        capture.streams, capture.stream_sms, capture.fast = capture.streams + 1, sms, sms
        return None, sms

    monkeypatch.setattr(measure, "build_engine", partial(build_engine, capture=capture))
    monkeypatch.setattr(measure, "chip_sms", lambda: 132)
    monkeypatch.setattr(measure, "partition_stream", partition)
    bench.partitions()
    found = json.loads((tmp_path / f"{model}_qv.json").read_text())["parts"]["partitions"]
    assert (found["sms"], found["rows"]) == (132, 2)
    assert [entry["sms"] for entry in found["partitions"]] == list(measure.PARTITIONS_SMS)
    for entry in found["partitions"]:
        assert entry["share_of_proportional"] == entry["tokens_per_s"] / found["tokens_per_s"] * 132 / entry["sms"]
        assert entry["cublas_told_sms"]
        assert all(entry["cublas_told_sms"].values())
    assert {key[0] for key in graphs_of(bench.build_engine())._graphs} == {1}
