"""The trained parameters of a whole model."""

from __future__ import annotations

from typing import Any

from backends.cuda.finetune.lora_state import LoraState
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.submodel import CutModel, Submodel
from harli_core.errors import JobError


class LoraStates:
    """The trained parameters of all submodels."""

    def __init__(self, model: CutModel, device: Any, dtype: Any, recipe: Recipe) -> None:
        """Take the parameters over; ``dtype`` is what the model computes in."""
        import torch

        def made(piece: Submodel) -> LoraState | None:
            return LoraState(piece, device, dtype, recipe) if piece.trained else None

        self.dtype = dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.embedding = made(model.embedding)
        self.layers = [made(layer) for layer in model.layers]
        self.head = made(model.head)
        self._torch = torch

    @property
    def all(self) -> list[LoraState]:
        """Those that there are."""
        return [state for state in (self.embedding, *self.layers, self.head) if state is not None]

    def updated_with(self, layer: int | None) -> list[LoraState]:
        """What the optimizer unit of ``layer`` updates: the embedding goes with the first layer, the head with the last."""
        assert layer is not None
        group = [self.layers[layer]]
        if layer == 0:
            group.insert(0, self.embedding)
        if layer + 1 == len(self.layers):
            group.append(self.head)
        return [state for state in group if state is not None]

    def gradient_norm(self) -> Any:
        """Norm of all gradients together."""
        norms = [self._torch.linalg.vector_norm(state.gradient) for state in self.all]
        return self._torch.linalg.vector_norm(self._torch.stack(norms))

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
