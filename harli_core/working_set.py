"""What a finetuning job keeps in lent rows: a base that never leaves, and the window of frozen layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harli_core.memory.geometry import GridGeometry
from harli_core.model import ModelShape

LOSS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once in a simulated job, as in the samples: the loss is computed in chunks.

On a GPU chunks are smaller (`UnitSettings`), since each finetune stream keeps the memory of one.
"""


@dataclass(frozen=True, slots=True)
class JobShape:
    """The sizes of one LoRA job: micro-batches of ``unit_tokens`` tokens, ``micro_batches`` an optimizer step."""

    job_id: str
    model: ModelShape
    unit_tokens: int
    micro_batches: int
    lora_rank: int = 16
    shares_weights: bool = False

    @property
    def step_tokens(self) -> int:
        """Training tokens of one optimizer step."""
        return self.unit_tokens * self.micro_batches

    @property
    def base_bytes(self) -> int:
        """Bytes that stay for the whole job: embeddings, one checkpoint a layer and micro-batch, workspace, LoRA state.

        Workspace is what one layer's recomputation and one loss chunk hold at once; LoRA state is the rank-``r`` pair on
        q and v with its gradient and AdamW moments in fp32. With shared weights the embeddings are the server's.
        """
        model = self.model
        embeddings = 0 if self.shares_weights else model.embedding_bytes
        checkpoints = model.layers * self.step_tokens * model.hidden * model.dtype_bytes
        layer_workspace = self.unit_tokens * (4 * model.intermediate + 10 * model.hidden) * model.dtype_bytes
        logits = min(self.unit_tokens, LOSS_CHUNK_TOKENS) * model.vocab * (model.dtype_bytes + 4)
        q_and_v = 2 * model.hidden + model.head_dim * (model.heads + model.kv_heads)
        lora = model.layers * self.lora_rank * q_and_v * (model.dtype_bytes + 4 * 4)
        return embeddings + checkpoints + max(layer_workspace, logits) + lora


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """A job's needs in grid terms, for a given geometry.

    With ``rows_wanted`` rows nothing is ever swapped, ``rows_floor`` are the fewest with which the job can run at all.
    """

    base_blocks: int
    layer_blocks: int
    layers: int
    minimum_layers: int
    rows_wanted: int
    rows_floor: int

    @classmethod
    def of(cls, shape: JobShape, geometry: GridGeometry, minimum_layers: int = 2) -> WorkingSet:
        """Round the job's bytes up to blocks, and those to rows; shared weights need no window."""
        base_blocks = math.ceil(shape.base_bytes / geometry.block_bytes)
        layer_blocks = 0 if shape.shares_weights else math.ceil(shape.model.layer_bytes / geometry.block_bytes)
        layers = shape.model.layers
        least = min(minimum_layers, layers)

        def rows(resident: int) -> int:
            return math.ceil((base_blocks + resident * layer_blocks) / geometry.row_blocks)

        return cls(base_blocks, layer_blocks, layers, least, rows_wanted=rows(layers), rows_floor=rows(least))
