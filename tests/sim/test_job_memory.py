"""Rows go to a job at once and come back behind a fence: when the unit that may still read them is over."""

from __future__ import annotations

import pytest

from backends.sim.counting_allocator import CountingAllocator
from backends.sim.finetune_job import FinetuneJob
from backends.sim.job_memory import JobMemory
from backends.sim.layer_swaps import LayerSwaps
from backends.sim.pcie_link import PcieLink
from harli_core.memory.counting_provider import CountingProvider
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.window import LayerWindow
from harli_core.model import model_shape
from harli_core.working_set import JobShape, WorkingSet

LLAMA = model_shape("llama3-8b")
SHAPE = JobShape("job", LLAMA, 1024, 4)
GEOMETRY = GridGeometry.of(LLAMA, 30 * 10**9)
NEEDS = WorkingSet.of(SHAPE, GEOMETRY)
UNIT_MS = 4.0


def lent(rows: int, remap_row_ms: float = 0.0) -> tuple[JobMemory, FinetuneJob, CountingAllocator]:
    """A job that holds ``rows`` rows and has all layers that fit into them, at time 0."""
    allocator = CountingAllocator(GEOMETRY, CountingProvider(aliasing=True, remap_row_ms=0.0), 1)
    swaps = LayerSwaps(LayerWindow(NEEDS.layers, NEEDS.minimum_layers), PcieLink(1e12), LLAMA.layer_bytes)
    job = FinetuneJob(SHAPE, lambda kind, sms: UNIT_MS, swaps)
    memory = JobMemory(allocator, NEEDS, job, remap_row_ms)
    memory.grow(rows)
    return memory, job, allocator


def test_under_the_floor_a_job_cannot_start() -> None:
    """Rows are held, but neither base nor layers are in them; with the floor both are."""
    memory, job, _ = lent(NEEDS.rows_floor - 1)
    assert (memory.rows_held, memory.resident_layers, job.ready) == (NEEDS.rows_floor - 1, 0, False)
    memory.grow(NEEDS.rows_floor)
    assert (memory.rows_held, job.ready) == (NEEDS.rows_floor, True)
    assert memory.resident_layers >= NEEDS.minimum_layers


def test_all_rows_hold_all_layers() -> None:
    """With what it wants the window has every layer; with one row less it has not."""
    assert lent(NEEDS.rows_wanted)[0].resident_layers == NEEDS.layers
    assert lent(NEEDS.rows_wanted - 1)[0].resident_layers < NEEDS.layers


@pytest.mark.parametrize("remap_row_ms", [0.0, 3.0])
def test_rows_come_back_when_the_unit_is_over(remap_row_ms: float) -> None:
    """A quarter of a unit of 4 ms is done: 3 ms to go, and what the lending strategy costs a row."""
    memory, job, allocator = lent(60, remap_row_ms)
    job.run(0.0, UNIT_MS * 0.25, 132)
    memory.shrink(50, now_ms=100.0)
    given = 60 - memory.rows_held
    assert given == 10
    ready_ms = 100.0 + 0.75 * UNIT_MS + remap_row_ms * given
    assert memory.next_fence_ms() == pytest.approx(ready_ms, abs=0.01)
    assert allocator.view().rows_reclaiming == given
    assert not memory.poll(ready_ms - 0.01)
    assert memory.poll(ready_ms + 0.01)
    assert (memory.next_fence_ms(), allocator.view().rows_reclaiming, allocator.view().rows_lent) == (None, 0, 50)
    assert memory.reclaimed_total == given
    allocator.check_integrity()


def test_between_units_rows_come_back_at_once() -> None:
    """Nothing reads them any more."""
    memory, _, _ = lent(60)
    memory.shrink(50, now_ms=100.0)
    assert memory.poll(100.0)


def test_layers_in_given_rows_are_dropped() -> None:
    """The window is as small as the rows left, and no more layers are resident than it has places."""
    memory, job, _ = lent(NEEDS.rows_wanted)
    job.run(0.0, 500.0, 132)
    assert len(job.swaps.window.resident) == NEEDS.layers
    memory.shrink(60, 500.0)
    assert memory.resident_layers < NEEDS.layers
    assert len(job.swaps.window.resident) <= memory.resident_layers


def test_the_minimum_window_is_kept() -> None:
    """However few rows are asked for, base and two layers stay."""
    memory, job, _ = lent(80)
    memory.shrink(0, 0.0)
    assert memory.resident_layers == NEEDS.minimum_layers
    assert NEEDS.rows_floor <= memory.rows_held <= NEEDS.rows_floor + 1
    assert job.ready
