"""The reservation follows its two formulas and bounds what may be lent."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harli_core.errors import ConfigError
from harli_core.memory.counting_provider import CountingProvider
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.reservation import Reservation
from harli_core.memory.unified import UnifiedAllocator
from harli_core.model import MODELS


def test_paper_formula() -> None:
    """``(T / qos) * max_bs * Mem_kv`` in bytes, rounded up to whole rows, whatever the batch of the moment."""
    model = MODELS["llama3-8b"]
    grid = GridGeometry.of(model, 16 * 1024**3)
    paper = Reservation.paper(row_tokens=grid.row_tokens, swap_out_ms=400.0, max_batch=256)
    reserved_bytes = 400.0 / 50.0 * 256 * model.kv_bytes_per_token
    assert paper.reserved_rows(batch=1) == math.ceil(reserved_bytes / grid.row_bytes) == 2
    assert paper.reserved_tokens(batch=1) == 2048
    assert Reservation.paper(1024, 10.0, 256).reserved_tokens(1) == 1024


def test_measured_formula() -> None:
    """Whole steps within the p99 reclaim time, a token a request each, plus the prompts of an admission."""
    now = Reservation.measured(1024, reclaim_p99_ms=21.0, shortest_step_ms=5.0, admission_tokens=3000)
    assert now.reserved_tokens(batch=10) == 5 * 10 + 3000
    assert now.reserved_rows(batch=10) == 3
    fixed = Reservation.measured(1024, 21.0, 5.0, 3000, max_batch=64)
    assert fixed.reserved_tokens(batch=10) == 5 * 64 + 3000


@pytest.mark.parametrize(
    ("give_back_ms", "step_ms", "row_tokens", "max_batch", "admission"),
    [
        (-1, 5, 4, 1, 0),
        (math.nan, 5, 4, 1, 0),
        (1, 0, 4, 1, 0),
        (1, math.inf, 4, 1, 0),
        (1, 5, 0, 1, 0),
        (1, 5, 4, 0, 0),
        (1, 5, 4, 1, -1),
    ],
)
def test_impossible_values_are_refused(
    give_back_ms: float, step_ms: float, row_tokens: int, max_batch: int, admission: int
) -> None:
    """Negative, infinite and missing times and sizes."""
    with pytest.raises(ConfigError, match="reservation"):
        Reservation.measured(row_tokens, give_back_ms, step_ms, admission, max_batch)


def test_paper_needs_a_largest_batch() -> None:
    """The paper's formula has no meaning without ``max_bs``."""
    with pytest.raises(ConfigError, match="needs max_batch"):
        Reservation("paper", 4, 1.0, 50.0, None)


def test_lendable_rows_of_an_empty_and_of_a_full_grid() -> None:
    """All rows but the reservation's and row 0; none when KV is full."""
    allocator = UnifiedAllocator(GridGeometry(row_tokens=4, columns=1, rows=8), CountingProvider())
    nothing_held = Reservation.measured(4, 0.0, 1.0, 0)
    assert nothing_held.lendable_rows(allocator.view(), batch=3, waiting_tokens=0) == 7
    assert Reservation.measured(4, 2.0, 1.0, 3).lendable_rows(allocator.view(), batch=3, waiting_tokens=2) == 5
    allocator.allocate_tokens(31)
    assert nothing_held.lendable_rows(allocator.view(), 3, 0) == 0
    assert nothing_held.lendable_rows(allocator.view(), 3, 50) == 0


@settings(max_examples=60, deadline=None, database=None)
@given(used=st.integers(0, 31), lent=st.integers(0, 7), admission=st.integers(0, 9), waiting=st.integers(0, 9))
def test_lending_what_is_lendable_leaves_the_reservation(used: int, lent: int, admission: int, waiting: int) -> None:
    """The target depends on tokens, not on the rows lent already: it leaves what KV needs, and no row more."""
    allocator = UnifiedAllocator(GridGeometry(row_tokens=4, columns=1, rows=8), CountingProvider())
    allocator.lend_rows(lent)
    used = min(used, allocator.view().free_tokens)
    allocator.allocate_tokens(used)
    reservation = Reservation.measured(4, 2.0, 1.0, admission)
    target = reservation.lendable_rows(allocator.view(), 1, waiting)
    needed = 1 + used + reservation.reserved_tokens(1) + waiting
    assert target == max(0, (32 - needed) // 4)
