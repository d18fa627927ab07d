"""Where requests come from: a trace now, a live server later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as a client sends it.

    ``output_tokens`` is what the client will take (a trace knows it, a live client gives its limit): backends use it to
    end the request and to refuse what can never fit; no view shows it to a policy. ``index`` counts from 0 in order of
    arrival, ``arrival_s`` in seconds from the source's zero. The client goes away at ``cancel_s`` (`None`: it stays).
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cancel_s: float | None = None


class RequestSource(Protocol):
    """Yields requests in order of arrival."""

    def requests(self) -> Iterator[RequestSpec]:
        """All requests; a live source blocks until the next one comes."""
        ...
