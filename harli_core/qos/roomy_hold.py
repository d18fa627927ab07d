"""A plan made for a little more load than there is now, so that it outlives requests that join and leave."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from harli_core.types import Hold, StepView

ROOMY, SNUG = (4, 2), (16, 1)
"""The batch may grow or shrink by a quarter, at least by two requests; by a sixteenth, at least by one."""

LEAST_SHARE = 3
"""Room may be cut to this part of the slack, to end with a decode graph's size."""

ANY_BATCH = 2**31
"""An upper bound that no batch reaches."""

JOINING_TOKENS = 2048
"""KV tokens to expect of each request that joins, unless those that decode hold more on average."""


@dataclass(frozen=True, slots=True)
class RoomyHold:
    """A hold and the heaviest step that it allows: predictions for that one cover all of them."""

    hold: Hold
    batch: int
    kv_tokens: int

    @classmethod
    def of(
        cls,
        view: StepView,
        steps: int,
        max_step_ms: float | None,
        graph_batches: Sequence[int],
        slack: tuple[int, int] = ROOMY,
    ) -> RoomyHold:
        """Room for some requests more than the ``view.batch`` >= 1 there are, and for ``steps`` steps of growth.

        ``slack``: its share of the batch, and the least. Room ends with the last of ``graph_batches`` (`samples.Device`)
        within it, unless hardly any were left: with one request more, each step would take as long as the next size.
        """
        share, least = slack
        most_more = more = max(least, view.batch // share)
        place = bisect_right(graph_batches, view.batch + most_more)
        if place and graph_batches[place - 1] - view.batch >= max(least, most_more // LEAST_SHARE):
            more = graph_batches[place - 1] - view.batch
        most = view.batch + more
        kv_tokens = view.kv_tokens + more * max(JOINING_TOKENS, view.kv_tokens // view.batch) + steps * most
        return cls(Hold(steps, max_step_ms, (max(1, view.batch - most_more), most), kv_tokens), most, kv_tokens)

    @classmethod
    def exact(cls, view: StepView, steps: int, max_step_ms: float | None) -> RoomyHold:
        """For ``steps`` steps of just this batch; the plan ends when a request joins or leaves."""
        return cls(Hold(steps, max_step_ms), view.batch, view.kv_tokens + steps * view.batch)
