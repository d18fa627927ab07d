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
from dataclasses import dataclass, field
from typing import Any, Literal

from backends.cuda.finetune import layer_pass
from backends.cuda.finetune.dropout import seeded
from backends.cuda.finetune.layer_pass import AttentionInputs
from backends.cuda.finetune.layer_runner import EagerRunner, Place
from backends.cuda.finetune.lora_state import LoraState
from backends.cuda.finetune.sm_target import SmCountTarget, stream_sms

Kind = Literal["forward", "backward", "backward_to_input"]
Structure = tuple[Any, ...]
TIMED_REPLAYS = 3


class Stage:
    """Buffers of one micro-batch shape and one structure of trained parameters."""

    def __init__(self, hidden: Any, inputs: AttentionInputs, state: LoraState | None) -> None:
        """Allocate like the given tensors."""
        import torch

        self.hidden, self.output = torch.zeros_like(hidden), torch.zeros_like(hidden)
        self.by_output, self.by_hidden = torch.zeros_like(hidden), torch.zeros_like(hidden)
        self.lora = None if state is None else torch.zeros_like(state.compute)
        self.gradient = None if state is None else torch.zeros_like(state.gradient)
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
    targeted: dict[str, bool] = field(default_factory=dict)


class GraphRunner:
    """A `LayerRunner` that captures what comes again and replays it; the first of its kind on a stream runs eagerly.

    That first pass also lets libraries set themselves up, which a capture must not see. On a stream with fewer SMs than
    the chip the first capture of a shape is made with and without telling cuBLAS, both are timed (which waits for the
    GPU, once a stream and shape), and the faster way is kept for all graphs of that shape.
    """

    def __init__(self, eager: EagerRunner, max_graphs: int = 2048) -> None:
        """``max_graphs`` graphs are kept, those replayed longest ago go first."""
        import torch

        self._torch = torch
        self._eager = eager
        self._graphs: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._stages: dict[tuple[Any, ...], Stage] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._targets: dict[tuple[Any, ...], int | None] = {}
        self._sms: dict[int, int | None] = {}
        self._structures = [_structure(layer, state) for layer, state in zip(eager.layers, eager.states, strict=True)]
        self._target = SmCountTarget()
        self._chip_sms = torch.cuda.get_device_properties(eager.device).multi_processor_count
        self._pools: dict[int, Any] = {}
        self._max_graphs = max_graphs
        self.counters = Counters()

    def forward(self, place: Place, hidden: Any, inputs: AttentionInputs) -> Any:
        """See `LayerRunner`."""
        stage = self._replay("forward", place, hidden, None, inputs)
        if stage is None:
            with self._target.set_to(self._known_target("forward", place, hidden, inputs)):
                return self._eager.forward(place, hidden, inputs)
        return stage.output.clone()

    def backward(self, place: Place, hidden: Any, by_output: Any, inputs: AttentionInputs, *, by_input: bool) -> Any:
        """See `LayerRunner`."""
        kind: Kind = "backward_to_input" if by_input else "backward"
        stage = self._replay(kind, place, hidden, by_output, inputs)
        if stage is None:
            with self._target.set_to(self._known_target(kind, place, hidden, inputs)):
                return self._eager.backward(place, hidden, by_output, inputs, by_input=by_input)
        state = self._eager.states[place.layer]
        if state is not None:
            state.gradient.add_(stage.gradient)
        return stage.by_hidden.clone() if by_input else None

    def forget(self, stream: Any = None) -> None:
        """Drop all graphs, or those of one stream, whose partition is to be destroyed; their work must be over."""
        for key in [key for key in self._graphs if stream is None or key[0] == stream.cuda_stream]:
            del self._graphs[key]
        self._seen = {key for key in self._seen if stream is not None and key[0] != stream.cuda_stream}

    def _replay(self, kind: Kind, place: Place, hidden: Any, by_output: Any, inputs: AttentionInputs) -> Stage | None:
        """Run a unit as a graph; the stage holds its results. `None`: it has to run eagerly this time."""
        if place.slot is None or place.stream.cuda_stream == 0:  # the default stream cannot be captured
            return None
        family = self._family(kind, place, hidden, inputs)
        if family not in self._seen:
            self._seen.add(family)
            self.counters.eager += 1
            return None
        key = (*family, place.slot)
        state = self._eager.states[place.layer]
        shape_key = family[2:]
        stage = self._stages.get(shape_key)
        if stage is None:
            stage = self._stages[shape_key] = Stage(hidden, inputs, state)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(kind, place, stage, family)
            self._graphs[key] = graph
            if len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        stage.fill(hidden, by_output, inputs, state)
        with seeded(place.seed, self._eager.device):
            graph.replay()
        self.counters.replayed += 1
        return stage

    def _family(self, kind: Kind, place: Place, hidden: Any, inputs: AttentionInputs) -> tuple[Any, ...]:
        shape = (tuple(hidden.shape), tuple(inputs.cos.shape), inputs.mask is not None)
        return (place.stream.cuda_stream, kind, shape, self._structures[place.layer])

    def _known_target(self, kind: Kind, place: Place, hidden: Any, inputs: AttentionInputs) -> int | None:
        """For an eager unit: what timing chose, or the stream's SMs while nothing was timed."""
        family = self._family(kind, place, hidden, inputs)
        return self._targets.get(family, self._stream_target(place.stream))

    def _stream_target(self, stream: Any) -> int | None:
        """SMs of a stream that has fewer than the chip."""
        if stream.cuda_stream not in self._sms:
            sms = stream_sms(stream) if self._target.available else None
            self._sms[stream.cuda_stream] = sms if sms is not None and sms < self._chip_sms else None
        return self._sms[stream.cuda_stream]

    def _capture(self, kind: Kind, place: Place, stage: Stage, family: tuple[Any, ...]) -> Any:
        """Capture the unit on the stage; chooses the cuBLAS target the first time."""
        if family in self._targets:
            return self._captured(kind, place, stage, self._targets[family])
        sms = self._stream_target(place.stream)
        plain = self._captured(kind, place, stage, None)
        if sms is None:
            self._targets[family] = None
            return plain
        told = self._captured(kind, place, stage, sms)
        faster = self._ms(told) < self._ms(plain)
        self._targets[family] = sms if faster else None
        self.counters.targeted[f"{sms} SMs, {kind}, {family[2][0]}"] = faster
        return told if faster else plain

    def _ms(self, graph: Any) -> float:
        torch = self._torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(TIMED_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _captured(self, kind: Kind, place: Place, stage: Stage, sms: int | None) -> Any:
        torch = self._torch
        stream = place.stream
        module, state = self._eager.layers[place.layer].module, self._eager.states[place.layer]
        if stream.cuda_stream not in self._pools:
            self._pools[stream.cuda_stream] = torch.cuda.graph_pool_handle()
        parameters = [] if state is None else state.bind(stage.lora)
        graph = torch.cuda.CUDAGraph()
        try:
            with self._target.set_to(sms):
                # Not torch.cuda.graph: it waits for the GPU, collects garbage and empties torch's cache each time.
                graph.capture_begin(pool=self._pools[stream.cuda_stream], capture_error_mode="thread_local")
                try:
                    self._unit(kind, module, stage, state, parameters)
                finally:
                    graph.capture_end()
        finally:
            if state is not None:
                state.parameters = state.bind(state.compute)
        self.counters.captured += 1
        return graph

    def _unit(self, kind: Kind, module: Any, stage: Stage, state: LoraState | None, parameters: list[Any]) -> None:
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
