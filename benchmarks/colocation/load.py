"""Requests at a given load: the Azure conversation trace, its rate scaled to so many decode tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harli_core.records import RequestBook
from harli_core.requests import RequestSpec
from traces import load_trace
from traces.schema import RepairOptions


class Load:
    """``tokens_per_s`` offered for ``seconds``, from ``skip_s`` of the scaled trace on; prompts are random tokens."""

    def __init__(self, trace: Path, tokens_per_s: float, seconds: float, vocab: int, skip_s: float = 60.0) -> None:
        """Read and scale; the trace is repeated where it is too short at this rate."""
        whole = load_trace(str(trace), seed=0, repairs=RepairOptions(sort=True)).trace
        arrival_s = np.asarray(whole.arrival_s)
        offered = whole.output_tokens.sum() / arrival_s[-1]
        factor = offered / tokens_per_s  # arrivals are stretched by this
        scaled_s = arrival_s * factor - skip_s * factor
        chosen = (scaled_s >= 0.0) & (scaled_s < seconds)
        if scaled_s[-1] < seconds:
            raise SystemExit(f"the trace gives only {scaled_s[-1]:.0f} s at {tokens_per_s} tokens/s")
        self.arrival_s = scaled_s[chosen]
        self.prompt_tokens = np.asarray(whole.prompt_tokens)[chosen]
        self.output_tokens = np.asarray(whole.output_tokens)[chosen]
        self._vocab = vocab
        self._random: list[int] = (
            np.random.default_rng(0).integers(3, vocab, int(self.prompt_tokens.max()) + 1).tolist()
        )

    def specs(self) -> list[RequestSpec]:
        """The requests in order of arrival."""
        rows = zip(self.arrival_s.tolist(), self.prompt_tokens.tolist(), self.output_tokens.tolist(), strict=True)
        return [RequestSpec(index, *row) for index, row in enumerate(rows)]

    def prompt(self, spec: RequestSpec) -> Sequence[int]:
        """Token ids of a prompt; where KV is taken as arrived only their number matters."""
        return self._random[: spec.prompt_tokens]

    def book(self) -> RequestBook:
        """An empty book for these requests."""
        return RequestBook(self.prompt_tokens.copy(), self.output_tokens.copy())
