"""One contract for every `PageProvider`; backends add their own to ``PROVIDERS``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harli_core.errors import MemoryAccountingError
from harli_core.memory.counting_provider import CountingProvider
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.provider import PageProvider

GRID = GridGeometry(row_tokens=4, columns=2, rows=3)
PROVIDERS: list[Callable[[], PageProvider]] = [CountingProvider, lambda: CountingProvider(False, 3.0)]


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> PageProvider:
    """Return a provider with the grid committed."""
    made: PageProvider = request.param()
    made.reserve(GRID)
    for row in range(GRID.rows):
        made.commit_row(row)
    return made


def test_rows_are_lent_and_returned_in_turn(provider: PageProvider) -> None:
    """A row can be lent again once it is back."""
    for _ in range(2):
        provider.lend_row(1)
        provider.return_row(1)


def test_row_is_lent_once(provider: PageProvider) -> None:
    """A lent row cannot be lent, a row at home cannot be returned, nor rows outside the grid."""
    provider.lend_row(1)
    for wrong, row in ((provider.lend_row, 1), (provider.return_row, 0), (provider.lend_row, 3)):
        with pytest.raises(MemoryAccountingError, match=f"row {row}"):
            wrong(row)


def test_grid_is_reserved_and_committed_once(provider: PageProvider) -> None:
    """A second reservation, a second commit and a row outside are refused."""
    with pytest.raises(MemoryAccountingError, match="reserved already"):
        provider.reserve(GRID)
    for row in (0, 3, -1):
        with pytest.raises(MemoryAccountingError, match=f"cannot commit row {row}"):
            provider.commit_row(row)


def test_release_in_any_state(provider: PageProvider) -> None:
    """Release works with rows lent, and twice; nothing can be lent afterwards."""
    provider.lend_row(2)
    provider.release()
    provider.release()
    with pytest.raises(MemoryAccountingError):
        provider.lend_row(0)


def test_remapping_costs_time_where_there_is_no_aliasing() -> None:
    """Capabilities are those that were asked for."""
    assert CountingProvider().capabilities.aliasing
    assert CountingProvider(False, 3.0).capabilities.remap_row_ms == 3.0


def test_counting() -> None:
    """Committed bytes, rows lent, and the number of lends and returns."""
    counting = CountingProvider()
    counting.reserve(GRID)
    counting.commit_row(0)
    counting.commit_row(2)
    counting.lend_row(2)
    assert (counting.committed_bytes, counting.rows_lent) == (2 * GRID.row_bytes, 1)
    counting.return_row(2)
    counting.lend_row(0)
    assert (counting.lends, counting.returns, counting.rows_lent) == (2, 1, 1)
    counting.check_integrity()
    counting.release()
    assert (counting.committed_bytes, counting.rows_lent) == (0, 0)
    counting.check_integrity()
