"""The requests that decode together on one instance, and the token slots that hold their KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.sim.request import SimRequest
from harli_core.errors import AuditError
from harli_core.memory.compaction import Compaction
from harli_core.memory.unified import UnifiedAllocator
from harli_core.records import RequestBook


class EmittedSlots:
    """Where the tokens went that members have emitted: a line a step, a lane a member.

    ::

                lane 0   lane 1   lane 2
        step 7     12       13       14       a member that joined before step 8 and left after step 9 on lane 1
        step 8     15       16       17       finds its slots in one strided look: 16, 19
        step 9     18       19       20

    Lines before the oldest member's first are dropped when room runs out.
    """

    def __init__(self) -> None:
        """Room for a few members and steps; both grow."""
        self._slots: NDArray[np.int32] = np.empty((1024, 16), dtype=np.int32)
        self._first_step = 0
        self._free_lanes = list(range(16))[::-1]

    def open_lane(self) -> int:
        """A lane for a new member."""
        if not self._free_lanes:
            steps, lanes = self._slots.shape
            wider = np.empty((steps, 2 * lanes), dtype=np.int32)
            wider[:, :lanes] = self._slots
            self._slots = wider
            self._free_lanes = list(range(lanes, 2 * lanes))[::-1]
        return self._free_lanes.pop()

    def close_lane(self, lane: int) -> None:
        """The member of ``lane`` has left."""
        self._free_lanes.append(lane)

    def write(self, step: int, lanes: NDArray[np.intp], slots: NDArray[np.int32], oldest_step: int) -> None:
        """Keep the lines of ``slots`` (steps x members, columns as ``lanes``) from ``step`` on."""
        done = len(slots)
        line = step - self._first_step
        if line + done > len(self._slots):
            self._make_room(step, done, oldest_step)
            line = step - self._first_step
        self._slots[line : line + done, lanes] = slots

    def of(self, lane: int, first_step: int, end_step: int) -> NDArray[np.int32]:
        """The slots on ``lane`` from ``first_step`` up to ``end_step`` (a view)."""
        return self._slots[first_step - self._first_step : end_step - self._first_step, lane]

    def _make_room(self, step: int, done: int, oldest_step: int) -> None:
        """Move the lines that somebody still needs to the top; twice the room if that is not enough."""
        kept = self._slots[oldest_step - self._first_step : step - self._first_step]
        room = len(self._slots)
        while room < 2 * (len(kept) + done):
            room *= 2
        moved = np.empty((room, self._slots.shape[1]), dtype=np.int32)
        moved[: len(kept)] = kept
        self._slots = moved
        self._first_step = oldest_step


class RunningBatch:
    """``members`` in order of admission; ``joined`` of them have not decoded here yet; together ``kv_tokens`` tokens.

    All members emit in every step, so what each has and still needs follows from the number of steps taken so far; it
    is written into the request when it leaves.
    """

    def __init__(self, allocator: UnifiedAllocator, book: RequestBook) -> None:
        """Start empty."""
        self.members: list[SimRequest] = []
        self.joined: list[SimRequest] = []
        self.kv_tokens = 0
        self._allocator = allocator
        self._book = book
        self._steps = 0
        self._last_end_ms = 0.0
        self._emitted = EmittedSlots()
        self._lanes: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        """Requests that decode."""
        return len(self.members)

    def can_grow(self) -> bool:
        """Whether each member can have one more token."""
        return self._allocator.can_allocate_tokens(len(self.members))

    def steps_left(self) -> int:
        """Steps until the first member is done or the free slots are used up; 0 when there is no slot for each."""
        room = self._allocator.slots.free_tokens // len(self.members)
        return min(room, min([request.end_step for request in self.members]) - self._steps)

    def admit(self, request: SimRequest) -> None:
        """Take a request in: slots for its whole context."""
        request.slots = self._allocator.allocate_tokens(request.kv_tokens)
        request.first_step = self._steps
        request.end_step = self._steps + request.remaining
        request.lane = self._emitted.open_lane()
        self.kv_tokens += request.kv_tokens
        self.members.append(request)
        self.joined.append(request)
        self._lanes = None

    def emit(self, ends_ms: Sequence[float]) -> list[SimRequest]:
        """Every member emits a token at each of ``ends_ms``; returns those that need no more, their slots freed.

        Slots are handed out step by step, so the tokens of the members interleave as they do on a GPU.
        """
        done, width = len(ends_ms), len(self.members)
        if self._lanes is None:
            self._lanes = np.array([request.lane for request in self.members], dtype=np.intp)
        slots = self._allocator.allocate_tokens(done * width).reshape(done, width)
        self._emitted.write(self._steps, self._lanes, slots, self.members[0].first_step)
        self._steps += done
        self.kv_tokens += done * width
        self._last_end_ms = ends_ms[-1]
        for request in self.joined:
            if request.last_token_ms is None:
                self._book.first_token_s[request.spec.index] = ends_ms[0] / 1000.0
        self.joined = []
        steps = self._steps
        leaving = [request for request in self.members if request.end_step == steps]
        for request in leaving:
            self._remove(request)
        return leaving

    def preempt(self) -> SimRequest:
        """Send the newest member away; the oldest always goes on, so the batch always gets somewhere."""
        request = max(self.members, key=lambda member: member.spec.index)
        self._remove(request)
        if request in self.joined:
            self.joined.remove(request)
        self._book.preemptions[request.spec.index] += 1
        return request

    def rewrite(self, compaction: Compaction) -> None:
        """Follow the tokens that a compaction moved."""
        for request in self.members:
            self._catch_up(request)
            request.slots = compaction.rewrite(request.slots)

    def note_unfinished(self) -> None:
        """Write into the book what the members lack, at the end of a run."""
        for request in self.members:
            self._book.note_produced(request.spec.index, request.end_step - self._steps)

    def check_integrity(self) -> None:
        """The tokens that requests hold are the slots in use; raises `AuditError`."""
        for request in self.members:
            self._catch_up(request)
        held = sum(len(request.slots) for request in self.members)
        used = self._allocator.view().used_tokens
        counted = sum(request.kv_tokens for request in self.members)
        if not held == used == counted == self.kv_tokens:
            raise AuditError(f"audit: requests hold {held} slots for {counted} tokens, the allocator counts {used}")

    def _catch_up(self, request: SimRequest) -> None:
        """Write into ``request`` what it emitted since it joined, or since this was last done."""
        done = self._steps - request.first_step
        if done:
            own = self._emitted.of(request.lane, request.first_step, self._steps)
            request.slots = np.concatenate((request.slots, own))
            request.first_step = self._steps
            request.kv_tokens += done
            request.remaining -= done
            request.last_token_ms = self._last_end_ms

    def _remove(self, request: SimRequest) -> None:
        self._catch_up(request)
        self._allocator.free_tokens(request.slots)
        self._emitted.close_lane(request.lane)
        self.kv_tokens -= request.kv_tokens
        self.members.remove(request)
        self._lanes = None
        self._book.note_produced(request.spec.index, request.remaining)
