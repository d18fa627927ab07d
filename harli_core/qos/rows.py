"""How many grid rows a finetuning job may hold: what KV can spare, without following every small change."""

from __future__ import annotations

from harli_core.memory.reservation import Reservation
from harli_core.types import JobView, StepView

GROW_ROWS = 4
"""A job below its wish grows only when it gains at least this many rows (hysteresis)."""


def rows_for(job: JobView, view: StepView, reservation: Reservation) -> int:
    """Target rows of ``job``: give way at once, grow in larger steps, never under the floor, never over the wish."""
    lendable = reservation.lendable_rows(view.memory, view.batch, view.waiting_tokens)
    target = max(job.rows_floor, min(job.rows_wanted, lendable))
    if job.rows_floor <= job.rows_held < target < min(job.rows_wanted, job.rows_held + GROW_ROWS):
        return job.rows_held
    return target
