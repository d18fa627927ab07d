"""The requests that decode together on one instance, and the rows that hold their KV."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from backends.sim.request import SimRequest
from harli_core.errors import AuditError
from harli_core.memory.row_tokens import Pieces, RowMoves, RowTokens
from harli_core.records import RequestBook

LONGEST_TRAIL = 4096
"""Entries of a trail beyond which those that nobody needs are dropped."""


class RowTrail:
    """Into which row each whole step put its tokens, one of every member.

    ::

        before step   40   52   90        steps 40 to 51 went to row 2, step 52 to several rows (it is counted at the
        steps         40   12   37        members), steps 53 to 89 to row 3
        row            1    2    3
    """

    def __init__(self) -> None:
        """No step yet."""
        self._ends: list[int] = []
        self._steps: list[int] = []
        self._rows: list[int] = []

    def add(self, steps: int, end_step: int, row: int) -> None:
        """The last ``steps`` steps before ``end_step``, all of them later than what is noted, went to ``row``."""
        if self._rows and self._rows[-1] == row and self._ends[-1] == end_step - steps:
            self._ends[-1] = end_step
            self._steps[-1] += steps
        else:
            self._ends.append(end_step)
            self._steps.append(steps)
            self._rows.append(row)

    def since(self, step: int, held: dict[int, int]) -> None:
        """Add to ``held`` (row to tokens) what one member emitted from ``step`` on."""
        first = bisect_right(self._ends, step)
        counts = self._steps[first:]
        if counts:
            counts[0] = min(counts[0], self._ends[first] - step)
        for row, steps in zip(self._rows[first:], counts, strict=True):
            held[row] = held.get(row, 0) + steps

    def forget(self, step: int) -> None:
        """Nobody will ask for steps before ``step``; what lies there is dropped when it has become long."""
        if len(self._ends) > LONGEST_TRAIL:
            old = bisect_right(self._ends, step)
            del self._ends[:old], self._steps[:old], self._rows[:old]


class RunningBatch:
    """``members`` in order of admission; ``joined`` of them have not decoded here yet; together ``kv_tokens`` tokens.

    All members emit in every step, so what each has and still needs follows from the number of steps taken so far; it
    is written into the request when it leaves.
    """

    def __init__(self, tokens: RowTokens, book: RequestBook) -> None:
        """Start empty."""
        self.members: list[SimRequest] = []
        self.joined: list[SimRequest] = []
        self.kv_tokens = 0
        self._tokens = tokens
        self._book = book
        self._steps = 0
        self._first_leaves = 0
        self._last_end_ms = 0.0
        self._trail = RowTrail()

    def __len__(self) -> int:
        """Requests that decode."""
        return len(self.members)

    def can_grow(self) -> bool:
        """Whether each member can have one more token."""
        return len(self.members) <= self._tokens.free_tokens

    def steps_left(self) -> int:
        """Steps until the first member is done or the free slots are used up; 0 when there is no slot for each."""
        return min(self._tokens.free_tokens // len(self.members), self._first_leaves - self._steps)

    def admit(self, request: SimRequest) -> None:
        """Take a request in: slots for its whole context."""
        request.held = dict(self._tokens.allocate(request.kv_tokens))
        request.first_step = self._steps
        request.end_step = self._steps + request.remaining
        self._first_leaves = min(self._first_leaves, request.end_step) if self.members else request.end_step
        self.kv_tokens += request.kv_tokens
        self.members.append(request)
        self.joined.append(request)

    def emit(self, ends_ms: Sequence[float]) -> list[SimRequest]:
        """Every member emits a token at each of ``ends_ms``; returns those that need no more, their slots freed.

        Slots are handed out step by step, so the tokens of the members interleave as they do on a GPU.
        """
        done, width = len(ends_ms), len(self.members)
        self._follow(self._tokens.allocate(done * width), width)
        self._steps += done
        self.kv_tokens += done * width
        self._last_end_ms = ends_ms[-1]
        for request in self.joined:
            if request.last_token_ms is None:
                self._book.first_token_s[request.spec.index] = ends_ms[0] / 1000.0
        self.joined = []
        if self._steps < self._first_leaves:
            return []
        leaving = [request for request in self.members if request.end_step == self._steps]
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

    def rewrite(self, compaction: RowMoves) -> None:
        """Follow the tokens that a compaction moved; those of a row are taken to lie there member by member."""
        left = {row: list(pieces) for row, pieces in compaction.moves.items()}
        for request in self.members:
            self._catch_up(request)
            for row in [row for row in request.held if row in left]:
                for target, tokens in _taken_from(left[row], request.held.pop(row)):
                    request.held[target] = request.held.get(target, 0) + tokens

    def note_unfinished(self) -> None:
        """Write into the book what the members lack, at the end of a run."""
        for request in self.members:
            self._book.note_produced(request.spec.index, request.end_step - self._steps)

    def check_integrity(self) -> None:
        """What requests hold is what the rows count as theirs; raises `AuditError`."""
        by_row: dict[int, int] = {}
        for request in self.members:
            self._catch_up(request)
            for row, tokens in request.held.items():
                by_row[row] = by_row.get(row, 0) + tokens
        used = self._tokens.row_used_tokens()
        used[0] -= self._tokens.pinned_tokens
        wrong = [row for row in range(len(used)) if used[row] != by_row.get(row, 0)]
        if wrong:
            row = wrong[0]
            raise AuditError(f"audit: requests hold {by_row.get(row, 0)} slots of row {row}, {used[row]} are counted")
        counted = sum(request.kv_tokens for request in self.members)
        if not counted == self.kv_tokens == self._tokens.used_tokens:
            raise AuditError(f"audit: requests count {counted} tokens, the allocator {self._tokens.used_tokens}")

    def _follow(self, pieces: Pieces, width: int) -> None:
        """Note where the steps from here on put their tokens: whole steps in the trail, others at each member."""
        if len(pieces) == 1:
            row, tokens = pieces[0]
            self._trail.add(tokens // width, self._steps + tokens // width, row)
            return
        step, behind = self._steps, 0  # tokens of this step that lie in earlier pieces
        for row, tokens in pieces:
            left = tokens
            if behind:
                taken = min(left, width - behind)
                for request in self.members[behind : behind + taken]:
                    request.held[row] = request.held.get(row, 0) + 1
                behind, left = behind + taken, left - taken
                if behind < width:
                    continue
                step, behind = step + 1, 0
            whole, behind = divmod(left, width)
            if whole:
                step += whole
                self._trail.add(whole, step, row)
            for request in self.members[:behind]:
                request.held[row] = request.held.get(row, 0) + 1

    def _catch_up(self, request: SimRequest) -> None:
        """Write into ``request`` what it emitted since it joined, or since this was last done."""
        done = self._steps - request.first_step
        if done:
            self._trail.since(request.first_step, request.held)
            request.first_step = self._steps
            request.kv_tokens += done
            request.remaining -= done
            request.last_token_ms = self._last_end_ms

    def _remove(self, request: SimRequest) -> None:
        self._catch_up(request)
        self._tokens.free(request.held)
        request.held = {}
        self.kv_tokens -= request.kv_tokens
        self.members.remove(request)
        if self.members:
            self._first_leaves = min([member.end_step for member in self.members])
            self._trail.forget(self.members[0].first_step)
        self._book.note_produced(request.spec.index, request.remaining)


def _taken_from(pieces: Pieces, tokens: int) -> Pieces:
    """The first ``tokens`` of ``pieces``, which are taken out of it."""
    taken: Pieces = []
    while tokens:
        row, there = pieces[0]
        part = min(there, tokens)
        taken.append((row, part))
        pieces[:1] = [(row, there - part)] if there > part else []
        tokens -= part
    return taken
