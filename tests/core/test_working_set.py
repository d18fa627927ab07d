"""What a job keeps in lent rows: bytes, blocks and rows."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from harli_core.memory.geometry import BLOCK_BYTES, GridGeometry
from harli_core.model import ModelShape, model_shape
from harli_core.working_set import JobShape, WorkingSet

TINY = ModelShape(name="tiny", layers=4, hidden=512, heads=8, kv_heads=8, head_dim=64, intermediate=1024, vocab=4096)
SHAPE = JobShape("job", TINY, unit_tokens=1024, micro_batches=2, lora_rank=8)
GEOMETRY = GridGeometry(row_tokens=1024, columns=8, rows=100)


def test_base_bytes_by_hand() -> None:
    """Embeddings, checkpoints, the larger of workspace and logits, LoRA state, summed from the sizes."""
    embeddings = 2 * 4096 * 512 * 2
    checkpoints = 4 * 2048 * 512 * 2
    layer_workspace = 1024 * (4 * 1024 + 10 * 512) * 2
    logits = 1024 * 4096 * 6
    lora = 4 * 8 * (2 * 512 + 64 * 16) * 18
    assert logits > layer_workspace
    assert SHAPE.base_bytes == embeddings + checkpoints + logits + lora
    wide = dataclasses.replace(SHAPE, model=dataclasses.replace(TINY, vocab=1024))
    assert wide.base_bytes == embeddings // 4 + checkpoints + layer_workspace + lora


def test_logits_exist_a_chunk_at_a_time() -> None:
    """Twice the micro-batch adds a checkpoint's worth and no logits, as the loss goes through in chunks."""
    longer = dataclasses.replace(SHAPE, unit_tokens=2048, micro_batches=1, model=dataclasses.replace(TINY, vocab=8192))
    shorter = dataclasses.replace(longer, unit_tokens=1024)
    assert longer.base_bytes - shorter.base_bytes == 4 * 1024 * 512 * 2


def test_rows_are_blocks_rounded_up() -> None:
    """Wanted: base and all layers; floor: base and two layers."""
    needs = WorkingSet.of(SHAPE, GEOMETRY)
    assert needs.base_blocks == -(-SHAPE.base_bytes // BLOCK_BYTES)
    assert needs.layer_blocks == -(-TINY.layer_bytes // BLOCK_BYTES)
    assert needs.rows_wanted == -(-(needs.base_blocks + 4 * needs.layer_blocks) // 8)
    assert needs.rows_floor == -(-(needs.base_blocks + 2 * needs.layer_blocks) // 8)
    assert (needs.layers, needs.minimum_layers) == (4, 2)


def test_shared_weights_need_no_window() -> None:
    """The server's own weights: no layer blocks, no embeddings, floor and wish are the same."""
    shared = dataclasses.replace(SHAPE, shares_weights=True)
    needs = WorkingSet.of(shared, GEOMETRY)
    assert SHAPE.base_bytes - shared.base_bytes == TINY.embedding_bytes
    assert needs.layer_blocks == 0
    assert needs.rows_floor == needs.rows_wanted


def test_a_model_of_one_layer_wants_one_layer() -> None:
    """The minimum window is never more than there is."""
    needs = WorkingSet.of(dataclasses.replace(SHAPE, model=dataclasses.replace(TINY, layers=1)), GEOMETRY)
    assert needs.minimum_layers == needs.layers == 1
    assert needs.rows_floor == needs.rows_wanted


def test_llama_on_its_own_grid() -> None:
    """The real case: 135 rows of 128 MiB hold all of LLaMA3-8B and its LoRA job, 37 the least of it."""
    llama = model_shape("llama3-8b")
    needs = WorkingSet.of(JobShape("job", llama, 1024, 4), GridGeometry.of(llama, 100 * 10**9))
    assert (needs.rows_floor, needs.rows_wanted) == (37, 135)


@given(micro_batches=st.integers(1, 8), rank=st.integers(1, 128), minimum=st.integers(1, 6))
def test_floor_never_exceeds_wish(micro_batches: int, rank: int, minimum: int) -> None:
    """For any job the floor lies between one row and the wish, and more resident layers never need fewer rows."""
    shape = dataclasses.replace(SHAPE, micro_batches=micro_batches, lora_rank=rank)
    needs = WorkingSet.of(shape, GEOMETRY, minimum)
    assert 1 <= needs.rows_floor <= needs.rows_wanted
    assert WorkingSet.of(shape, GEOMETRY, 1).rows_floor <= needs.rows_floor
