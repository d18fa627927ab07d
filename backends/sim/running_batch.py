"""The requests that decode together on one instance, and the token slots that hold their KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.sim.request import SimRequest
from harli_core.errors import AuditError
from harli_core.memory.compaction import Compaction
from harli_core.memory.unified import UnifiedAllocator
from harli_core.records import RequestBook


class RunningBatch:
    """``members`` in order of admission; ``joined`` of them have not decoded here yet; together ``kv_tokens`` tokens."""

    def __init__(self, allocator: UnifiedAllocator, book: RequestBook) -> None:
        """Start empty."""
        self.members: list[SimRequest] = []
        self.joined: list[SimRequest] = []
        self.kv_tokens = 0
        self._allocator = allocator
        self._book = book

    def __len__(self) -> int:
        """Requests that decode."""
        return len(self.members)

    def can_grow(self) -> bool:
        """Whether each member can have one more token."""
        return self._allocator.can_allocate_tokens(len(self.members))

    def steps_left(self) -> int:
        """Steps until the first member is done or the free slots are used up; 0 when there is no slot for each."""
        room = self._allocator.slots.free_tokens // len(self.members)
        return min(room, *[request.remaining for request in self.members])

    def admit(self, request: SimRequest) -> None:
        """Take a request in: slots for its whole context."""
        request.slots = [self._allocator.allocate_tokens(request.kv_tokens)]
        self.kv_tokens += request.kv_tokens
        self.members.append(request)
        self.joined.append(request)

    def emit(self, ends_ms: Sequence[float]) -> list[SimRequest]:
        """Every member emits a token at each of ``ends_ms``; returns those that need no more, their slots freed.

        Slots are handed out step by step, so the tokens of the members interleave as they do on a GPU.
        """
        done, width = len(ends_ms), len(self.members)
        slots = self._allocator.allocate_tokens(done * width).reshape(done, width)
        self.kv_tokens += done * width
        for request in self.joined:
            if request.last_token_ms is None:
                self._book.first_token_s[request.spec.index] = ends_ms[0] / 1000.0
        self.joined = []
        last_ms = ends_ms[-1]
        leaving: list[SimRequest] = []
        for column, request in enumerate(self.members):
            request.slots.append(slots[:, column])
            request.remaining -= done
            request.kv_tokens += done
            request.last_token_ms = last_ms
            if request.remaining == 0:
                leaving.append(request)
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
            request.slots = [compaction.rewrite(np.concatenate(request.slots))]

    def check_integrity(self) -> None:
        """The tokens that requests hold are the slots in use; raises `AuditError`."""
        held = sum(sum(len(part) for part in request.slots) for request in self.members)
        used = self._allocator.view().used_tokens
        counted = sum(request.kv_tokens for request in self.members)
        if not held == used == counted == self.kv_tokens:
            raise AuditError(f"audit: requests hold {held} slots for {counted} tokens, the allocator counts {used}")

    def _remove(self, request: SimRequest) -> None:
        self._allocator.free_tokens(request.take_slots())
        self.kv_tokens -= request.kv_tokens
        self.members.remove(request)
        self._book.note_produced(request.spec.index, request.remaining)
