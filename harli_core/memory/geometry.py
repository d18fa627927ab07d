"""The shape of the pool: how 2 MiB blocks form rows of tokens and columns of layers (paper section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harli_core.errors import ConfigError
from harli_core.model import ModelShape

BLOCK_BYTES = 2 * 1024**2
"""The granularity in which a GPU driver maps physical memory."""

Layout = Literal["per_layer", "page_major"]
"""``per_layer``: one column for K, one for V of each layer; ``page_major``: one column holds all layers of a token."""

_SLOT_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class GridGeometry:
    """A grid of ``rows`` x ``columns`` blocks; each row stores ``row_tokens`` tokens over all columns.

    ::

                    layer 0 K   layer 0 V   layer 1 K   ...   layer L-1 V
                  +-----------+-----------+-----------+-----+-----------+
        row 0     |  2 MiB    |  2 MiB    |  2 MiB    |     |  2 MiB    |   slots 0 .. row_tokens-1
                  +-----------+-----------+-----------+-----+-----------+
        row 1     |           |           |           |     |           |   slots row_tokens .. 2*row_tokens-1
                  +-----------+-----------+-----------+-----+-----------+
                       |                                         |
          KV view: each column is one            row view: the blocks of a row one after
          contiguous virtual range,              the other, block id = row * columns + column
          indexed by slot

    LLaMA3-8B per layer: 64 columns, 1024 tokens and 128 MiB a row; page-major: one column, 16 tokens and 2 MiB a row.
    """

    row_tokens: int
    columns: int
    rows: int
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        """Raise `ConfigError` for sizes that no grid can have."""
        for name in ("row_tokens", "columns", "rows", "block_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"grid geometry: {name} is {getattr(self, name)}, must be at least 1")
        if self.row_tokens & (self.row_tokens - 1) or self.block_bytes % self.row_tokens:
            raise ConfigError(
                f"grid geometry: row_tokens is {self.row_tokens}, must be a power of two that divides "
                f"a block of {self.block_bytes} bytes"
            )
        if self.capacity_tokens >= _SLOT_LIMIT:
            raise ConfigError(f"grid geometry: {self.capacity_tokens} token slots do not fit 32-bit slot indices")

    @classmethod
    def of(cls, model: ModelShape, pool_bytes: int, layout: Layout = "per_layer") -> GridGeometry:
        """Return the grid of ``model``'s KV cache in a pool of ``pool_bytes`` (whole rows only, the rest is unused).

        Raises `ConfigError` where a KV entry does not divide a block, or the pool is smaller than one row.
        """
        per_layer = layout == "per_layer"
        columns = 2 * model.layers if per_layer else 1
        entry_bytes = model.kv_bytes_per_token_column if per_layer else model.kv_bytes_per_token
        if BLOCK_BYTES % entry_bytes:
            raise ConfigError(
                f"model {model.name} under layout {layout}: a KV entry of {entry_bytes} bytes does not divide "
                f"a block of {BLOCK_BYTES} bytes, so a token would straddle two blocks; "
                + ("its head size must be a power of two" if per_layer else "use layout per_layer")
            )
        rows = pool_bytes // (columns * BLOCK_BYTES)
        if rows < 1:
            raise ConfigError(f"a pool of {pool_bytes} bytes is smaller than one row ({columns * BLOCK_BYTES} bytes)")
        return cls(row_tokens=BLOCK_BYTES // entry_bytes, columns=columns, rows=rows)

    @property
    def row_blocks(self) -> int:
        """Blocks of one row."""
        return self.columns

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.columns * self.block_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all columns."""
        return self.row_bytes // self.row_tokens

    @property
    def capacity_tokens(self) -> int:
        """Token slots of the whole grid, pinned ones included."""
        return self.rows * self.row_tokens
