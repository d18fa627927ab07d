"""The trained parameters of one submodel: master values, gradients and AdamW, each in one flat tensor."""

from __future__ import annotations

import math
from typing import Any

from backends.cuda.finetune.submodel import Submodel

ALIGNED = 64
"""Parameters begin at multiples of this many elements, so that matrix kernels may load them in whole vectors."""


class LoraState:
    """Master copy and optimizer of a submodel's LoRA parameters; the module computes on views of ``compute``.

    ``compute`` is the master itself where both have the same dtype, else its rounded copy, renewed after every update:
    what autocast does at each use. Gradients add up in the master's dtype.
    """

    def __init__(self, submodel: Submodel, device: Any, compute_dtype: Any) -> None:
        """Take the values over from the module and let it compute on views."""
        import torch

        self.submodel = submodel
        self.names = [name for name, _ in submodel.trained]
        self.shapes = [tuple(parameter.shape) for _, parameter in submodel.trained]
        self._offsets: list[int] = []
        end = 0
        for shape in self.shapes:
            self._offsets.append(end)
            end += -(-math.prod(shape) // ALIGNED) * ALIGNED
        master_dtype = torch.promote_types(compute_dtype, torch.float32)
        self.master = torch.zeros(end, dtype=master_dtype, device=device)
        for view, (_, parameter) in zip(self.views(self.master), submodel.trained, strict=True):
            if parameter.device.type != "meta":
                view.copy_(parameter.detach())
        same = compute_dtype == master_dtype
        self.compute = self.master if same else self.master.to(compute_dtype)
        self.gradient = torch.zeros_like(self.master)
        self.gradient_views = self.views(self.gradient)
        self.parameters = self.bind(self.compute)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.steps = torch.zeros((), dtype=torch.float32, device=device)

    def views(self, flat: Any) -> list[Any]:
        """``flat`` cut into the parameters' shapes."""
        return [
            flat[offset : offset + math.prod(shape)].view(shape)
            for offset, shape in zip(self._offsets, self.shapes, strict=True)
        ]

    def bind(self, flat: Any) -> list[Any]:
        """Let the module compute on views of ``flat``; returns its parameters, which require gradients."""
        import torch

        made = []
        for name, view in zip(self.names, self.views(flat), strict=True):
            owner, _, leaf = name.rpartition(".")
            parameter = torch.nn.Parameter(view.detach())
            self.submodel.module.get_submodule(owner)._parameters[leaf] = parameter
            made.append(parameter)
        return made

    def add(self, gradients: list[Any]) -> None:
        """Add one micro-batch's gradients (`None` where a parameter had no part)."""
        for total, part in zip(self.gradient_views, gradients, strict=True):
            if part is not None:
                total.add_(part)

    def tensors(self) -> dict[str, Any]:
        """State by name (``master``, ``exp_avg``, ``exp_avg_sq`` and ``step``), as a checkpoint has it; not copied."""
        made = {}
        for what, flat in self._flats().items():
            for name, view in zip(self.names, self.views(flat), strict=True):
                made[f"{what}/{self.submodel.prefix}{name}"] = view
        made[f"step/{self.submodel.prefix}"] = self.steps
        return made

    def restore(self, tensors: dict[str, Any]) -> None:
        """Take over what `tensors` gave; the caller has checked that names and shapes are right."""
        for what, flat in self._flats().items():
            for name, view in zip(self.names, self.views(flat), strict=True):
                view.copy_(tensors[f"{what}/{self.submodel.prefix}{name}"])
        self.steps.copy_(tensors[f"step/{self.submodel.prefix}"])
        self.gradient.zero_()
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def _flats(self) -> dict[str, Any]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
