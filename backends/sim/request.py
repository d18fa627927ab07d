"""A request inside the simulator: what it still needs and which token slots it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harli_core.requests import RequestSpec


@dataclass(slots=True, eq=False)
class SimRequest:
    """Mutable state of one request.

    ``kv_tokens`` is the context that decode needs (prompt and tokens produced so far), ``remaining`` the tokens still to
    produce, ``last_token_ms`` when the last one was emitted (`None` before the first).
    """

    spec: RequestSpec
    kv_tokens: int
    remaining: int
    arrival_ms: float
    last_token_ms: float | None = None
    slots: list[NDArray[np.int32]] = field(default_factory=list)

    @classmethod
    def of(cls, spec: RequestSpec) -> SimRequest:
        """A request as it arrives: its prompt is its context, everything is still to be produced."""
        return cls(spec, kv_tokens=spec.prompt_tokens, remaining=spec.output_tokens, arrival_ms=spec.arrival_s * 1000.0)

    @property
    def longest_tokens(self) -> int:
        """Token slots that the request will hold at its end."""
        return self.kv_tokens + self.remaining

    def take_slots(self) -> NDArray[np.int32]:
        """Give up all token slots, as one array."""
        slots = np.concatenate(self.slots) if len(self.slots) > 1 else self.slots[0]
        self.slots = []
        return slots
