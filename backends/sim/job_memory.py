"""The lent rows of one job: its base, one slot a resident layer, and rows on their way back to KV."""

from __future__ import annotations

from dataclasses import dataclass

from backends.sim.counting_allocator import CountingAllocator
from backends.sim.finetune_job import FinetuneJob
from harli_core.memory.lent_blocks import Extents
from harli_core.memory.row_tokens import RowMoves
from harli_core.types import JobView
from harli_core.working_set import WorkingSet


@dataclass(frozen=True, slots=True)
class Fence:
    """Rows that KV gets back at ``ready_ms``: when the unit that may still read them is over."""

    rows: tuple[int, ...]
    ready_ms: float


class JobMemory:
    """Moves a job towards a number of rows: lends free rows, or drops layers and gives rows back behind a fence."""

    def __init__(self, allocator: CountingAllocator, needs: WorkingSet, job: FinetuneJob, remap_row_ms: float) -> None:
        """``remap_row_ms`` is what the lending strategy costs a row (0 under ``alias``)."""
        self.needs = needs
        self.rows_held = 0
        self.lent_total = 0
        self.reclaimed_total = 0
        self.fences: list[Fence] = []
        self._allocator = allocator
        self._job = job
        self._remap_row_ms = remap_row_ms
        self._base: Extents | None = None
        self._layers: list[Extents] = []

    @property
    def resident_layers(self) -> int:
        """Layers that the window has room for."""
        return self._job.swaps.window.capacity if self._base is not None else 0

    def follow(self, rows: int, growing: int, now_ms: float) -> RowMoves | None:
        """Lend or reclaim towards ``rows``; returns the compaction that this took, if any.

        However much is asked for, ``growing`` requests keep a slot each for their next token.
        """
        rows = max(rows, self.needs.rows_floor)
        if rows < self.rows_held:
            self.shrink(rows, now_ms)
        spare_tokens = self._allocator.tokens.free_tokens - growing
        rows = min(rows, self.rows_held + spare_tokens // self._allocator.geometry.row_tokens)
        return self.grow(rows) if rows > self.rows_held else None

    def make_room(self, tokens: int, now_ms: float) -> None:
        """Give back rows for ``tokens``, as far as the job can, unless some are on their way already."""
        if not self.fences and self.rows_held > self.needs.rows_floor:
            rows = -(-tokens // self._allocator.geometry.row_tokens)
            self.shrink(max(self.needs.rows_floor, self.rows_held - rows), now_ms)

    def view(self) -> JobView:
        """What a policy may see of the job."""
        job = self._job
        return JobView(
            job.shape.job_id,
            job.cursor.unit.kind,
            job.shape.unit_tokens,
            self.rows_held,
            self.needs.rows_wanted,
            self.needs.rows_floor,
            self.resident_layers,
            self.needs.layers,
            job.sms,
            job.in_flight_ms(),
        )

    def grow(self, rows: int) -> RowMoves | None:
        """Borrow up to ``rows`` rows in all; returns the compaction that freed rows for it, if there was one."""
        wanted = rows - self.rows_held
        lent = self._allocator.lend_rows(wanted)
        compaction = None
        if lent < wanted:
            compaction = self._allocator.tokens.compact(wanted - lent)
            lent += self._allocator.lend_rows(wanted - lent) if compaction.freed_rows else 0
        self.rows_held += lent
        self.lent_total += lent
        self._fill()
        return compaction if compaction is not None and compaction.tokens else None

    def shrink(self, rows: int, now_ms: float) -> None:
        """Give back down to ``rows`` rows (not below what base and minimum window need), furthest layers first."""
        surplus = self.rows_held - rows
        while len(self._allocator.rows_returnable()) < surplus and len(self._layers) > self.needs.minimum_layers:
            self._allocator.finetune_blocks.free(self._layers.pop())
        window = self._job.swaps.window
        if self.needs.layer_blocks and self._base is not None:
            window.capacity = len(self._layers)
            self._job.swaps.shrink(self._job.cursor.unit.walk)
        given = self._allocator.begin_return(surplus)
        if not given:
            return
        self.rows_held -= len(given)
        ready_ms = now_ms + self._job.in_flight_ms() + self._remap_row_ms * len(given)
        self.fences.append(Fence(given, ready_ms))

    def poll(self, now_ms: float) -> bool:
        """Hand rows whose fence has passed to KV; says whether there were any."""
        passed = [fence for fence in self.fences if fence.ready_ms <= now_ms]
        if not passed:
            return False
        for fence in passed:
            self._allocator.finish_return(fence.rows)
            self.reclaimed_total += len(fence.rows)
        self.fences = [fence for fence in self.fences if fence.ready_ms > now_ms]
        return True

    def next_fence_ms(self) -> float | None:
        """When the next rows come back; `None` when none are under way."""
        return min((fence.ready_ms for fence in self.fences), default=None)

    def _fill(self) -> None:
        """Take blocks for the base first, then a slot for each layer that fits."""
        blocks = self._allocator.finetune_blocks
        needs = self.needs
        if self._base is None:
            if self.rows_held < needs.rows_floor:
                return
            self._base = blocks.allocate(needs.base_blocks, contiguous=False)
        if needs.layer_blocks == 0:
            self._job.swaps.window.capacity = needs.layers
        else:
            while len(self._layers) < needs.layers and blocks.free_blocks >= needs.layer_blocks:
                self._layers.append(blocks.allocate(needs.layer_blocks, contiguous=False))
            self._job.swaps.window.capacity = len(self._layers)
        self._job.ready = True
