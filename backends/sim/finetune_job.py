"""A finetuning job beside one simulated decode instance: its cursor, its window, its time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from backends.sim.layer_swaps import LayerSwaps
from harli_core.types import UnitKind
from harli_core.units import UnitCursor, UnitOrder
from harli_core.working_set import JobShape

JobState = tuple[int, int, float, int, float, Any]
"""Where a job stood, for undoing a look ahead: unit, optimizer steps, fraction, SMs, stall and, unless settled, swaps.

A plain tuple, since one is kept for every simulated step with a turn.
"""


class FinetuneJob:
    """Walks the units of a `UnitOrder` arithmetically: time in, progress out, no event a unit.

    ``fraction`` of the current unit is done, on ``sms`` SMs; between units both are 0. A unit that began on one
    partition and goes on under another keeps its fraction, what is left of it runs at the new partition's speed.
    """

    def __init__(self, shape: JobShape, unit_ms: Callable[[UnitKind, int], float], swaps: LayerSwaps) -> None:
        """``unit_ms(kind, sms)`` is the duration of a unit alone on ``sms`` SMs."""
        self.shape = shape
        self.swaps = swaps
        self.order = UnitOrder(shape.model.layers, shape.micro_batches)
        self.cursor = UnitCursor(self.order)
        self.fraction = 0.0
        self.sms = 0
        self.stall_ms = 0.0
        self.ready = False
        self._units = len(self.order)
        self._step_tokens = shape.step_tokens
        self._unit_ms = unit_ms
        self._ends_ms: dict[int, list[float]] = {}
        self._lengths_ms: dict[int, list[float]] = {}
        self._walk_end = self._walk_ends()

    @property
    def tokens_done(self) -> int:
        """Training tokens of completed optimizer steps."""
        return self.cursor.steps * self._step_tokens

    @property
    def progress_tokens(self) -> float:
        """Training tokens including the optimizer step under way, in proportion to its units; for time series."""
        share = (self.cursor.index + self.fraction) / self._units
        return (self.cursor.steps + share) * self._step_tokens

    def in_flight_ms(self) -> float:
        """Time that the running unit still needs on its own partition, 0 between units."""
        if self.fraction == 0.0:
            return 0.0
        return (1.0 - self.fraction) * self.lengths_ms(self.sms)[self.cursor.index]

    def finish_unit(self) -> float:
        """Complete the running unit; returns the time that took."""
        left_ms = self.in_flight_ms()
        if left_ms:
            self._enter(self.cursor.index + 1)
        return left_ms

    def run(self, start_ms: float, duration_ms: float, sms: int, slowdown: float = 1.0) -> None:
        """Work on ``sms`` SMs for ``duration_ms``, each unit ``slowdown`` times longer than alone; units may end up cut."""
        ends_ms = self.ends_ms(sms)
        left_ms = duration_ms / slowdown
        end_ms = start_ms + duration_ms
        while True:
            index = self.cursor.index
            if self.fraction == 0.0 and not self.swaps.settled:
                wait_ms = self._stall(end_ms - left_ms * slowdown)
                if wait_ms >= left_ms * slowdown:
                    self.stall_ms += left_ms * slowdown
                    self.sms = 0
                    return
                self.stall_ms += wait_ms
                left_ms -= wait_ms / slowdown
            limit = self._units if self.swaps.settled else self._walk_end[index]
            here_ms = ends_ms[index] + self.fraction * (ends_ms[index + 1] - ends_ms[index])
            there_ms = here_ms + left_ms
            if there_ms < ends_ms[limit]:
                reached = bisect_right(ends_ms, there_ms, index) - 1
                self.fraction = (there_ms - ends_ms[reached]) / (ends_ms[reached + 1] - ends_ms[reached])
                self.cursor.index = reached
                self.sms = sms if self.fraction else 0
                return
            left_ms = max(0.0, there_ms - ends_ms[limit])
            self._enter(limit)

    def turn(self, start_ms: float, budget_ms: float, sms: int) -> float:
        """Whole units on ``sms`` SMs, as many as ``budget_ms`` has room for, after the one in flight on its own partition.

        Returns the time used. When not one unit would fit, nothing happens and a unit in flight stays so.
        """
        ends_ms = self.ends_ms(sms)
        used_ms = self.in_flight_ms()
        index = self.cursor.index + (1 if used_ms else 0)
        if index == len(self.order):
            index = 0
        if used_ms + ends_ms[index + 1] - ends_ms[index] > budget_ms:
            return 0.0
        if used_ms:
            self._enter(self.cursor.index + 1)
        while True:
            index = self.cursor.index
            if not self.swaps.settled:
                now_ms = start_ms + used_ms
                wait_ms = self._stall(now_ms)
                if used_ms + wait_ms + ends_ms[index + 1] - ends_ms[index] > budget_ms:
                    return used_ms
                self.stall_ms += wait_ms
                used_ms += wait_ms
            limit = self._units if self.swaps.settled else self._walk_end[index]
            reached = min(limit, bisect_right(ends_ms, ends_ms[index] + budget_ms - used_ms, index) - 1)
            if reached <= index:
                return used_ms
            used_ms += ends_ms[reached] - ends_ms[index]
            self._enter(reached)
            if reached < limit:
                return used_ms

    def turn_past(self, start_ms: float, least_ms: float, sms: int) -> float:
        """Whole units on ``sms`` SMs up to the first boundary at ``least_ms`` or later: a turn that is called off.

        Returns the time used, less than ``least_ms`` only where a layer is not there yet.
        """
        used_ms = self.turn(start_ms, least_ms, sms)
        if used_ms < least_ms:
            used_ms += self.finish_unit()
        if used_ms >= least_ms:
            return used_ms
        if not self.swaps.settled and self._stall(start_ms + used_ms) > 0.0:
            return used_ms
        used_ms += self.lengths_ms(sms)[self.cursor.index]
        self._enter(self.cursor.index + 1)
        return used_ms

    def position(self) -> tuple[int, int, float, int, float]:
        """All of the state but the swaps, in the order of `JobState`."""
        return self.cursor.index, self.cursor.steps, self.fraction, self.sms, self.stall_ms

    def snapshot(self) -> JobState:
        """State for `restore`."""
        return (*self.position(), None if self.swaps.settled else self.swaps.snapshot())

    def restore(self, state: JobState) -> None:
        """Be again where the snapshot was taken."""
        self.cursor.index, self.cursor.steps, self.fraction, self.sms, self.stall_ms, swaps = state
        if swaps is not None:
            self.swaps.restore(swaps)

    def ends_ms(self, sms: int) -> list[float]:
        """Start of each unit, and the end of the last, if the whole optimizer step ran alone on ``sms`` SMs."""
        known = self._ends_ms.get(sms)
        if known is None:
            durations = {kind: self._unit_ms(kind, sms) for kind in ("forward", "head_loss", "backward", "optimizer")}
            known = [0.0, *accumulate(durations[unit.kind] for unit in self.order.units)]
            self._ends_ms[sms] = known
        return known

    def lengths_ms(self, sms: int) -> list[float]:
        """From the start of each unit to that of the next, alone on ``sms`` SMs."""
        known = self._lengths_ms.get(sms)
        if known is None:
            known = self._lengths_ms[sms] = [end - start for start, end in pairwise(self.ends_ms(sms))]
        return known

    def _enter(self, index: int) -> None:
        """Go to the start of unit ``index``."""
        self.cursor.advance_to(index)
        self.fraction = 0.0
        self.sms = 0

    def _stall(self, now_ms: float) -> float:
        return self.swaps.ready_ms(self.cursor.unit.walk, now_ms) - now_ms

    def _walk_ends(self) -> list[int]:
        """For each unit, the index after the last unit of its walk position."""
        units = self.order.units
        ends = [len(units)] * len(units)
        for index in range(len(units) - 2, -1, -1):
            ends[index] = ends[index + 1] if units[index].walk == units[index + 1].walk else index + 1
        return ends
