"""No view carries what a live server cannot know: not by name, not by type, and not in what it says."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from harli_core.decision_log import DecisionRecord
from harli_core.types import StepView

KNOWN_ONLY_AFTERWARDS = (
    "output",
    "remain",
    "finish",
    "complet",
    "generat",
    "left",
    "until",
    "deadline",
    "future",
    "ends_",
)


def fields_of(kind: type, path: str = "view") -> Iterator[tuple[str, Any]]:
    """Every field of a dataclass and of the dataclasses in it: path and type."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        where, hint = f"{path}.{field.name}", hints[field.name]
        inner = [hint, *get_args(hint)] if get_origin(hint) in (tuple, types.UnionType) else [hint]
        yield where, hint
        for part in inner:
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from fields_of(part, where)


def test_the_walk_reaches_every_view() -> None:
    """The walk below is not empty-handed: it goes through memory and jobs too."""
    paths = {path for path, _ in fields_of(StepView)}
    assert {"view.batch", "view.memory.rows_free", "view.jobs.in_flight_ms"} <= paths


def test_no_field_speaks_of_the_future() -> None:
    """No name in a view has to do with output still to come."""
    found = [
        path for path, _ in fields_of(StepView) if any(word in path.split(".")[-1] for word in KNOWN_ONLY_AFTERWARDS)
    ]
    assert found == []


def test_a_view_is_made_of_plain_values() -> None:
    """Numbers, texts, and views: no object through which a policy could look into the backend."""
    for path, hint in fields_of(StepView):
        leaves = get_args(hint)[:1] if get_origin(hint) is tuple else (hint,)
        for leaf in leaves:
            plain = leaf in (int, float, str) or get_origin(leaf) is Literal or dataclasses.is_dataclass(leaf)
            assert plain, f"{path} is a {hint}"


def key(record: DecisionRecord) -> tuple[int, int, float]:
    """What identifies a record: instance, step, time."""
    return record.view.instance, record.view.step, record.view.time_s


@pytest.mark.parametrize(
    ("policy", "config"),
    [
        ("hybrid", {}),
        ("harli", {"qos_ms": 12.0}),
        ("static_split", {}),
        ("pause_on_load", {"policy_options": {"threshold": 2}}),
        ("inference_only", {"prefill_gpus": 1}),
        ("hybrid", {"memory_gb": 27.5, "qos_ms": 20.0}),
    ],
)
def test_outputs_to_come_change_nothing_before_they_end(
    policy: str, config: dict[str, Any], requests_of: Any, record_list: Any
) -> None:
    """Two traces that differ only in output lengths: the whole log is equal up to the first completion in either."""
    arrivals = [0.0, 0.02, 0.05, 0.05, 0.21, 0.3, 0.3, 0.44, 0.5, 0.6]
    prompts = [300, 900, 80, 1500, 60, 700, 250, 40, 800, 120]
    logs, ends_s = [], []
    for outputs in ([90] * 10, [150, 400, 91, 1000, 120, 95, 300, 222, 180, 92]):
        sink = record_list()
        outcome = requests_of(arrivals, prompts, outputs).simulate(policy, {}, sink, gpus=2, **config)
        logs.append({key(record): record for record in sink.records})
        ends_s.append(float(outcome.requests.last_token_s.min()))
    first_s = min(ends_s)
    before = [{at: record for at, record in log.items() if at[2] < first_s} for log in logs]
    assert before[0].keys() == before[1].keys()
    assert len(before[0]) >= 3
    whole = 0
    for at, record in before[0].items():
        other = before[1][at]
        assert (record.view, record.plan) == (other.view, other.plan)
        end_s = at[2] - record.view.elapsed_ms / 1000.0
        for result, same in zip(record.results, other.results, strict=False):
            end_s += sum(result.latency_ms) / 1000.0 + result.idle_s
            if end_s >= first_s - 1e-9:
                break
            assert result == same
            whole += 1
    assert whole > 5
