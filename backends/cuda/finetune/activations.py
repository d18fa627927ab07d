"""What lives from one unit to a later one within an optimizer step: layer inputs, gradients, kept graphs, batch tensors."""

from __future__ import annotations

from typing import Any

from backends.cuda.finetune.layer_pass import AttentionInputs
from backends.cuda.finetune.micro_batch import MicroBatch, OptimizerBatch


class Activations:
    """Tensors by layer and micro-batch. The input of layer ``n`` is the output of layer ``n - 1``."""

    def __init__(self, device: Any) -> None:
        """Empty."""
        self.device = device
        self.loaded = False
        self._batch: list[tuple[Any, Any, Any]] = []
        self._inputs: list[AttentionInputs] = []
        self._hidden: dict[tuple[int, int], Any] = {}
        self._gradient: dict[int, Any] = {}
        self._kept: dict[tuple[int, int], tuple[Any, Any]] = {}

    def load(self, batch: OptimizerBatch, rotary: Any, dtype: Any) -> None:
        """Bring the batch to the device; micro-batches of one length and without mask share their rotary tensors."""
        import torch

        like = torch.empty(0, dtype=dtype, device=self.device)
        shared: dict[int, AttentionInputs] = {}
        for part in batch.micro_batches:
            self._batch.append((self._to(part.ids), self._to(part.trained), self._to(part.targets)))
            length = part.shape[1]
            if part.mask is not None:
                self._inputs.append(self._made(part, rotary, like))
                continue
            if length not in shared:
                shared[length] = self._made(part, rotary, like)
            self._inputs.append(shared[length])
        self.loaded = True

    def ids(self, index: int) -> Any:
        """Token ids of micro-batch ``index``."""
        return self._batch[index][0]

    def targets(self, index: int) -> tuple[Any, Any]:
        """Flat places that are trained on, and the tokens that should follow them."""
        return self._batch[index][1], self._batch[index][2]

    def inputs(self, index: int) -> AttentionInputs:
        """Rotary tensors and mask of micro-batch ``index``."""
        return self._inputs[index]

    def input(self, layer: int, index: int) -> Any:
        """Input of ``layer``."""
        return self._hidden[layer, index]

    def put(self, layer: int, index: int, hidden: Any) -> None:
        """Set the input of ``layer``."""
        self._hidden[layer, index] = hidden

    def drop(self, layer: int, index: int) -> Any:
        """The input of ``layer`` is not needed any more; returns it (`None`: it was gone)."""
        return self._hidden.pop((layer, index), None)

    def gradient(self, index: int) -> Any:
        """Gradient of the loss by the output of the layer whose backward unit is next."""
        return self._gradient[index]

    def put_gradient(self, index: int, gradient: Any) -> None:
        """Pass the gradient on to the layer below (`None`: nothing below is trained)."""
        self._gradient[index] = gradient

    def keep(self, layer: int, index: int, leaf: Any, output: Any) -> None:
        """Keep a layer's graph from its forward to its backward unit."""
        self._kept[layer, index] = leaf, output

    def take_kept(self, layer: int, index: int) -> tuple[Any, Any] | None:
        """What was kept, if it was."""
        return self._kept.pop((layer, index), None)

    def forget_kept(self, layer: int) -> None:
        """Drop what was kept of ``layer``; its inputs stay, so that it can be computed again."""
        for key in [key for key in self._kept if key[0] == layer]:
            del self._kept[key]

    def clear(self) -> None:
        """Let go of everything."""
        self._hidden.clear()
        self._gradient.clear()
        self._kept.clear()

    def _made(self, part: MicroBatch, rotary: Any, like: Any) -> AttentionInputs:
        positions = self._to(part.positions)
        mask = None if part.mask is None else self._to(part.mask)
        return AttentionInputs.of(rotary, like, positions, mask)

    def _to(self, tensor: Any) -> Any:
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
