"""``harli trace`` and the options of ``harli run`` that choose a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import REQUESTS, Harli
from tests.traces.samples import CSV, FILES, csv_bytes


def test_inspect_shows_what_is_in_a_file(harli: Harli, trace: Path) -> None:
    """Format and why, counts, quantiles and the rate over time."""
    answer = harli("trace", "inspect", trace)
    assert answer.code == 0
    for part in ("azure-2023", "requests", "index of dispersion", "prompt tokens", "rate over the span"):
        assert part in answer.out


def test_inspect_as_json(harli: Harli, trace: Path) -> None:
    """All facts as JSON without a NaN."""
    found = json.loads(harli("trace", "inspect", trace, "--json").out)
    assert (found["format"], found["requests"], found["repairs"]["sorted_rows"]) == ("azure-2023", REQUESTS, 0)


def test_inspect_tells_oddities(harli: Harli, tmp_path: Path) -> None:
    """Equal arrivals and outputs of one token are named."""
    (tmp_path / "x").write_bytes(FILES["mooncake"])
    answer = harli("trace", "inspect", "x")
    assert "2 requests arrive at the same time" in answer.out
    assert "1 requests ask for one output token" in answer.out


@pytest.mark.parametrize("name", FILES)
def test_convert_keeps_every_request(harli: Harli, tmp_path: Path, name: str) -> None:
    """Any format becomes ours, with as many requests."""
    (tmp_path / "a").write_bytes(FILES[name])
    rate = ["--rate", "2"] if name == "vidur-lengths" else []
    assert harli("trace", "convert", "a", "b.csv.zst", *rate).code == 0
    found = json.loads(harli("trace", "inspect", "b.csv.zst", "--json").out)
    assert (found["format"], found["requests"]) == ("harli-csv", 6)


def test_generate_is_seeded(harli: Harli, tmp_path: Path) -> None:
    """The same seed writes the same bytes."""
    for name in ("a.csv", "b.csv"):
        assert harli("trace", "generate", "azure-code", "--duration", 300, "--out", name, "--seed", 5).code == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "nowhere.csv"), "no such file"),
        (("convert", "synthetic", "x.txt"), "says no format"),
        (("generate", "weibull", "--duration", 60, "--out", "x.csv"), "unknown generator"),
        (("generate", "poisson", "--duration", 60, "--out", "x.csv"), "--rate"),
        (("generate", "phases", "--duration", 60, "--out", "x.csv", "--batches", "a,b"), "--batches"),
        (("generate", "azure-conv", "--duration", 60, "--out", "x.csv", "--seed", -1), "seed is -1"),
        (("inspect", "synthetic", "--format", "vidur"), "takes none"),
        (("convert", "synthetic", "x.csv", "--rate-scale", "nan"), "rate_scale"),
        (("convert", "synthetic", "x.csv", "--limit", 0), "limit"),
        (("convert", "synthetic", "x.csv", "--start", 1e9), "no request"),
    ],
)
def test_refused_in_one_line(harli: Harli, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """Bad input is one line and exit code 2, and nothing is written."""
    assert words in harli("trace", *arguments).error()
    assert not list(tmp_path.iterdir())


def test_repairs_are_counted_in_the_summary(harli: Harli, tmp_path: Path) -> None:
    """Every kind of repair that was asked for and made stands in the summary, and below the table."""
    columns = {name: list(values) for name, values in CSV["burstgpt"].items()}
    columns["Response tokens"][2], columns["Total tokens"][2] = "0", "4085"
    columns["Timestamp"][3] = "nan"
    columns["Timestamp"][5] = "0.5"
    (tmp_path / "x").write_bytes(csv_bytes(columns))
    options = ("--drop-failed", "--drop-invalid", "--sort", "--clip-prompt", 50)
    answer = harli("run", "--trace", "x", *options)
    assert answer.code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["trace"]["repairs"] == {
        "sorted_rows": 1, "dropped_failed": 1, "dropped_invalid": 1, "clipped_prompts": 3, "derived_arrivals": 0,
    }  # fmt: skip
    assert summary["trace"]["format"] == "burstgpt"
    assert "3 prompts of the trace were cut" in answer.out


def test_a_part_of_a_trace_runs(harli: Harli, tmp_path: Path, trace: Path) -> None:
    """Window, limit, copies and rate reach the run."""
    answer = harli("run", "--trace", trace, "--limit", 2, "--repeat", 3, "--rate-scale", 2, "--json")
    assert answer.code == 0
    summary = json.loads(answer.out)
    assert summary["requests"]["arrivals"] == 6
    assert summary["trace"]["span_s"] == pytest.approx((2 * 2 * 4.314579 + 4.314579) / 2)
