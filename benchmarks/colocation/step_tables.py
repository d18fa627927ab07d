"""What steps were made of: by partition, and the longest ones one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.cuda.serving.unit_times import Times, UnitTimes
from harli_core.records import StepBook

if TYPE_CHECKING:
    from backends.cuda.serving.serving_loop import ServingLoop

WORST = 20
"""The longest steps that are kept one by one."""


def by_decode_sms(steps: StepBook, late: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
    """Where the steps of the window ran: how many on each partition, and means of what they were made of, in ms."""
    on_sms = steps.spread("decode_sms")
    columns = {
        "batch": steps.spread("batch"),
        "latency_ms": np.frombuffer(steps.latency_ms),
        "decode_ms": np.frombuffer(steps.decode_ms),
        "turn_ms": np.frombuffer(steps.turn_ms),
        "turn_budget_ms": steps.spread("turn_budget_ms"),
    }
    found = {}
    for sms in np.unique(on_sms[late]):
        chosen = late & (on_sms == sms)
        means = {name: round(float(values[chosen].mean()), 3) for name, values in columns.items()}
        found[str(int(sms))] = {"steps": int(chosen.sum()), **means}
    return found


def brief_of(times: Times) -> dict[str, float]:
    """How many, their mean and the longest."""
    mean_ms = round(times.total_ms / times.count, 4)
    return {"count": times.count, "mean_ms": mean_ms, "longest_ms": round(times.longest_ms, 4)}


def slow_launches(times: UnitTimes, zero_s: float) -> list[dict[str, Any]]:
    """Launches of units that the host was held up in, ``at_s`` after the run began."""
    return [
        {"at_s": round(slow.at_ms / 1e3 - zero_s, 3), "kind": slow.kind, "sms": slow.sms, "ms": round(slow.took_ms, 3)}
        for slow in times.slow
    ]


def worst(steps: StepBook, late: NDArray[np.bool_], serving: ServingLoop | None = None) -> list[dict[str, float]]:
    """The longest steps of the window: what each was made of, in ms.

    ``budget``: the turn that its plan allowed. Where they were measured, of the host: ``until_launch`` from the emission
    before, ``admission`` in that, ``launch``.
    """
    columns: dict[str, NDArray[Any]] = {
        "end_s": steps.ends_s(),
        "latency": np.frombuffer(steps.latency_ms),
        "decode": np.frombuffer(steps.decode_ms),
        "turn": np.frombuffer(steps.turn_ms),
        "budget": steps.spread("turn_budget_ms"),
        "batch": steps.spread("batch"),
        "joined": steps.spread("joined"),
        "decode_sms": steps.spread("decode_sms"),
    }
    if serving is not None:
        columns["until_launch"] = np.asarray(serving.until_launch_ms)
        columns["admission"] = np.asarray(serving.admission_ms)
        columns["launch"] = np.asarray(serving.launch_delay_ms)
    chosen = np.flatnonzero(late)
    chosen = chosen[np.argsort(columns["latency"][chosen])[::-1][:WORST]]
    return [{name: round(float(values[at]), 3) for name, values in columns.items()} for at in chosen]
