"""The grid's sizes follow from the model and the pool."""

from __future__ import annotations

import pytest

from harli_core.errors import ConfigError
from harli_core.memory.geometry import BLOCK_BYTES, GridGeometry
from harli_core.model import MODELS, ModelShape

LLAMA = MODELS["llama3-8b"]
GIB = 1024**3


def test_llama_per_layer() -> None:
    """LLaMA3-8B per layer: 64 columns, 1024 tokens and 128 MiB a row; a rest smaller than a row is left out."""
    grid = GridGeometry.of(LLAMA, 16 * GIB + 5 * BLOCK_BYTES)
    assert (grid.columns, grid.row_tokens, grid.row_bytes, grid.rows) == (64, 1024, 128 * 1024**2, 128)
    assert grid.capacity_tokens == 128 * 1024
    assert grid.token_bytes == LLAMA.kv_bytes_per_token
    assert grid.row_blocks == 64


def test_llama_page_major() -> None:
    """LLaMA3-8B page-major: one column, 16 tokens a row of one block."""
    grid = GridGeometry.of(LLAMA, GIB, "page_major")
    assert (grid.columns, grid.row_tokens, grid.row_bytes, grid.rows) == (1, 16, BLOCK_BYTES, 512)
    assert grid.token_bytes == LLAMA.kv_bytes_per_token


def test_qwen_page_major_is_refused() -> None:
    """Qwen2.5-7B's 56 KiB of KV a token do not divide a block: refused with the size and a way out."""
    with pytest.raises(ConfigError, match=r"57344 bytes does not divide a block of 2097152 .* use layout per_layer"):
        GridGeometry.of(MODELS["qwen2.5-7b"], GIB, "page_major")


def test_odd_head_size_is_refused_per_layer() -> None:
    """A head size of 96 gives an entry that does not divide a block."""
    odd = ModelShape(name="odd", layers=2, hidden=96, heads=1, kv_heads=1, head_dim=96, intermediate=96, vocab=96)
    with pytest.raises(ConfigError, match=r"192 bytes does not divide"):
        GridGeometry.of(odd, GIB)


def test_pool_smaller_than_a_row_is_refused() -> None:
    """A pool without room for one row names both sizes."""
    with pytest.raises(ConfigError, match=r"134217727 bytes is smaller than one row \(134217728 bytes\)"):
        GridGeometry.of(LLAMA, 128 * 1024**2 - 1)


@pytest.mark.parametrize(("row_tokens", "rows"), [(0, 1), (3, 1), (4, 0), (1024, 2**21)])
def test_impossible_sizes_are_refused(row_tokens: int, rows: int) -> None:
    """No rows, no tokens, a row that is no power of two, or more slots than 32 bits index."""
    with pytest.raises(ConfigError):
        GridGeometry(row_tokens=row_tokens, columns=1, rows=rows)
