"""`--perfetto`: a Chrome trace that is valid, ordered and nested."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from harli_cli.perfetto import PerfettoWriter


@pytest.fixture(scope="module", params=["hybrid", "harli", "separate"])
def events(request: Any, conversation: Any, tmp_path_factory: Any) -> tuple[list[dict[str, Any]], Any]:
    """The events of a short run, and its books."""
    path: Path = tmp_path_factory.mktemp("trace") / "trace.json"
    options = {"serving_gpus": 1} if request.param == "separate" else {}
    with PerfettoWriter(path) as sink:
        outcome = conversation(40, 8.0).simulate(request.param, options, sink, gpus=2)
    return json.loads(path.read_text())["traceEvents"], outcome


def test_phases_and_units(events: Any) -> None:
    """Known phases with the keys that the format asks of them; microseconds up to the end of the run."""
    found, outcome = events
    assert {event["ph"] for event in found} <= {"X", "i", "C", "M"}
    for event in found:
        assert {"ph", "pid", "tid", "name", "args"} <= event.keys()
        if event["ph"] != "M":
            assert 0.0 <= event["ts"] + event.get("dur", 0.0) <= outcome.duration_s * 1e6 + 1e5
        if event["ph"] == "X":
            assert event["dur"] >= 0.0


def test_one_slice_a_step(events: Any) -> None:
    """Steps are all there, with the latencies of the book."""
    found, outcome = events
    steps = [event["dur"] / 1000.0 for event in found if event["name"] == "step"]
    assert sorted(steps) == pytest.approx(sorted(outcome.steps.latency_ms))


def test_slices_nest(events: Any) -> None:
    """On a thread a slice lies inside another one or beside it, never across its end."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events[0]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        open_ends: list[float] = []
        for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)
