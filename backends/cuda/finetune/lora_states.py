"""The trained parameters of a whole model."""

from __future__ import annotations

from typing import Any

from backends.cuda.finetune.lora_state import LoraState
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.submodel import CutModel, Submodel
from harli_core.errors import JobError

UPDATED_TOGETHER = 2**25
"""Trained values that one optimizer unit updates, about; so many take less than a millisecond of an H200."""


class LoraStates:
    """The trained parameters of all submodels."""

    def __init__(self, model: CutModel, device: Any, dtype: Any, recipe: Recipe) -> None:
        """Take the parameters over; ``dtype`` is what the model computes in."""
        import torch
        from torch.optim.adamw import adamw

        def made(piece: Submodel) -> LoraState | None:
            return LoraState(piece, device, dtype) if piece.trained else None

        self.dtype = dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.embedding = made(model.embedding)
        self.layers = [made(layer) for layer in model.layers]
        self.head = made(model.head)
        self.recipe = recipe
        self._torch, self._adamw = torch, adamw
        values = max((state.master.numel() for state in self.all), default=1)
        # Layers that one optimizer unit updates
        self.layers_together = max(1, min(len(self.layers), UPDATED_TOGETHER // max(1, values)))

    @property
    def all(self) -> list[LoraState]:
        """Those that there are."""
        return [state for state in (self.embedding, *self.layers, self.head) if state is not None]

    def updated_with(self, layer: int | None) -> list[LoraState]:
        """What the optimizer unit from ``layer`` on updates: the embedding goes with the first, the head with the last."""
        assert layer is not None
        end = layer + self.layers_together
        group = self.layers[layer:end]
        if layer == 0:
            group.insert(0, self.embedding)
        if end >= len(self.layers):
            group.append(self.head)
        return [state for state in group if state is not None]

    def update(self, layer: int | None, rate: float, scale: Any, bad: Any) -> None:
        """One AdamW step on ``scale * gradient`` for what this unit updates, none where ``bad`` is 1; clears gradients.

        A few kernels whatever the number of layers: one after another they would take the host longer than the GPU.
        """
        torch, recipe, states = self._torch, self.recipe, self.updated_with(layer)
        if not states:
            return
        gradients = [state.gradient for state in states]
        if scale is not None:
            torch._foreach_mul_(gradients, scale)
        self._adamw(
            [state.master for state in states], gradients,
            [state.exp_avg for state in states], [state.exp_avg_sq for state in states], [],
            [state.steps for state in states],
            fused=True, grad_scale=None, found_inf=bad, amsgrad=False, maximize=False,
            beta1=recipe.adam_beta1, beta2=recipe.adam_beta2, lr=rate,
            weight_decay=recipe.weight_decay, eps=recipe.adam_epsilon,
        )  # fmt: skip
        torch._foreach_zero_(gradients)
        rounded = [state for state in states if state.compute is not state.master]
        if rounded:
            torch._foreach_copy_([state.compute for state in rounded], [state.master for state in rounded])

    def gradient_norm(self) -> Any:
        """Norm of all gradients together."""
        return self._torch.nn.utils.get_total_norm([state.gradient for state in self.all], foreach=True)

    def tensors(self) -> dict[str, Any]:
        """Everything that a checkpoint needs, by name; not copied."""
        made: dict[str, Any] = {}
        for state in self.all:
            made.update(state.tensors())
        return made

    def masters(self) -> dict[str, Any]:
        """Trained values by full parameter name; not copied."""
        return {name.partition("/")[2]: part for name, part in self.tensors().items() if name.startswith("master/")}

    def restore(self, tensors: dict[str, Any], source: str) -> None:
        """Take over what `tensors` gave; raises `JobError` naming ``source`` where names or shapes differ."""
        expected = {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if expected != found:
            differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise JobError(
                f"{source}: {differing[0]} has shape {found.get(differing[0])}, this job expects "
                f"{expected.get(differing[0])}; was it written with another model or LoRA setting?"
            )
        for state in self.all:
            state.restore(tensors)
