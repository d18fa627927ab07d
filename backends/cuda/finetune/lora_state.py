"""The trained parameters of one submodel: master values, gradients and AdamW, each in one flat tensor."""

from __future__ import annotations

import math
from typing import Any

from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.submodel import Submodel

ALIGNED = 64
"""Parameters begin at multiples of this many elements, so that matrix kernels may load them in whole vectors."""


class LoraState:
    """Master copy and optimizer of a submodel's LoRA parameters; the module computes on views of ``compute``.

    ``compute`` is the master itself where both have the same dtype, else its rounded copy, renewed after every update:
    what autocast does at each use. Gradients add up in the master's dtype.
    """

    def __init__(self, submodel: Submodel, device: Any, compute_dtype: Any, recipe: Recipe) -> None:
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
        self._master_parameter = torch.nn.Parameter(self.master)
        self._master_parameter.grad = self.gradient
        self.optimizer = torch.optim.AdamW(
            [self._master_parameter],
            lr=recipe.learning_rate,
            betas=(recipe.adam_beta1, recipe.adam_beta2),
            eps=recipe.adam_epsilon,
            weight_decay=recipe.weight_decay,
            fused=True,
        )

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

    def update(self, rate: float, scale: Any, bad: Any) -> None:
        """One AdamW step on ``scale * gradient``, nothing at all where ``bad`` is 1; then the gradient is zero."""
        if scale is not None:
            self.gradient.mul_(scale)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = bad
        self.optimizer.step()
        self.gradient.zero_()
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def tensors(self) -> dict[str, Any]:
        """State by name (``master``, ``exp_avg``, ``exp_avg_sq`` and ``step``), as a checkpoint has it; not copied."""
        import torch

        kept: dict[str, Any] = self.optimizer.state[self._master_parameter]
        made = {}
        for what in ("master", "exp_avg", "exp_avg_sq"):
            flat = self.master if what == "master" else kept.get(what, torch.zeros_like(self.master))
            for name, view in zip(self.names, self.views(flat), strict=True):
                made[f"{what}/{self.submodel.prefix}{name}"] = view
        made[f"step/{self.submodel.prefix}"] = kept.get("step", torch.zeros((), device=self.master.device))
        return made

    def restore(self, tensors: dict[str, Any]) -> None:
        """Take over what `tensors` gave; the caller has checked that names and shapes are right."""
        import torch

        flats = {what: torch.zeros_like(self.master) for what in ("master", "exp_avg", "exp_avg_sq")}
        for what, flat in flats.items():
            for name, view in zip(self.names, self.views(flat), strict=True):
                view.copy_(tensors[f"{what}/{self.submodel.prefix}{name}"])
        self.master.copy_(flats["master"])
        step = tensors[f"step/{self.submodel.prefix}"].to(self.master.device, torch.float32)
        moments = {"exp_avg": flats["exp_avg"], "exp_avg_sq": flats["exp_avg_sq"]}
        self.optimizer.state[self._master_parameter] = {"step": step.clone(), **moments}
        self.gradient.zero_()
        if self.compute is not self.master:
            self.compute.copy_(self.master)
