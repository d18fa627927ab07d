"""Swapping the frozen layers of a window over the PCIe link, in the order in which the walk will need them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from backends.sim.pcie_link import PcieLink
from harli_core.memory.window import LayerWindow


class LayerCopies:
    """Which layers were copied to the GPU, and when: flat columns, as there may be hundreds of thousands."""

    def __init__(self, duration_ms: float) -> None:
        """Each copy takes ``duration_ms`` once it has the link."""
        self.duration_ms = duration_ms
        self._layers = array("h")
        self._ends_ms = array("d")

    def __len__(self) -> int:
        """Copies so far."""
        return len(self._layers)

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        """Layer, begin and end in ms of each copy, in order."""
        for layer, end_ms in zip(self._layers, self._ends_ms, strict=True):
            yield layer, end_ms - self.duration_ms, end_ms

    def add(self, layer: int, end_ms: float) -> None:
        """One more, done at ``end_ms``."""
        self._layers.append(layer)
        self._ends_ms.append(end_ms)

    def cut(self, count: int) -> None:
        """Keep the first ``count``."""
        del self._layers[count:], self._ends_ms[count:]


class LayerSwaps:
    """Which layers are on their way, and when each is ready.

    ``settled``: every layer is resident and ready, so nothing will be swapped until the window shrinks.

    Swapping out is dropping (the host keeps a pinned master copy), so only swapping in takes the link.
    """

    def __init__(self, window: LayerWindow, link: PcieLink, layer_bytes: int) -> None:
        """Nothing is resident at first; ``layer_bytes`` of 0 stands for weights that the server holds anyway."""
        self.window = window
        self._link = link
        self._layer_bytes = layer_bytes
        self._ready_ms: dict[int, float] = {}
        self.copies = LayerCopies(link.duration_ms(layer_bytes))
        self.settled = layer_bytes == 0

    def ready_ms(self, walk: int, now_ms: float) -> float:
        """When the layer of walk position ``walk`` can be used, having queued it and what comes after it."""
        if self.settled:
            return now_ms
        window = self.window
        while (swap := window.next_swap(walk)) is not None:
            if swap.drop is not None:
                self._drop(swap.drop)
            self._fetch(swap.load, now_ms)
        if len(window.resident) == window.layers:
            last_ms = max(self._ready_ms.values())
            self.settled = last_ms <= now_ms
        return max(now_ms, self._ready_ms[window.layer_at(walk)])

    @property
    def swaps_in(self) -> int:
        """Layers brought to the GPU so far, or on their way."""
        return len(self.copies)

    @property
    def swapped_bytes(self) -> int:
        """Bytes moved to the GPU so far."""
        return self._link.transferred_bytes

    def shrink(self, walk: int) -> None:
        """Drop what exceeds the window's capacity, furthest from its next use first."""
        while len(self.window.resident) > self.window.capacity:
            self._drop(self.window.furthest(walk))

    def snapshot(self) -> tuple[tuple[int, ...], dict[int, float], float, int, int, bool]:
        """State to `restore`; taken before a look ahead that may have to be undone."""
        link = self._link
        resident = tuple(self.window.resident)
        return resident, dict(self._ready_ms), link.free_at_ms, link.transferred_bytes, len(self.copies), self.settled

    def restore(self, state: tuple[tuple[int, ...], dict[int, float], float, int, int, bool]) -> None:
        """Undo what was queued since the snapshot; the window's capacity is as it was then."""
        resident, ready_ms, free_at_ms, transferred_bytes, copies, self.settled = state
        self.copies.cut(copies)
        self.window.reset(resident)
        self._ready_ms = dict(ready_ms)
        self._link.free_at_ms = free_at_ms
        self._link.transferred_bytes = transferred_bytes

    def _fetch(self, layer: int, now_ms: float) -> None:
        self.window.insert(layer)
        self._ready_ms[layer] = done_ms = self._link.transfer(now_ms, self._layer_bytes)
        self.copies.add(layer, done_ms)

    def _drop(self, layer: int | None) -> None:
        assert layer is not None, "a full window always has a layer to give up"
        self.window.drop(layer)
        del self._ready_ms[layer]
        self.settled = False
