"""The frozen weights of one decoder layer as one run of bytes: its layout, its master on the host, its place in a module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.cuda.finetune.submodel import Submodel
from harli_core.errors import JobError

ALIGNED_BYTES = 256


@dataclass(frozen=True, slots=True)
class FrozenLayout:
    """Where each frozen parameter of a layer lies; layers of equal layout can take each other's place."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    offsets: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, layer: Submodel) -> FrozenLayout:
        """Lay the frozen parameters of ``layer`` out one after the other."""
        offsets, end = [], 0
        for _, parameter in layer.frozen:
            offsets.append(end)
            size = parameter.numel() * parameter.element_size()
            end += -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
        return cls(
            tuple(tuple(parameter.shape) for _, parameter in layer.frozen),
            tuple(parameter.dtype for _, parameter in layer.frozen),
            tuple(offsets),
            end,
        )

    def views(self, flat: Any) -> list[Any]:
        """A run of bytes as the parameters that lie in it."""
        made = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            size = math.prod(shape) * dtype.itemsize
            made.append(flat[offset : offset + size].view(dtype).view(shape))
        return made


def bind_frozen(layer: Submodel, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Let the module of ``layer`` compute with ``tensors`` as its frozen parameters ``names``."""
    import torch

    for name, tensor in zip(names, tensors, strict=True):
        owner, _, leaf = name.rpartition(".")
        layer.module.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)


def host_master(layer: Submodel, layout: FrozenLayout, *, pinned: bool) -> Any:
    """Copy the frozen weights of ``layer`` into one run of host bytes; the module computes on it from here on."""
    import torch

    flat = torch.empty(layout.size_bytes, dtype=torch.uint8, pin_memory=pinned)
    views = layout.views(flat)
    for view, (_, parameter) in zip(views, layer.frozen, strict=True):
        if parameter.device.type != "meta":
            view.copy_(parameter.detach())
    bind_frozen(layer, [name for name, _ in layer.frozen], views)
    return flat


def take_tensors(layer: Submodel, tensors: Mapping[str, Any]) -> None:
    """Let ``layer`` compute on weights that somebody else holds, by the layer's own names (``mlp.up_proj.weight``).

    Names are those of the model without adapter; raises `JobError` where one is missing or of another shape.
    """
    names, found = [], []
    for name, parameter in layer.frozen:
        plain = name.replace(".base_layer.", ".")
        tensor = tensors.get(plain)
        if tensor is None:
            raise JobError(f"shared weights: {layer.prefix}{plain} is missing; there are {', '.join(sorted(tensors))}")
        if tensor.shape != parameter.shape:
            raise JobError(
                f"shared weights: {layer.prefix}{plain} has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}"
            )
        names.append(name)
        found.append(tensor.detach())
    bind_frozen(layer, names, found)
