"""Views as a backend might show them, drawn at random or set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harli_core.types import JobView, MemoryView, StepView


@pytest.fixture(scope="session")
def view_of() -> Callable[..., StepView]:
    """``view_of(batch, kv_tokens, job={..}, memory={..}, **view)``: a plain view with one job and plenty of memory."""

    def make(
        batch: int = 8, kv_tokens: int | None = None, job: dict[str, Any] | None = None, jobs: int = 1, **view: Any
    ) -> StepView:
        tokens = batch * 1000 if kv_tokens is None else kv_tokens
        rows_kv = tokens // 1024 + 1
        rows_free = 886 - 100 - rows_kv
        free_tokens = rows_free * 1024 + rows_kv * 1024 - tokens
        fields: dict[str, Any] = {
            "job_id": "job-0", "next_unit": "forward", "unit_tokens": 1024, "rows_held": 100, "rows_wanted": 135,
            "rows_floor": 37, "window_layers": 20, "layers": 32, "in_flight_sms": 0, "in_flight_ms": 0.0,
        }  # fmt: skip
        views = tuple(JobView(**{**fields, **(job or {}), "job_id": f"job-{index}"}) for index in range(jobs))
        memory = MemoryView(1024, 1 << 27, 886, rows_kv, 100, rows_free, 0, tokens, free_tokens, 0)
        rest = {"instance": 0, "step": 0, "time_s": 0.0, "waiting": 0, "waiting_tokens": 0, "elapsed_ms": 0.0, **view}
        return StepView(batch=batch, kv_tokens=tokens, memory=memory, jobs=views, **rest)

    return make
