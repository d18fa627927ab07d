"""The table and the lines below it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harli_cli.remarks import overload_warning, remarks, trust_warning
from harli_cli.tables import result_table
from harli_cli.wording import title
from tests.cli.conftest import Harli

Summary = dict[str, Any]


@pytest.fixture
def summary(harli: Harli, trace: Path) -> Summary:
    """The summary of a small run."""
    found: Summary = json.loads(harli("run", "--trace", trace, "--json").out)
    return found


def row(summary: Summary, label: str) -> str:
    """The value beside ``label`` in the printed table."""
    text = StringIO()
    Console(file=text, width=100).print(result_table(summary))
    (line,) = [line for line in text.getvalue().splitlines() if label in line]
    return line.strip("│ ").split("│")[1].strip()


def test_title_says_what_was_run(summary: Summary) -> None:
    """Policy, trace, GPUs, models, target and seed, broken between parts only."""
    text = title(summary)
    assert text.replace("\n", " | ").split(" | ") == [
        "hybrid",
        f"three.csv, 3 requests in {summary['duration_s']:,.0f} s",
        "2 decode + 1 prefill h200",
        "llama3-8b, finetuning llama3-8b",
        "target 40 ms, seed 0",
    ]
    assert max(map(len, text.splitlines())) <= 84


def test_names_in_the_title_are_no_markup(summary: Summary) -> None:
    """Brackets in a file's name are printed as they are."""
    summary["config"]["trace"] = "folder/a[bold]b.csv"
    text = StringIO()
    Console(file=text, width=100).print(result_table(summary))
    assert "a[bold]b.csv, 3 requests" in text.getvalue()


def test_title_of_a_run_without_prefill_and_finetuning(harli: Harli, trace: Path) -> None:
    """What there is none of is left out, or said."""
    options = ("--no-prefill", "--policy", "inference_only", "--json")
    text = title(json.loads(harli("run", "--trace", trace, *options).out))
    assert "2 decode h200" in text
    assert "llama3-8b, no finetuning" in text


def test_title_of_a_run_that_was_cut_short(harli: Harli, trace: Path) -> None:
    """A horizon that ended the run is in the title; what had not arrived was not asked for and is not judged."""
    found = json.loads(harli("run", "--trace", trace, "--horizon-s", "2", "--json").out)
    assert "1 request, stopped at 2 s" in title(found)
    requests = found["requests"]
    assert (requests["arrivals"], requests["not_arrived"], requests["output_tokens_asked"]) == (1, 2, 44)
    later = json.loads(harli("run", "--trace", trace, "--horizon-s", "900", "--json").out)
    assert "stopped" not in title(later)


def test_memory_and_sms_in_units(summary: Summary) -> None:
    """Rows with their GiB; the three shares of the SMs."""
    summary["memory"].update(rows_lent=8, rows_reclaimed=4, row_bytes=1 << 27)
    summary["steps"]["sm_allotment"] = {"decode": 0.2, "finetune": 0.7}
    assert row(summary, "rows lent / reclaimed") == "8 (1.0 GiB) / 4 (0.5 GiB)"
    assert row(summary, "SM allotment decode / finetune / idle") == "20.0% / 70.0% / 10.0%"


def test_one_gpu_is_singular(summary: Summary) -> None:
    """No plural for one."""
    summary["finetune"].update(gpus=1, tokens_per_s=1234.0)
    assert row(summary, "finetune throughput (tokens/s)") == "1,234 on 1 GPU"


def test_token_gaps(summary: Summary) -> None:
    """Count and share."""
    summary["itl_over_target"] = {"count": 1200, "share": 0.0123}
    assert row(summary, "token gaps over target") == "1,200 (1.23%)"


@pytest.mark.parametrize(("violations", "value"), [(1, "+50.0%"), (2, "+50.0% (target not kept)")])
def test_gain_without_the_target(summary: Summary, violations: int, value: str) -> None:
    """More than 0.1 % of steps over target because of finetuning: the gain was not had within the target."""
    summary["steps"].update(count=1000, violations={"solo": 50, "finetune_caused": violations})
    summary["baselines"] = {
        "separate": {"serving_gpus": 1, "gain": 0.5},
        "inference_only": {"excess_violations": 0},
    }
    assert row(summary, "gain over separate (1 serving)") == value


def test_a_comparison_names_the_policies_that_rest_on_extrapolation() -> None:
    """One line for all of them; those that were measured, or have no such figure, are not in it."""
    rows: list[Summary] = [
        {"policy": "hybrid", "extrapolated": {"mean": 0.326}},
        {"policy": "mine", "extrapolated": {"mean": 0.927}},
        {"policy": "separate", "extrapolated": {"mean": 0.05}},
        {"policy": "inference_only", "extrapolated": None},
    ]
    (line,) = trust_warning(rows)
    assert "hybrid 32.6%, mine 92.7% (" in line
    assert "separate" not in line
    assert trust_warning(rows[2:]) == []


NAMES = ("completed", "rejected", "unfinished")


def test_an_overloaded_fleet_is_told_policy_by_policy() -> None:
    """Who leaves more than a twentieth of the requests, rejected ones included; nobody where nothing arrived."""
    counts = {"a": (95, 0, 5), "b": (94, 3, 3), "c": (10, 0, 90), "d": (0, 0, 0)}
    rows = [
        {"policy": policy, **{name: {"mean": float(count)} for name, count in zip(NAMES, found, strict=True)}}
        for policy, found in counts.items()
    ]
    (line,) = overload_warning(rows)
    assert "b 6.0%, c 90.0%;" in line
    assert "a 5.0%" not in line
    assert overload_warning([rows[0], rows[3]]) == []


def test_warning_where_much_is_extrapolated(summary: Summary) -> None:
    """More than 5 % of one kind: the kind, the share, and where to read on."""
    summary["device_model"] = {
        "evaluated": {"colocated": 1000, "decode": 1000},
        "extrapolated": {"colocated": 51, "decode": 50},
    }
    (line,) = remarks(summary)
    assert line.startswith("warning: 5.1% of colocated durations lie outside the measured range")
    assert "batches under 8 beside finetuning" in line
    assert "docs/adr/0002" in line
    assert (Path(__file__).parents[2] / line.split()[-1].rstrip(")")).is_file()


def test_warning_stands_below_the_table(harli: Harli, trace: Path) -> None:
    """Three requests never make a batch of 8."""
    below = harli("run", "--trace", trace).out.split("┘")[-1]
    assert "% of colocated durations lie outside the measured range" in below
