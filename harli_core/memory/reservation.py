"""How much memory KV keeps in hand while finetuning holds the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from harli_core.errors import ConfigError
from harli_core.types import MemoryView

ReservationMode = Literal["measured", "paper"]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens that may arrive before finetuning has given memory back; build one with `measured` or `paper`.

    ``paper`` (section 4.4): ``reserved_bytes = (T / qos) * max_bs * kv_bytes_per_token``, rounded up to whole rows;
    ``give_back_ms`` is T, the time to swap one layer out, ``step_ms`` the QoS target.
    ``measured`` (DESIGN section 4): ``ceil(p99 reclaim time / shortest step)`` tokens a request, since steps are mostly
    much shorter than the target, plus the prompt tokens that an admission brings at once.
    Without ``max_batch`` the batch of the moment counts.
    """

    mode: ReservationMode
    row_tokens: int
    give_back_ms: float
    step_ms: float
    max_batch: int | None
    admission_tokens: int = 0

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that make no reservation."""
        if self.row_tokens < 1 or (self.max_batch is not None and self.max_batch < 1) or self.admission_tokens < 0:
            raise ConfigError(f"reservation: sizes must be positive, got {self}")
        if not (math.isfinite(self.give_back_ms) and self.give_back_ms >= 0 and 0 < self.step_ms < math.inf):
            raise ConfigError(f"reservation: needs give_back_ms >= 0 and step_ms > 0, both finite, got {self}")
        if self.mode == "paper" and self.max_batch is None:
            raise ConfigError("reservation: the paper's formula needs max_batch")

    @classmethod
    def measured(
        cls,
        row_tokens: int,
        reclaim_p99_ms: float,
        shortest_step_ms: float,
        admission_tokens: int,
        max_batch: int | None = None,
    ) -> Reservation:
        """Return a reservation from measured reclaim and step times."""
        return cls("measured", row_tokens, reclaim_p99_ms, shortest_step_ms, max_batch, admission_tokens)

    @classmethod
    def paper(cls, row_tokens: int, swap_out_ms: float, max_batch: int, qos_ms: float = 50.0) -> Reservation:
        """Return the reservation of the paper's section 4.4."""
        return cls("paper", row_tokens, swap_out_ms, qos_ms, max_batch)

    def reserved_tokens(self, batch: int) -> int:
        """Free token slots that must stay outside lent rows while ``batch`` requests decode."""
        requests = batch if self.max_batch is None else self.max_batch
        if self.mode == "paper":
            tokens = math.ceil(self.give_back_ms / self.step_ms * requests)
            return -(-tokens // self.row_tokens) * self.row_tokens
        return math.ceil(self.give_back_ms / self.step_ms) * requests + self.admission_tokens

    def reserved_rows(self, batch: int) -> int:
        """Return `reserved_tokens` in rows, rounded up."""
        return -(-self.reserved_tokens(batch) // self.row_tokens)

    def lendable_rows(self, view: MemoryView, batch: int, waiting_tokens: int) -> int:
        """Rows that finetuning may hold in total now: KV keeps its tokens, the reservation and the waiting prompts.

        It counts tokens, not empty rows: where live tokens lie scattered, compaction has to empty rows to get there.
        Row 0 stays with KV, since its pinned slots are never among the free tokens.
        """
        outside_kv_tokens = view.free_tokens + view.rows_lent * view.row_tokens
        spare_tokens = outside_kv_tokens - self.reserved_tokens(batch) - waiting_tokens
        return max(0, spare_tokens // view.row_tokens)
