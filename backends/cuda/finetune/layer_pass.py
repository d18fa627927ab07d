"""Forward and backward of one decoder layer on one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What every layer needs beside its input: rotary cosines and sines, positions, and a mask (`None`: causal)."""

    cos: Any
    sin: Any
    positions: Any
    mask: Any

    @classmethod
    def of(cls, rotary: Any, like: Any, positions: Any, mask: Any) -> AttentionInputs:
        """For ``positions`` ``[1 or rows, length]``, in the dtype of ``like``."""
        cos, sin = rotary(like, position_ids=positions)
        return cls(cos, sin, positions, mask)

    def tensors(self) -> list[Any]:
        """Those that exist."""
        return [tensor for tensor in (self.cos, self.sin, self.positions, self.mask) if tensor is not None]


def call_layer(layer: Any, hidden: Any, inputs: AttentionInputs) -> Any:
    """A decoder layer of transformers, without cache."""
    return layer(
        hidden,
        attention_mask=inputs.mask,
        position_ids=inputs.positions,
        position_embeddings=(inputs.cos, inputs.sin),
        past_key_values=None,
        use_cache=False,
    )


def forward(layer: Any, hidden: Any, inputs: AttentionInputs) -> Any:
    """Output of ``layer``, keeping nothing for a backward pass."""
    import torch

    with torch.no_grad():
        return call_layer(layer, hidden, inputs)


def forward_kept(layer: Any, hidden: Any, inputs: AttentionInputs) -> tuple[Any, Any]:
    """Input leaf and output of ``layer`` with the graph between them, for `backward_kept`."""
    import torch

    leaf = hidden.detach().requires_grad_()
    with torch.enable_grad():
        return leaf, call_layer(layer, leaf, inputs)


def backward_kept(
    leaf: Any, output: Any, by_output: Any, parameters: Sequence[Any], *, by_input: bool
) -> tuple[Any, list[Any]]:
    """Gradients by the input (`None` unless ``by_input``) and by each of ``parameters`` (`None`: it had no part)."""
    import torch

    wanted = [leaf, *parameters] if by_input else [*parameters]
    gradients = list(torch.autograd.grad(output, wanted, by_output, allow_unused=True))
    return (gradients.pop(0) if by_input else None), gradients


def backward(
    layer: Any, hidden: Any, by_output: Any, inputs: AttentionInputs, parameters: Sequence[Any], *, by_input: bool
) -> tuple[Any, list[Any]]:
    """`backward_kept` after computing the forward pass again, as far as gradients need it."""
    from backends.cuda.finetune.unread_product import output_unread

    with output_unread(layer):
        leaf, output = forward_kept(layer, hidden, inputs)
    return backward_kept(leaf, output, by_output, parameters, by_input=by_input)
