"""Requests that wait for a place in the batch of one decode instance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from backends.sim.request import SimRequest
from backends.sim.running_batch import RunningBatch
from harli_core.memory.reservation import Reservation
from harli_core.memory.row_tokens import RowTokens


class WaitingLine:
    """First come, first served: the first waits until there is room for it, and everybody behind it too."""

    def __init__(self, tokens: RowTokens, reservation: Reservation, max_batch: int) -> None:
        """Requests join while ``tokens`` has room beyond the ``reservation`` and the batch is below ``max_batch``."""
        self.kv_tokens = 0
        self._requests: deque[SimRequest] = deque()
        self._tokens = tokens
        self._reservation = reservation
        self._max_batch = max_batch

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._requests)

    def __iter__(self) -> Iterator[SimRequest]:
        """The requests, first come first."""
        return iter(self._requests)

    @property
    def first(self) -> SimRequest:
        """The next to join; there must be one."""
        return self._requests[0]

    def add(self, request: SimRequest) -> None:
        """``request`` comes last."""
        self._requests.append(request)
        self.kv_tokens += request.kv_tokens

    def join(self, batch: RunningBatch) -> None:
        """Let requests join ``batch`` in order, while there is room."""
        while self._requests and len(batch) < self._max_batch:
            request = self._requests[0]
            if request.kv_tokens + self._growth_reserve(len(batch) + 1) > self._tokens.free_tokens:
                return
            self._requests.popleft()
            self.kv_tokens -= request.kv_tokens
            batch.admit(request)

    def _growth_reserve(self, batch: int) -> int:
        """Slots that an admission leaves free for the tokens of the next steps; a lone request needs only its own."""
        if batch == 1:
            return 1
        return max(batch, self._reservation.reserved_tokens(batch) - self._reservation.admission_tokens)
