"""CUDA graphs of the layers' units.

A graph remembers addresses and, on a GPU cut into partitions, the SMs of the stream that it was captured on. So there is
one for each (stream, slot, kind, shape, structure of the trained parameters): weights pass through slots of fixed
addresses, and everything else that differs from layer to layer goes through a *stage*, buffers of one shape that are
filled before a replay and read after it::

    hidden, by_output, LoRA parameters, rotary tensors --copy--> stage --graph on slot--> output / by_hidden, gradients

The copies are a few tens of megabytes at memory bandwidth beside milliseconds of matrix products.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, Protocol

from backends.cuda.finetune import layer_pass
from backends.cuda.finetune.dropout import seeded
from backends.cuda.finetune.layer_pass import AttentionInputs
from backends.cuda.finetune.layer_runner import EagerRunner, Place
from backends.cuda.finetune.lora_state import LoraState

Kind = Literal["forward", "backward", "backward_to_input"]
Structure = tuple[Any, ...]

FIRST_CAPTURE_MS = 20.0
"""What a capture is taken to need of the host before one was seen."""

FIRST_TIMING_MS = 100.0
"""The same for the first capture of a shape on part of the chip, which is made twice and timed."""

FORGETTING = 0.98
"""The longest capture counts so much less with each later one, and with each that there was no time for."""


class Capture(Protocol):
    """Turns work into something that can be replayed at the same addresses."""

    def key(self, stream: Any) -> int | None:
        """Name a stream; `None` where nothing can be captured."""
        ...

    def sms(self, stream: Any) -> int | None:
        """SMs of a stream that has fewer than the chip; `None`: it has all of them."""
        ...

    def planned_for(self, sms: int | None) -> AbstractContextManager[None]:
        """Matrix kernels started inside are planned for ``sms`` SMs (`None`: for the chip)."""
        ...

    def capture(self, module: Any, work: Callable[[], None], stream: Any, sms: int | None) -> Any:
        """Record ``work``, which reads the parameters of ``module`` where they are now; the result has ``replay()``."""
        ...

    def ms(self, graph: Any) -> float:
        """Time of a few replays, waited for."""
        ...

    def memory(self, stream: Any) -> AbstractContextManager[None]:
        """What is allocated inside lies where graphs of ``stream`` keep intermediate tensors: nothing may outlive it."""
        ...

    def forget(self, key: int) -> None:
        """The stream of this key is to be destroyed."""
        ...


class Stage:
    """Buffers of one micro-batch shape and one structure of trained parameters."""

    def __init__(self, hidden: Any, inputs: AttentionInputs, state: LoraState | None) -> None:
        """Allocate like the given tensors."""
        import torch

        self.hidden, self.output = torch.zeros_like(hidden), torch.zeros_like(hidden)
        self.by_output, self.by_hidden = torch.zeros_like(hidden), torch.zeros_like(hidden)
        self.lora: Any = None if state is None else torch.zeros_like(state.compute)
        self.gradient: Any = None if state is None else torch.zeros_like(state.gradient)
        mask = None if inputs.mask is None else torch.zeros_like(inputs.mask)
        self.inputs = AttentionInputs(
            torch.zeros_like(inputs.cos), torch.zeros_like(inputs.sin), torch.zeros_like(inputs.positions), mask
        )
        self._filled_with: AttentionInputs | None = None

    def fill(self, hidden: Any, by_output: Any, inputs: AttentionInputs, state: LoraState | None) -> None:
        """Copy in what the next replay reads."""
        self.hidden.copy_(hidden)
        if by_output is not None:
            self.by_output.copy_(by_output)
        if state is not None:
            self.lora.copy_(state.compute)
        if inputs is not self._filled_with:
            for mine, given in zip(self.inputs.tensors(), inputs.tensors(), strict=True):
                mine.copy_(given)
            self._filled_with = inputs


@dataclass(slots=True)
class Counters:
    """What the cache did, for reports and tests of it."""

    captured: int = 0
    replayed: int = 0
    eager: int = 0
    capture_ms: float = 0.0  # the first captures of a shape on a stream apart
    longest_capture_ms: float = 0.0
    targeted: dict[str, bool] = field(default_factory=dict)


class GraphRunner:
    """A `LayerRunner` that captures what comes again and replays it; the first of its kind on a stream runs eagerly.

    That first pass also lets libraries set themselves up, which a capture must not see. On a stream with fewer SMs than
    the chip the first capture of a shape is made with and without telling cuBLAS, both are timed (which waits for the
    GPU, once a stream and shape), and the faster way is kept for all graphs of that shape. A unit whose graph is missing
    runs eagerly too where the host has no time for a capture, or for that timing (`Place.host_ms`).
    """

    def __init__(self, eager: EagerRunner, capture: Capture, max_graphs: int = 2048) -> None:
        """``max_graphs`` graphs are kept, those replayed longest ago go first."""
        self._eager, self._capture = eager, capture
        self._graphs: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._stages: dict[tuple[Any, ...], Stage] = {}
        self._spare: list[Any] = []  # outputs that nobody reads any more, all of one shape
        self._spare_shape: Any = None
        self._seen: set[tuple[Any, ...]] = set()
        self._targets: dict[tuple[Any, ...], int | None] = {}
        self._structures = [_structure(layer, state) for layer, state in zip(eager.layers, eager.states, strict=True)]
        self._max_graphs = max_graphs
        self._capture_ms, self._timing_ms = FIRST_CAPTURE_MS, FIRST_TIMING_MS
        self.counters = Counters()

    def forward(self, place: Place, hidden: Any, inputs: AttentionInputs) -> Any:
        """See `LayerRunner`."""
        stage = self._replayed("forward", place, hidden, None, inputs)
        if stage is not None:
            return self._copied(stage.output)
        planned = self._capture.planned_for(self._known_target("forward", place, hidden, inputs))
        with self.working_memory(place.stream), planned:
            output = self._eager.forward(place, hidden, inputs)
        return self._copied(output)

    def backward(self, place: Place, hidden: Any, by_output: Any, inputs: AttentionInputs, *, by_input: bool) -> Any:
        """See `LayerRunner`."""
        kind: Kind = "backward_to_input" if by_input else "backward"
        stage = self._replayed(kind, place, hidden, by_output, inputs)
        if stage is None:
            planned = self._capture.planned_for(self._known_target(kind, place, hidden, inputs))
            with self.working_memory(place.stream), planned:
                by_hidden = self._eager.backward(place, hidden, by_output, inputs, by_input=by_input)
            return None if by_hidden is None else by_hidden.clone()
        state = self._eager.states[place.layer]
        if state is not None:
            state.gradient.add_(stage.gradient)
        return stage.by_hidden.clone() if by_input else None

    def reuse(self, output: Any) -> None:
        """See `LayerRunner`; torch keeps what is freed for the stream that it was made on, so each would have its own."""
        if output.shape == self._spare_shape:
            self._spare.append(output)

    def working_memory(self, stream: Any) -> AbstractContextManager[None]:
        """See `LayerRunner`: where graphs of the stream have theirs."""
        return self._capture.memory(stream)

    def _copied(self, output: Any) -> Any:
        if output.shape != self._spare_shape:
            self._spare_shape = output.shape
            self._spare.clear()
        return self._spare.pop().copy_(output) if self._spare else output.clone()

    def forget(self, stream: Any) -> None:
        """Drop the graphs of a stream that is to be destroyed, its partition with it; its work must be over."""
        gone = self._capture.key(stream)
        if gone is None:
            return
        for key in [key for key in self._graphs if key[0] == gone]:
            del self._graphs[key]
        for family in [family for family in self._targets if family[0] == gone]:
            del self._targets[family]
        self._seen = {family for family in self._seen if family[0] != gone}
        self._capture.forget(gone)

    def _replayed(self, kind: Kind, place: Place, hidden: Any, by_output: Any, inputs: AttentionInputs) -> Stage | None:
        """Run a unit as a graph; the stage holds its results. `None`: it has to run eagerly this time."""
        family = self._family(kind, place, hidden, inputs)
        if place.slot is None or family[0] is None:
            return None
        key = (*family, place.slot)
        timed = family not in self._targets and self._capture.sms(place.stream) is not None
        needs_ms = self._timing_ms if timed else self._capture_ms
        late = place.host_ms is not None and key not in self._graphs and needs_ms > place.host_ms
        if family not in self._seen or late:
            self._seen.add(family)
            self.counters.eager += 1
            if late and not timed:
                self._capture_ms *= FORGETTING  # one that was held up must not be the last
            return None
        state = self._eager.states[place.layer]
        stage = self._stages.get(family[2:])
        if stage is None:
            stage = self._stages[family[2:]] = Stage(hidden, inputs, state)
        if key not in self._graphs:
            first, begin_s = family not in self._targets, perf_counter()
            self._graphs[key] = self._captured(kind, place, stage, family)
            took_ms = (perf_counter() - begin_s) * 1e3
            if timed:
                self._timing_ms = max(took_ms, FORGETTING * self._timing_ms)
            elif not first:  # the first one of a shape on a stream sets libraries up
                self._note_capture(took_ms)
            if len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        stage.fill(hidden, by_output, inputs, state)
        with seeded(place.seed, self._eager.device):
            self._graphs[key].replay()
        self.counters.replayed += 1
        return stage

    def _note_capture(self, took_ms: float) -> None:
        self._capture_ms = max(took_ms, FORGETTING * self._capture_ms)
        self.counters.capture_ms += took_ms
        self.counters.longest_capture_ms = max(took_ms, self.counters.longest_capture_ms)

    def _family(self, kind: Kind, place: Place, hidden: Any, inputs: AttentionInputs) -> tuple[Any, ...]:
        shape = (tuple(hidden.shape), tuple(inputs.cos.shape), inputs.mask is not None)
        return (self._capture.key(place.stream), kind, shape, self._structures[place.layer])

    def _known_target(self, kind: Kind, place: Place, hidden: Any, inputs: AttentionInputs) -> int | None:
        """For an eager unit: what timing chose, or the stream's SMs while nothing was timed."""
        family = self._family(kind, place, hidden, inputs)
        return self._targets[family] if family in self._targets else self._capture.sms(place.stream)

    def _captured(self, kind: Kind, place: Place, stage: Stage, family: tuple[Any, ...]) -> Any:
        """Capture the unit on the stage; chooses the cuBLAS target the first time."""
        if family in self._targets:
            return self._graph(kind, place, stage, self._targets[family])
        sms = self._capture.sms(place.stream)
        plain = self._graph(kind, place, stage, None)
        self._targets[family] = None
        if sms is None:
            return plain
        told = self._graph(kind, place, stage, sms)
        faster = self._capture.ms(told) < self._capture.ms(plain)
        self.counters.targeted[f"{sms} SMs, {kind}, {family[2][0]}"] = faster
        if not faster:
            return plain
        self._targets[family] = sms
        return told

    def _graph(self, kind: Kind, place: Place, stage: Stage, sms: int | None) -> Any:
        module, state = self._eager.layers[place.layer].module, self._eager.states[place.layer]
        parameters = [] if state is None else state.bind(stage.lora)
        try:
            graph = self._capture.capture(
                module, lambda: _unit(kind, module, stage, state, parameters), place.stream, sms
            )
        finally:
            if state is not None:
                state.parameters = state.bind(state.compute)
        self.counters.captured += 1
        return graph


def _unit(kind: Kind, module: Any, stage: Stage, state: LoraState | None, parameters: list[Any]) -> None:
    """What a graph does, from stage to stage."""
    if kind == "forward":
        stage.output.copy_(layer_pass.forward(module, stage.hidden, stage.inputs))
        return
    by_input = kind == "backward_to_input"
    by_hidden, gradients = layer_pass.backward(
        module, stage.hidden, stage.by_output, stage.inputs, parameters, by_input=by_input
    )
    if by_input:
        stage.by_hidden.copy_(by_hidden)
    if state is not None:
        for view, gradient in zip(state.views(stage.gradient), gradients, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)


def _structure(layer: Any, state: LoraState | None) -> Structure:
    """What must be equal for two layers to share graphs, beside their frozen weights: all that is baked into kernels."""
    scalings = tuple(
        (name, tuple(sorted(part.scaling.items())))
        for name, part in layer.module.named_modules()
        if isinstance(getattr(part, "scaling", None), dict)
    )
    trained = () if state is None else tuple(zip(state.names, state.shapes, strict=True))
    return (trained, scalings, getattr(layer.module, "attention_type", None), layer.draws)
