"""A request inside the simulator: what it still needs and in which rows its tokens are."""

from __future__ import annotations

from dataclasses import dataclass, field

from harli_core.requests import RequestSpec


@dataclass(slots=True, eq=False)
class SimRequest:
    """Mutable state of one request.

    ``kv_tokens`` is the context that decode needs (prompt and tokens produced so far), ``remaining`` the tokens still to
    produce, ``last_token_ms`` when the last one was emitted (`None` before the first), ``held`` its tokens by row. While
    it is in a batch, they are as of the batch's step ``first_step``; it leaves after ``end_step``.
    """

    spec: RequestSpec
    kv_tokens: int
    remaining: int
    last_token_ms: float | None = None
    held: dict[int, int] = field(default_factory=dict)
    first_step: int = 0
    end_step: int = 0

    @classmethod
    def of(cls, spec: RequestSpec) -> SimRequest:
        """A request as it arrives: its prompt is its context, everything is still to be produced."""
        return cls(spec, kv_tokens=spec.prompt_tokens, remaining=spec.output_tokens)

    @property
    def longest_tokens(self) -> int:
        """Token slots that the request will hold at its end."""
        return self.kv_tokens + self.remaining
