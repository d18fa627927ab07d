"""`--perfetto`: a Chrome trace that is valid, ordered and nested."""

from __future__ import annotations

import json
import subprocess
import sys
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
        for index, state in enumerate(outcome.instances):
            sink.add_copies(index, state.copies or (), outcome.duration_s)
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


def test_swaps_are_spans_of_the_copy_stream(events: Any) -> None:
    """One a layer that was brought in before the end, each as long as its bytes take on the link, on a thread so named."""
    found, outcome = events
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["name"] == "thread_name"}
    swaps = [event for event in found if event["name"] == "swap in"]
    assert len(swaps) == sum(state.swaps_in for state in outcome.instances) > 0
    assert {names[event["pid"], event["tid"]] for event in swaps} == {"copy stream"}
    layer_ms = 436_224_000 / 50e6
    assert [event["dur"] / 1000.0 for event in swaps] == pytest.approx([layer_ms] * len(swaps), rel=0.05)
    assert {event["args"]["layer"] for event in swaps} == set(range(32))


def test_a_swap_that_the_end_cuts_off(tmp_path: Path) -> None:
    """It ends with the run; one that would begin later is not there."""
    with PerfettoWriter(tmp_path / "t.json") as sink:
        sink.add_copies(0, [(1, 5.0, 15.0), (2, 15.0, 25.0), (3, 25.0, 35.0)], 0.02)
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [(event["ts"], event["dur"], event["args"]) for event in found] == [
        (5e3, 1e4, {"layer": 1}), (15e3, 5e3, {"layer": 2})
    ]  # fmt: skip


def test_the_command_line_writes_all_of_it(tmp_path: Path) -> None:
    """Steps, turns and swaps are in the file that `harli run --perfetto` leaves."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,200\n0.5,200,300\n")
    command = [sys.executable, "-m", "harli_cli", "run", "--trace", str(trace), "--perfetto", "t.json"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"step", "decode", "turn", "swap in"} <= {event["name"] for event in found}
