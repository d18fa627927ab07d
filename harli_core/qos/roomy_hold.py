"""A plan made for a little more load than there is now, so that it outlives requests that join and leave."""

from __future__ import annotations

from dataclasses import dataclass

from harli_core.types import Hold, StepView

SLACK_SHARE = 4
"""The batch may grow or shrink by a quarter."""

LEAST_SLACK = 2
"""But at least by two requests."""

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
    def of(cls, view: StepView, steps: int, max_step_ms: float | None) -> RoomyHold:
        """Room for some requests more than the ``view.batch`` >= 1 there are, and for ``steps`` steps of growth."""
        slack = max(LEAST_SLACK, view.batch // SLACK_SHARE)
        most = view.batch + slack
        kv_tokens = view.kv_tokens + slack * max(JOINING_TOKENS, view.kv_tokens // view.batch) + steps * most
        return cls(Hold(steps, max_step_ms, (max(1, view.batch - slack), most), kv_tokens), most, kv_tokens)

    @classmethod
    def exact(cls, view: StepView, steps: int, max_step_ms: float | None) -> RoomyHold:
        """For ``steps`` steps of just this batch; the plan ends when a request joins or leaves."""
        return cls(Hold(steps, max_step_ms), view.batch, view.kv_tokens + steps * view.batch)
