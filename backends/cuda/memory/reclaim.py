"""Rows on their way from finetuning back to KV: given up, fenced, scrubbed, returned; nothing waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.cuda.memory.provider import NativeProvider
from harli_core.errors import MemoryAccountingError
from harli_core.memory.unified import UnifiedAllocator


@dataclass(frozen=True, slots=True)
class _Scrubbing:
    """Rows whose fill was launched, and the event behind it."""

    rows: tuple[int, ...]
    event: int


class Reclaim:
    """The way back, moved on by `poll` at each step boundary.

    ::

        request: tensors given up -> rows idle -> closed to allocation      (draining)
        poll:    fences of their streams have passed -> fill launched       (scrubbing)
        poll:    event of the fill has passed -> finish_return, open to KV  (returned)

    ``memory`` must run on ``provider``. A driver error in `poll` leaves the rows where they were: poll again.
    """

    def __init__(self, memory: UnifiedAllocator, provider: NativeProvider, scrub_stream: int) -> None:
        """Start with no row on its way; fills run on ``scrub_stream``."""
        self._memory = memory
        self._provider = provider
        self._stream = scrub_stream
        self._draining: list[int] = []
        self._scrubbing: list[_Scrubbing] = []
        self._spare_events: list[int] = []

    @property
    def rows_under_way(self) -> tuple[int, ...]:
        """Rows requested and not yet back, ascending."""
        return tuple(sorted([*self._draining, *(row for batch in self._scrubbing for row in batch.rows)]))

    def request(self, rows_wanted: int, give_up: Callable[[], bool] | None = None) -> tuple[int, ...]:
        """Put up to ``rows_wanted`` rows on their way, lowest first, and return them.

        While too few rows are free of tensors, ``give_up`` is asked to free a layer's worth; it returns whether it did.
        """
        space = self._provider.space
        wanted = max(0, rows_wanted)
        chosen = space.lowest_idle_rows(wanted)
        while len(chosen) < wanted and give_up is not None and give_up():
            chosen = space.lowest_idle_rows(wanted)
        for row in chosen:
            self._memory.finetune_blocks.remove_row(row)
            self._memory.grid.begin_reclaim(row)
            space.close_row(row)
            self._draining.append(row)
        return tuple(chosen)

    def poll(self) -> tuple[int, ...]:
        """Move every row on as far as its fences allow; return those that came back now."""
        returned = self._finish()
        space = self._provider.space
        space.poll()
        ready = tuple(row for row in self._draining if space.row_empty(row))
        if ready:
            self._scrub(ready)
            returned += self._finish()
        return returned

    def close(self) -> None:
        """Destroy the events; raises `MemoryAccountingError` while rows are on their way."""
        if self.rows_under_way:
            raise MemoryAccountingError(f"rows {list(self.rows_under_way)} are still on their way back")
        while self._spare_events:
            self._provider.driver.destroy(self._spare_events.pop())

    def check_integrity(self) -> None:
        """Raise `MemoryAccountingError` unless the rows under way are those that the grid calls reclaiming."""
        if self.rows_under_way != self._memory.grid.reclaiming_rows():
            raise MemoryAccountingError(
                f"reclaim: rows {self.rows_under_way} under way, the grid has {self._memory.grid.reclaiming_rows()}"
            )

    def _scrub(self, rows: tuple[int, ...]) -> None:
        driver = self._provider.driver
        if not self._spare_events:
            self._spare_events.append(driver.create_event())
        for row in rows:
            self._provider.scrub(row, self._stream)
        driver.record(self._spare_events[-1], self._stream)
        self._scrubbing.append(_Scrubbing(rows, self._spare_events.pop()))
        self._draining = [row for row in self._draining if row not in rows]

    def _finish(self) -> tuple[int, ...]:
        returned: list[int] = []
        while self._scrubbing and self._provider.driver.query(self._scrubbing[0].event):
            batch = self._scrubbing[0]
            for row in batch.rows:
                self._memory.finish_return([row])
                returned.append(row)
                self._scrubbing[0] = _Scrubbing(batch.rows[batch.rows.index(row) + 1 :], batch.event)
            self._spare_events.append(self._scrubbing.pop(0).event)
        return tuple(returned)
