"""Where the frozen weights of the layers are while units run: at home for good, or in a window of slots on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from backends.cuda.finetune.frozen_layer import FrozenLayout, bind_frozen
from backends.cuda.finetune.layer_copies import LayerCopies, LayerCopy, TorchCopyStream
from backends.cuda.finetune.submodel import Submodel
from harli_core.errors import ConfigError, OutOfMemoryError
from harli_core.memory.window import LayerWindow

SlotMemory = Callable[[int, Any], Any]
"""``allocate(size_bytes, stream)``: a uint8 tensor on the device, freed in the order of ``stream`` with its last reference.

Raises `OutOfMemoryError` where there is no room.
"""


class LayerWeights(Protocol):
    """Makes a layer's frozen weights usable for the unit that needs them."""

    @property
    def capacity(self) -> int:
        """Layers that may be resident."""
        ...

    def prefetch(self, walk: int) -> None:
        """Queue the swaps that walk position ``walk`` asks for."""
        ...

    def feed(self) -> None:
        """Let queued swaps go on, as far as they may; cheap, and to be called often."""
        ...

    def ready(self, walk: int) -> bool:
        """Whether the layer of ``walk`` is there now."""
        ...

    def use(self, walk: int, stream: Any) -> int | None:
        """Let ``stream`` wait for the layer of ``walk``; returns what names its slot in captured graphs.

        `None`: the layer is nowhere that lasts, so nothing may be captured.
        """
        ...

    def used(self, walk: int, event: Any) -> None:
        """The work that reads the layer of ``walk`` is done when ``event`` is (`None`: it is done)."""
        ...

    def resize(self, layers: int, walk: int) -> int:
        """Let ``layers`` layers be resident, as far as memory allows; returns how many may be."""
        ...

    def release(self) -> None:
        """Give all device memory of the layers back, in stream order; nothing can be used any more."""
        ...


class HeldWeights:
    """All layers stay where they are: on the host for a CPU job, in the serving engine's tensors for a shared model."""

    def __init__(self, layers: Sequence[Submodel]) -> None:
        """The modules of ``layers`` compute on their weights already."""
        self._addresses = [
            layer.frozen[0][1].data_ptr() if layer.frozen else index for index, layer in enumerate(layers)
        ]
        self._walk = LayerWindow(len(layers), minimum=1)

    @property
    def capacity(self) -> int:
        """All of them."""
        return self._walk.layers

    def prefetch(self, walk: int) -> None:
        """Nothing is ever missing."""

    def feed(self) -> None:
        """Nothing is queued."""

    def ready(self, walk: int) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def use(self, walk: int, stream: Any) -> int | None:  # noqa: ARG002
        """The layer stands for its own slot."""
        return self._walk.layer_at(walk)

    def used(self, walk: int, event: Any) -> None:
        """Nothing will be overwritten."""

    def resize(self, layers: int, walk: int) -> int:  # noqa: ARG002
        """There is no window to resize."""
        return self.capacity

    def release(self) -> None:
        """They are somebody else's."""


class Slot:
    """Device memory for one layer, the copy that fills it, and the event that orders its overwriting."""

    __slots__ = ("copy", "flat", "layer", "read", "views")

    def __init__(self, flat: Any, layout: FrozenLayout) -> None:
        """Empty."""
        self.flat, self.views = flat, layout.views(flat)
        self.layer: int | None = None
        self.copy: LayerCopy | None = None
        self.read: Any = None


