"""Transfers over one link: one after another, each at full bandwidth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.sim.pcie_link import PcieLink


def test_an_idle_link_starts_at_once() -> None:
    """100 bytes at 10 a millisecond, asked for at 5: done at 15."""
    link = PcieLink(10.0)
    assert link.duration_ms(100) == 10.0
    assert link.transfer(5.0, 100) == 15.0


def test_a_busy_link_queues() -> None:
    """A second transfer waits for the first, a later one does not."""
    link = PcieLink(10.0)
    assert [link.transfer(0.0, 100), link.transfer(1.0, 50), link.transfer(40.0, 10)] == [10.0, 15.0, 41.0]
    assert link.transferred_bytes == 160
    assert link.free_at_ms == 41.0


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(1, 1000)), min_size=1, max_size=30))
def test_never_faster_than_its_bandwidth(transfers: list[tuple[float, int]]) -> None:
    """First come, first served: ends never overtake, and between two ends lies at least the transfer itself."""
    link, now_ms, end_ms = PcieLink(10.0), 0.0, 0.0
    for gap_ms, size_bytes in transfers:
        now_ms += gap_ms
        done_ms = link.transfer(now_ms, size_bytes)
        assert done_ms >= max(now_ms, end_ms) + size_bytes / 10.0 - 1e-9
        assert done_ms <= max(now_ms, end_ms) + size_bytes / 10.0 + 1e-9
        end_ms = done_ms
    assert link.transferred_bytes == sum(size_bytes for _, size_bytes in transfers)
