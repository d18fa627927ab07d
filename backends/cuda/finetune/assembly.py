"""From a PEFT model and a feed to a running engine: weights to their places, the adapter to the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.cuda.finetune.checkpoint import CheckpointWriter
from backends.cuda.finetune.cuda_capture import CudaCapture
from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.feed import BatchFeed
from backends.cuda.finetune.frozen_layer import FrozenLayout, bind_frozen, host_master, take_tensors
from backends.cuda.finetune.fused_layer import fuse, triton_kernels
from backends.cuda.finetune.layer_copies import BESIDE_DECODE
from backends.cuda.finetune.layer_graphs import Capture, GraphRunner
from backends.cuda.finetune.layer_runner import EagerRunner, LayerRunner
from backends.cuda.finetune.layer_weights import HeldWeights, LayerWeights, SlotMemory, WindowedWeights
from backends.cuda.finetune.lora_states import LoraStates
from backends.cuda.finetune.optimizer_step import UnitSettings
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.step_report import StepReport
from backends.cuda.finetune.submodel import CutModel, Submodel
from harli_core.errors import JobError


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The served model's own tensors: by the plain names of transformers, inside each layer and around them.

    `fused_weights.unfused` makes the layers' mappings from fused ones. Nothing is copied, nothing is ever swapped.
    """

    layers: Sequence[Mapping[str, Any]]
    embedding: Any
    norm: Any
    head: Any


def build_engine(
    peft_model: Any,
    feed: BatchFeed,
    recipe: Recipe,
    *,
    device: Any,
    window_layers: int | None = None,
    shared: SharedWeights | None = None,
    slot_memory: SlotMemory | None = None,
    settings: UnitSettings | None = None,
    graphs: bool = True,
    capture: Capture | None = None,
    checkpoints: CheckpointWriter | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> FinetuneEngine:
    """Put everything in place; raises `JobError` or `OutOfMemoryError` for what cannot be.

    On the CPU all layers stay where they are unless ``window_layers`` says otherwise; on a GPU that means all layers in
    slots, with their masters on the host. ``slot_memory`` is where the slots come from (`None`: torch). ``graphs``
    captures the layers' units on a GPU, ``capture`` is another way to do that. On a GPU that Triton is installed for, our
    kernels run between a layer's products. The model belongs to the engine afterwards.
    """
    import torch

    device = torch.device(device)
    model = CutModel(peft_model)
    dtype = _compute_dtype(model)
    if shared is not None and window_layers is not None:
        raise JobError("window_layers: a job on shared weights has no window, leave it out")
    if shared is not None:
        for layer, tensors in zip(model.layers, shared.layers, strict=True):
            take_tensors(layer, tensors)
        around = {"embedding": shared.embedding, "norm": shared.norm, "head": shared.head}
        for name, tensor in around.items():
            take_tensors(getattr(model, name), {"weight": tensor})
    weights, forget = _weights(model, device, window_layers, slot_memory, held=shared is not None)
    if shared is None:
        _move_around(model, device)
    model.rotary = type(model.rotary)(model.config).to(device)
    states = LoraStates(model, device, dtype, recipe)
    if device.type == "cuda" and (kernels := triton_kernels(device)) is not None:
        fuse(model, kernels)
    eager = EagerRunner(model.layers, states.layers, device)
    if capture is None and graphs and device.type == "cuda":
        capture = CudaCapture(device)
    runner: LayerRunner = eager if capture is None else GraphRunner(eager, capture)
    engine = FinetuneEngine(
        model,
        states,
        weights,
        feed,
        recipe,
        device,
        settings,
        runner=runner,
        checkpoints=checkpoints,
        on_step=on_step,
    )
    forget.append(engine.forget_kept)
    return engine


def _compute_dtype(model: CutModel) -> Any:
    dtypes = {parameter.dtype for piece in model.submodels for _, parameter in piece.frozen}
    if len(dtypes) != 1:
        raise JobError(
            f"the model's weights have several dtypes ({', '.join(sorted(map(str, dtypes)))}); load it in one"
        )
    return dtypes.pop()


def _weights(
    model: CutModel, device: Any, window_layers: int | None, slot_memory: SlotMemory | None, *, held: bool
) -> tuple[LayerWeights, list[Callable[[int], None]]]:
    forget: list[Callable[[int], None]] = []

    def dropped(layer: int) -> None:
        for call in forget:
            call(layer)

    if held or (window_layers is None and device.type == "cpu"):
        return HeldWeights(model.layers), forget
    layouts = {FrozenLayout.of(layer) for layer in model.layers}
    if len(layouts) != 1:
        raise JobError("the layers differ in their frozen weights, so they cannot take each other's place in a window")
    layout = layouts.pop()
    masters = [host_master(layer, layout, pinned=device.type == "cuda") for layer in model.layers]
    window = WindowedWeights(
        model.layers,
        layout,
        masters,
        len(model.layers) if window_layers is None else window_layers,
        device,
        slot_memory,
        dropped,
        None if slot_memory is None else BESIDE_DECODE,
    )
    return window, forget


def _move_around(model: CutModel, device: Any) -> None:
    """Embedding, norm and head go to the device for good; a head tied to the embedding stays one with it."""
    moved: dict[int, Any] = {}

    def there(piece: Submodel) -> None:
        names, tensors = [], []
        for name, parameter in piece.frozen:
            if id(parameter) not in moved:
                moved[id(parameter)] = parameter.detach().to(device)
            names.append(name)
            tensors.append(moved[id(parameter)])
        bind_frozen(piece, names, tensors)

    for piece in (model.embedding, model.norm, model.head):
        there(piece)
