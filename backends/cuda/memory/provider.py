"""A `PageProvider` with real memory: the page pool and the tensor space of one device."""

from __future__ import annotations

from typing import Literal

from backends.cuda._native import Driver, PagePool, TensorSpace
from harli_core.errors import ConfigError, DriverCallError, MemoryAccountingError
from harli_core.memory.geometry import GridGeometry
from harli_core.memory.provider import ProviderCapabilities

Lending = Literal["alias", "remap"]
"""``alias``: both views are always mapped; ``remap``: a row is mapped in its holder's view alone, others fault."""

Scrub = Literal["zero", "poison"]
"""What a row holds when it comes back to KV: zeros, or 0xFFFF, which is NaN in bf16 and fp16 (to find stray reads)."""

PATTERNS: dict[Scrub, int] = {"zero": 0x0000, "poison": 0xFFFF}

_REMAP_BLOCK_MS = 0.047
"""Unmap, map and set access of one block as measured on an H200; stands in until rows have been lent here."""


class NativeProvider:
    """Rows of 2 MiB blocks on a `Driver`, lent to a `TensorSpace`.

    A row is given back clean: either `scrub` was called while it was lent, or ``return_row`` fills it on ``kv_stream``,
    so that KV reads launched on that stream afterwards see the fill. ``return_row`` refuses a row that holds a tensor
    or waits for a fence. Tensors that other streams get in a row that was just filled come after the fill: until it has
    passed there is room for its own stream only; under ``remap`` the row cannot even be lent before that.
    """

    def __init__(
        self,
        driver: Driver,
        lending: Lending = "alias",
        scrub: Scrub = "zero",
        kv_stream: int = 0,
        granule_bytes: int = 2048,
    ) -> None:
        """Take no memory yet; raises `ConfigError` for an unknown ``lending`` or ``scrub``."""
        if lending not in ("alias", "remap") or scrub not in PATTERNS:
            raise ConfigError(f"lending must be alias or remap and scrub zero or poison, got {lending!r} and {scrub!r}")
        self.driver = driver
        self.kv_stream = kv_stream
        self.pattern = PATTERNS[scrub]
        self._alias = lending == "alias"
        self._granule_bytes = granule_bytes
        self._geometry: GridGeometry | None = None
        self._pool: PagePool | None = None
        self._space: TensorSpace | None = None

    @property
    def capabilities(self) -> ProviderCapabilities:
        """What this provider can do; the remap time is the mean of the lends so far."""
        if self._alias:
            return ProviderCapabilities(self.driver.name, aliasing=True, remap_row_ms=0.0)
        mean_ns = None if self._pool is None else self._pool.stats()["lend"]["mean_ns"]
        columns = 1 if self._geometry is None else self._geometry.columns
        row_ms = _REMAP_BLOCK_MS * columns if mean_ns is None else mean_ns / 1e6
        return ProviderCapabilities(self.driver.name, aliasing=False, remap_row_ms=row_ms)

    @property
    def geometry(self) -> GridGeometry:
        """The grid that is reserved."""
        if self._geometry is None:
            raise MemoryAccountingError("the provider holds no grid: reserve one first")
        return self._geometry

    @property
    def pool(self) -> PagePool:
        """The blocks and both views of them."""
        if self._pool is None or self._space is None:
            raise MemoryAccountingError("the provider holds no memory: reserve a grid first")
        return self._pool

    @property
    def space(self) -> TensorSpace:
        """General-purpose memory in the lent rows."""
        if self._space is None:
            raise MemoryAccountingError("the provider holds no memory: reserve a grid first")
        return self._space

    def reserve(self, geometry: GridGeometry) -> None:
        """Reserve the addresses of both views and create the blocks, column after column.

        Raises `ConfigError` where the driver cannot map such blocks, `DriverCallError` where it does not have them;
        nothing is left behind then, except what it would not take back: that waits for `release`.
        """
        if self._pool is not None:
            held = "one is reserved already" if self._space is not None else "the last one is not wholly released yet"
            raise MemoryAccountingError(f"cannot reserve a grid: {held}")
        pool = PagePool(self.driver, geometry.rows, geometry.columns, geometry.block_bytes, self._alias)
        space = TensorSpace(pool, self._granule_bytes)
        try:
            pool.create_blocks()
        except Exception:
            self._pool = pool if pool.release() else None
            raise
        self._pool, self._space, self._geometry = pool, space, geometry

    def commit_row(self, row: int) -> None:
        """Map the row's blocks, filled as a returned row is; raises `DriverCallError`, nothing left behind."""
        as_wanted = self.pattern == 0 and self.driver.fresh_memory_is_zero
        self._checked("commit", row).commit_row(row, None if as_wanted else self.pattern, self.kv_stream)

    def lend_row(self, row: int) -> None:
        """Give the row to the tensor space."""
        self._checked("lend", row).lend_row(row)
        self.space.add_row(row)

    def scrub(self, row: int, stream: int) -> None:
        """Close an empty lent row and fill it, so that ``return_row`` need not; an event tells when it is done.

        Raises `MemoryAccountingError` where the row holds a tensor or waits for a fence: the fill would destroy it.
        """
        self._checked("scrub", row)
        self.space.scrub_row(row, self.pattern, stream)

    def return_row(self, row: int) -> None:
        """Take the row from the tensor space; raises `MemoryAccountingError` unless it is empty and fenced."""
        pool = self._checked("return", row)
        held = self.space.holds_row(row)
        closed = False
        if held:
            closed = not self.space.row_open(row)
            self.space.remove_row(row)
        try:
            pool.return_row(row, self.pattern, self.kv_stream)
        except Exception:
            if held and pool.is_lent(row):
                self.space.add_row(row)
                if closed:
                    self.space.close_row(row)
            raise

    def release(self) -> None:
        """Give everything back to the driver; work on the memory must have passed.

        Raises `DriverCallError` where the driver keeps some of it: nothing can be used any more, and the next call tries
        again.
        """
        self._space = None
        self._geometry = None
        if self._pool is None:
            return
        kept = self._pool.release()
        if kept:
            raise DriverCallError(
                f"driver {self.driver.name} kept {kept} blocks, ranges or events that were to be released: release again"
            )
        self._pool = None

    def check_integrity(self) -> None:
        """Check the native tables, and that the tensor space holds exactly the lent rows."""
        if self._space is None:
            return
        self.pool.check_integrity()
        self.space.check_integrity()
        lent = [row for row in range(self.pool.rows) if self.pool.is_lent(row)]
        if lent != self.space.rows():
            raise MemoryAccountingError(f"native provider: lent rows {lent}, tensor space holds {self.space.rows()}")

    def _checked(self, verb: str, row: int) -> PagePool:
        if self._pool is None or self._space is None:
            raise MemoryAccountingError(f"cannot {verb} row {row}: no grid is reserved")
        if not 0 <= row < self._pool.rows:
            raise MemoryAccountingError(f"cannot {verb} row {row}: the grid has rows 0 to {self._pool.rows - 1}")
        return self._pool
