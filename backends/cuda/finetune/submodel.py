"""A stock PEFT model cut at its layer boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backends.cuda.finetune.dropout import draws
from harli_core.errors import JobError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ATTENTION = ("sdpa", "eager")
CHANGING_ROPE = ("dynamic", "longrope")
ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class Submodel:
    """One piece of the model: a module, where it lies in the whole one, and whether its forward pass in training draws."""

    module: Any
    prefix: str
    draws: bool

    @classmethod
    def of(cls, module: Any, prefix: str) -> Submodel:
        """The piece whose parameters begin with ``prefix`` in the PEFT model."""
        return cls(module, prefix, draws(module))

    @property
    def trained(self) -> list[tuple[str, Any]]:
        """Trained parameters, by their names inside the module."""
        return [(name, part) for name, part in self.module.named_parameters() if part.requires_grad]

    @property
    def frozen(self) -> list[tuple[str, Any]]:
        """Frozen parameters where they are now; nobody keeps them, so that their memory can go."""
        return [(name, part) for name, part in self.module.named_parameters() if not part.requires_grad]


class CutModel:
    """Embedding, decoder layers, norm and head of a PEFT model, each to be run for itself."""

    def __init__(self, peft_model: Any) -> None:
        """Check that the pieces together are the whole; raises `JobError` for what cannot be cut."""
        causal = peft_model.get_base_model()
        config = causal.config
        if config.model_type not in MODEL_TYPES:
            raise JobError(
                f"model type {config.model_type!r} cannot be finetuned in units: {', '.join(MODEL_TYPES)} can"
            )
        if config._attn_implementation not in ATTENTION:
            raise JobError(
                f"attention implementation {config._attn_implementation!r} cannot be run layer by layer: load the model "
                f"with one of {', '.join(ATTENTION)}"
            )
        _check_rope(config)
        self.peft_model = peft_model
        self.config = config
        self.rotary = causal.model.rotary_emb
        prefix = "base_model.model.model."
        self.embedding = Submodel.of(causal.model.embed_tokens, prefix + "embed_tokens.")
        self.layers = [
            Submodel.of(layer, f"{prefix}layers.{index}.") for index, layer in enumerate(causal.model.layers)
        ]
        self.norm = Submodel.of(causal.model.norm, prefix + "norm.")
        self.head = Submodel.of(causal.lm_head, "base_model.model.lm_head.")
        if getattr(causal.model, "gradient_checkpointing", False):
            raise JobError("gradient checkpointing is on: units recompute by themselves, leave it off")
        self._check_trained()
        self.first_trained = self._first_trained()
        peft_model.train()

    @property
    def submodels(self) -> list[Submodel]:
        """All pieces in the order of the forward pass."""
        return [self.embedding, *self.layers, self.norm, self.head]

    def project(self, rows: Any) -> Any:
        """Norm and head of hidden states."""
        return self.head.module(self.norm.module(rows))

    def sliding_window(self) -> int | None:
        """Tokens beyond which some layer does not look back; `None` where every layer sees everything."""
        if "sliding_attention" not in (getattr(self.config, "layer_types", None) or []):
            return None
        return int(self.config.sliding_window)

    def _check_trained(self) -> None:
        cut = {piece.prefix + name for piece in self.submodels for name, _ in piece.trained}
        for name, parameter in self.peft_model.named_parameters():
            if parameter.requires_grad and name not in cut:
                raise JobError(f"parameter {name} is trained but lies in no layer: finetuning in units cannot reach it")
        if not cut:
            raise JobError("the adapter has no trained parameter")
        for name in (name for piece in self.submodels for name, _ in piece.trained):
            if "lora_" not in name:
                raise JobError(
                    f"parameter {name} is trained but belongs to no LoRA matrix (bias, modules_to_save or token indices): "
                    "finetuning in units trains LoRA parameters only"
                )

    def _first_trained(self) -> int:
        """First layer through whose input a gradient need not go; -1 where the embedding is trained too."""
        if self.embedding.trained:
            return -1
        trained = [index for index, layer in enumerate(self.layers) if layer.trained]
        return trained[0] if trained else len(self.layers)


def _check_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind in CHANGING_ROPE:
        raise JobError(f"rope type {kind!r} depends on lengths seen before and cannot be run layer by layer")
