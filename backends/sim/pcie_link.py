"""The PCIe link of one GPU: transfers one after another at the measured bandwidth."""

from __future__ import annotations


class PcieLink:
    """A first-come-first-served link; pure arithmetic, so that many transfers cost no event each."""

    def __init__(self, bytes_per_ms: float) -> None:
        """``bytes_per_ms`` in one direction, pinned memory."""
        self._bytes_per_ms = bytes_per_ms
        self.free_at_ms = 0.0
        self.transferred_bytes = 0

    def duration_ms(self, size_bytes: int) -> float:
        """How long a transfer takes once it has the link."""
        return size_bytes / self._bytes_per_ms

    def transfer(self, now_ms: float, size_bytes: int) -> float:
        """Queue a transfer at ``now_ms``; returns when it is done."""
        self.free_at_ms = max(now_ms, self.free_at_ms) + self.duration_ms(size_bytes)
        self.transferred_bytes += size_bytes
        return self.free_at_ms
