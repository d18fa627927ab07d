"""The product that ends a decoder layer, left out where the layer is computed again for its gradients only.

The output of ``down_proj`` is added to the residual, and no gradient needs its value: that by its input is
``by_output @ weight``. In a backward unit, where nobody reads the layer's output, its forward product is work for nothing
(a quarter of the layer's products). Imports torch, so it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


class _Unread(torch.autograd.Function):  # type: ignore[misc]  # Any where torch is not installed
    """``inputs @ weight.T`` without its values (zeros stand for them), with its gradient by ``inputs``."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any) -> Any:
        ctx.save_for_backward(weight)
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *by_output: Any) -> Any:
        (weight,) = ctx.saved_tensors
        (gradient,) = by_output
        return gradient.reshape(-1, weight.shape[0]).mm(weight).view(*gradient.shape[:-1], weight.shape[1]), None


@contextmanager
def output_unread(layer: Any) -> Iterator[None]:
    """A pass over ``layer`` inside gives gradients as ever, but the values of its output must not be read."""
    product = _last_product(layer)
    if product is None:
        yield
        return
    product.forward = partial(_unread, product)
    try:
        yield
    finally:
        del product.forward


def _unread(product: Any, inputs: Any) -> Any:
    return _Unread.apply(inputs, product.weight)


def _last_product(layer: Any) -> Any:
    """The frozen linear map that ends ``layer``; `None` where something reads its output (DoRA's magnitudes do)."""
    last = layer.mlp.down_proj
    if getattr(last, "lora_variant", None) or getattr(last, "merged", False):
        return None
    base = getattr(last, "base_layer", last)
    return base if type(base) is torch.nn.Linear and not base.weight.requires_grad else None