class WindowedWeights:
    """Layers pass through ``capacity`` slots; the master of each stays on the host, so dropping one is free.

    Copies run on a stream of their own (`LayerCopies`). A slot is overwritten, and its memory given back, only behind the
    event of the last unit that read it, and a unit's stream waits for the event of the copy that it reads. Slots have fixed
    addresses: a graph captured on a slot serves whichever layer is in it.
    """

    def __init__(
        self,
        layers: Sequence[Submodel],
        layout: FrozenLayout,
        masters: Sequence[Any],
        capacity: int,
        device: Any,
        allocate: SlotMemory | None = None,
        dropped: Callable[[int], None] | None = None,
        most_pieces: int | None = None,
    ) -> None:
        """``dropped(layer)`` is called before a layer's weights go, for whoever still refers to them.

        ``most_pieces``: see `LayerCopies`.
        """
        import torch

        self._torch = torch
        self.window = LayerWindow(len(layers), min(2, len(layers)))
        self.swapped_bytes = 0
        self.dropped = dropped
        self._layers, self._layout, self._masters = layers, layout, masters
        self._names = [[name for name, _ in layer.frozen] for layer in layers]
        self._home = [layout.views(master) for master in masters]
        self._device = device
        self._allocate = allocate or self._torch_memory
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies = None if self._stream is None else LayerCopies(TorchCopyStream(self._stream), most_pieces)
        self._free: list[Slot] = []
        self._held: dict[int, Slot] = {}
        self._bound: list[Slot | None] = [None] * len(layers)
        if not self.window.minimum <= capacity <= len(layers):
            raise ConfigError(f"window_layers = {capacity}: must be {self.window.minimum} to {len(layers)}")
        self.window.capacity = self.window.minimum
        self.resize(capacity, 0)
        if self.capacity < self.window.minimum:
            raise OutOfMemoryError(
                f"no room for {self.window.minimum} frozen layers of {layout.size_bytes / 2**20:.0f} MiB, "
                "the fewest that a job needs"
            )

    @property
    def capacity(self) -> int:
        """Layers that may be resident: there is a slot for each."""
        return len(self._free) + len(self._held)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a slot."""
        return self._layout.size_bytes

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers in a slot, or on their way into one."""
        return self.window.resident

    def prefetch(self, walk: int) -> None:
        """See `LayerWeights`."""
        while (swap := self.window.next_swap(walk)) is not None:
            if swap.drop is not None:
                self._drop(swap.drop)
            slot = self._free.pop()
            self.window.insert(swap.load)
            self._load(slot, swap.load)

    def feed(self) -> None:
        """See `LayerWeights`."""
        if self._copies is not None:
            self._copies.feed()

    def ready(self, walk: int) -> bool:
        """See `LayerWeights`."""
        self.prefetch(walk)
        self.feed()
        copy = self._held[self.window.layer_at(walk)].copy
        return copy is None or copy.over

    def use(self, walk: int, stream: Any) -> int | None:
        """See `LayerWeights`."""
        self.prefetch(walk)
        layer = self.window.layer_at(walk)
        slot = self._held[layer]
        if slot.copy is not None and self._copies is not None:
            self._copies.finish(slot.copy)
            stream.wait_event(slot.copy.loaded)
        if self._bound[layer] is not slot:
            bind_frozen(self._layers[layer], self._names[layer], slot.views)
            self._bound[layer] = slot
        address: int = slot.flat.data_ptr()
        return address

    def used(self, walk: int, event: Any) -> None:
        """See `LayerWeights`."""
        self._held[self.window.layer_at(walk)].read = event

    def resize(self, layers: int, walk: int) -> int:
        """See `LayerWeights`."""
        layers = max(self.window.minimum, min(layers, self.window.layers))
        while self.capacity < layers:
            try:
                self._free.append(Slot(self._allocate(self._layout.size_bytes, self._stream), self._layout))
            except OutOfMemoryError:
                break
        layers = min(layers, max(self.capacity, self.window.minimum))
        self.window.capacity = layers
        while self.window.excess:
            layer = self.window.furthest(walk)
            assert layer is not None, "more than the minimum are resident"
            self._drop(layer)
        while self.capacity > layers:
            self._fence(self._free.pop())
        return layers

    def release(self) -> None:
        """See `LayerWeights`; the modules refer to the masters on the host again."""
        for layer, slot in self._held.items():
            if self.dropped is not None:
                self.dropped(layer)
            self._cancel(slot)
            if self._bound[layer] is slot:
                bind_frozen(self._layers[layer], self._names[layer], self._home[layer])
                self._bound[layer] = None
        self._free += self._held.values()
        self._held.clear()
        while self._free:
            self._fence(self._free.pop())

    def check_integrity(self) -> None:
        """Assert that slots and the core's window agree."""
        self.window.check_integrity()
        assert set(self._held) == set(self.window.resident)
        assert all(slot.layer == layer for layer, slot in self._held.items())
        assert self.capacity == self.window.capacity
        assert all(slot.layer is None for slot in self._free)

    def _drop(self, layer: int) -> None:
        if self.dropped is not None:
            self.dropped(layer)
        self.window.drop(layer)
        slot = self._held.pop(layer)
        slot.layer = None
        self._cancel(slot)
        if self._bound[layer] is slot:  # a module that went on referring to the slot would keep its memory
            bind_frozen(self._layers[layer], self._names[layer], self._home[layer])
            self._bound[layer] = None
        self._free.append(slot)

    def _load(self, slot: Slot, layer: int) -> None:
        slot.layer = layer
        self._held[layer] = slot
        self.swapped_bytes += self._layout.size_bytes
        if self._copies is None:
            slot.flat.copy_(self._masters[layer])
        else:
            slot.copy = self._copies.begin(slot.flat, self._masters[layer], slot.read)

    def _cancel(self, slot: Slot) -> None:
        """Nothing more is copied into the slot, and nobody refers to its memory for that."""
        if slot.copy is not None and self._copies is not None:
            self._copies.cancel(slot.copy)
        slot.copy = None

    def _fence(self, slot: Slot) -> None:
        """Order what the copy stream does next, freeing included, behind the last unit that read the slot."""
        if self._stream is not None and slot.read is not None:
            self._stream.wait_event(slot.read)
        slot.read = None

    def _torch_memory(self, size_bytes: int, stream: Any) -> Any:
        torch = self._torch
        if stream is None:
            return torch.empty(size_bytes, dtype=torch.uint8)
        try:
            with torch.cuda.stream(stream):
                return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError:
            raise OutOfMemoryError(f"no {size_bytes} bytes of GPU memory for a frozen layer") from None
