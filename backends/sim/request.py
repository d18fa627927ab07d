"""A request inside the simulator: what it still needs and which token slots it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harli_core.requests import RequestSpec

NO_SLOTS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class SimRequest:
    """Mutable state of one request.

    ``kv_tokens`` is the context that decode needs (prompt and tokens produced so far), ``remaining`` the tokens still to
    produce, ``last_token_ms`` when the last one was emitted (`None` before the first). While it is in a batch, they are
    as of the batch's step ``first_step``; it leaves after ``end_step`` and emits on ``lane``.
    """

    spec: RequestSpec
    kv_tokens: int
    remaining: int
    last_token_ms: float | None = None
    slots: NDArray[np.int32] = field(default_factory=lambda: NO_SLOTS)
    first_step: int = 0
    end_step: int = 0
    lane: int = 0

    @classmethod
    def of(cls, spec: RequestSpec) -> SimRequest:
        """A request as it arrives: its prompt is its context, everything is still to be produced."""
        return cls(spec, kv_tokens=spec.prompt_tokens, remaining=spec.output_tokens)

    @property
    def longest_tokens(self) -> int:
        """Token slots that the request will hold at its end."""
        return self.kv_tokens + self.remaining
