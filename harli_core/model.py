"""Shapes of the served and finetuned models, and the byte counts that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from harli_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    Sizes count elements; ``*_bytes`` properties count bytes at ``dtype_bytes`` an element.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool = False
    dtype_bytes: int = 2

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer (attention, gated MLP, two norms)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def layer_bytes(self) -> int:
        """Bytes of one frozen decoder layer: what a window swap moves."""
        return self.layer_parameters * self.dtype_bytes

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding table (and of the output head, where it is a table of its own)."""
        tables = 1 if self.tied_embeddings else 2
        return tables * self.vocab * self.hidden * self.dtype_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.layers * self.layer_bytes + self.embedding_bytes + self.hidden * self.dtype_bytes

    @property
    def kv_bytes_per_token_column(self) -> int:
        """Bytes that one token takes in one grid column (K or V of one layer)."""
        return self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes of one token over all layers: ``Mem_kv`` of the paper (section 4.4)."""
        return 2 * self.layers * self.kv_bytes_per_token_column


MODELS: dict[str, ModelShape] = {
    "llama3-8b": ModelShape(
        name="llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256
    ),
    "qwen2.5-7b": ModelShape(
        name="qwen2.5-7b", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064
    ),
}


def model_shape(name: str) -> ModelShape:
    """Look a model up by name; raises `ConfigError` with the known names."""
    try:
        return MODELS[name]
    except KeyError:
        raise ConfigError(f"unknown model {name!r}: known models are {', '.join(sorted(MODELS))}") from None
