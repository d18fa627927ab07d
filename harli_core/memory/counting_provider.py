"""A `PageProvider` without memory: it counts, and refuses what a real one could not do."""

from __future__ import annotations

from harli_core.errors import MemoryAccountingError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.provider import ProviderCapabilities


class CountingProvider:
    """Pages of a simulated GPU. ``lends`` and ``returns`` count rows since the start."""

    def __init__(self, aliasing: bool = True, remap_row_ms: float = 0.0) -> None:
        """Start unreserved; ``remap_row_ms`` is what the simulation charges for a row where ``aliasing`` is off."""
        self._capabilities = ProviderCapabilities("sim", aliasing, remap_row_ms)
        self._geometry: GridGeometry | None = None
        self._committed: set[int] = set()
        self._lent: set[int] = set()
        self.lends = 0
        self.returns = 0

    @property
    def capabilities(self) -> ProviderCapabilities:
        """What was asked for at construction."""
        return self._capabilities

    @property
    def committed_bytes(self) -> int:
        """Physical bytes behind the grid."""
        return 0 if self._geometry is None else len(self._committed) * self._geometry.row_bytes

    @property
    def rows_lent(self) -> int:
        """Rows in the general-purpose view."""
        return len(self._lent)

    def reserve(self, geometry: GridGeometry) -> None:
        """Reserve a grid; raises `MemoryAccountingError` if one is reserved."""
        if self._geometry is not None:
            raise MemoryAccountingError("cannot reserve a grid: one is reserved already")
        self._geometry = geometry

    def commit_row(self, row: int) -> None:
        """Commit ``row``, once."""
        if self._geometry is None or not 0 <= row < self._geometry.rows or row in self._committed:
            raise MemoryAccountingError(f"cannot commit row {row}: outside the grid, or committed already")
        self._committed.add(row)

    def lend_row(self, row: int) -> None:
        """Lend a committed row."""
        if row not in self._committed or row in self._lent:
            raise MemoryAccountingError(f"cannot lend row {row}: not committed, or lent already")
        self._lent.add(row)
        self.lends += 1

    def return_row(self, row: int) -> None:
        """Take a lent row back."""
        if row not in self._lent:
            raise MemoryAccountingError(f"cannot return row {row}: it is not lent")
        self._lent.remove(row)
        self.returns += 1

    def release(self) -> None:
        """Forget the grid."""
        self._geometry = None
        self.returns += len(self._lent)
        self._committed.clear()
        self._lent.clear()

    def check_integrity(self) -> None:
        """Raise `MemoryAccountingError` unless lent rows are committed and the counts add up."""
        if not self._lent <= self._committed:
            raise MemoryAccountingError(f"counting provider: lent but uncommitted rows {self._lent - self._committed}")
        if self._geometry is not None and self.lends - self.returns != len(self._lent):
            raise MemoryAccountingError(f"counting provider: {self.lends} lends, {self.returns} returns do not add up")
