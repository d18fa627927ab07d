"""Runs one layer's units with its trained parameters, seeds included: eagerly here, as graphs in `layer_graphs`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from backends.cuda.finetune import layer_pass
from backends.cuda.finetune.dropout import seeded
from backends.cuda.finetune.layer_pass import AttentionInputs
from backends.cuda.finetune.lora_state import LoraState
from backends.cuda.finetune.submodel import Submodel


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how a unit runs: its layer, the slot that the layer's weights are in, the stream, the seed of its draws.

    ``host_ms``: see `FinetuneWork.run`.
    """

    layer: int
    slot: int | None
    stream: Any
    seed: int | None
    host_ms: float | None = None


class LayerRunner(Protocol):
    """The two passes over a layer. Work is enqueued on the current stream, which is the place's."""

    def forward(self, place: Place, hidden: Any, inputs: AttentionInputs) -> Any:
        """Output of the layer; nothing else is kept."""
        ...

    def backward(self, place: Place, hidden: Any, by_output: Any, inputs: AttentionInputs, *, by_input: bool) -> Any:
        """Add the gradients of the layer's trained parameters; returns that of its input if asked for."""
        ...

    def reuse(self, output: Any) -> None:
        """No unit from now on reads ``output``, which `forward` returned: it may become the output of a later one."""
        ...

    def working_memory(self, stream: Any) -> AbstractContextManager[None]:
        """What is allocated inside is this unit's own: the next unit on ``stream`` takes its memory over."""
        ...


class EagerRunner:
    """Kernel after kernel, any shape."""

    def __init__(self, layers: Sequence[Submodel], states: Sequence[LoraState | None], device: Any) -> None:
        """``states`` holds `None` for layers without trained parameters."""
        self.layers, self.states, self.device = layers, states, device

    def forward(self, place: Place, hidden: Any, inputs: AttentionInputs) -> Any:
        """See `LayerRunner`."""
        with seeded(place.seed, self.device):
            return layer_pass.forward(self.layers[place.layer].module, hidden, inputs)

    def backward(self, place: Place, hidden: Any, by_output: Any, inputs: AttentionInputs, *, by_input: bool) -> Any:
        """See `LayerRunner`."""
        state = self.states[place.layer]
        parameters = [] if state is None else state.parameters
        module = self.layers[place.layer].module
        with seeded(place.seed, self.device):
            by_hidden, gradients = layer_pass.backward(module, hidden, by_output, inputs, parameters, by_input=by_input)
        if state is not None:
            state.add(gradients)
        return by_hidden

    def reuse(self, output: Any) -> None:
        """See `LayerRunner`; torch has it back with the last reference."""

    def working_memory(self, stream: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        """See `LayerRunner`; torch's own memory, which tells units from what outlives them by references."""
        return nullcontext()
