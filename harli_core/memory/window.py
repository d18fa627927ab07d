"""Which frozen layers of the finetuned model are resident (paper section 4.3)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from harli_core.errors import ConfigError, MemoryAccountingError


@dataclass(frozen=True, slots=True)
class Swap:
    """A swap unit: ``drop`` leaves (`None`: there is room), then ``load`` comes from host memory into its place."""

    drop: int | None
    load: int


class LayerWindow:
    """The resident layers, and what to drop and prefetch as training walks forward and then backward, over and over.

    ::

        position   0   1  ...  L-1 | L    ...  2L-2  2L-1 | 0 ...
        layer      0   1  ...  L-1 | L-1  ...   1     0   | 0 ...
                   forward         | backward             | next micro-batch

    The order of use is known, so the best set at any position is the ``capacity`` layers that are used next (Belady):
    `next_missing` names the nearest of them that is absent, `furthest` the resident layer that is used last.
    ``capacity`` may change at any time; while more layers than that are resident, the caller drops `furthest`.
    ``minimum`` is the fewest places a window can run with: one for the layer in use, one for the next. A swap drops
    first and loads then, so ``minimum - 1`` layers may be resident for that time, never fewer.
    """

    def __init__(self, layers: int, minimum: int = 2) -> None:
        """Start with no layer resident and ``capacity`` of all; raises `ConfigError` unless 1 <= minimum <= layers."""
        if not 1 <= minimum <= layers:
            raise ConfigError(f"a window needs 1 <= minimum <= layers, got minimum {minimum}, layers {layers}")
        self.layers = layers
        self.minimum = minimum
        self._capacity = layers
        self._resident: set[int] = set()
        walk = [self.layer_at(position) for position in range(2 * layers)]
        self._next_uses = tuple(tuple(dict.fromkeys(walk[at:] + walk[:at])) for at in range(2 * layers))

    @property
    def capacity(self) -> int:
        """Layers that may be resident."""
        return self._capacity

    @capacity.setter
    def capacity(self, layers: int) -> None:
        if not self.minimum <= layers <= self.layers:
            raise MemoryAccountingError(f"window capacity {layers}: must be {self.minimum} to {self.layers} layers")
        self._capacity = layers

    @property
    def resident(self) -> tuple[int, ...]:
        """Resident layers, ascending."""
        return tuple(sorted(self._resident))

    @property
    def excess(self) -> int:
        """Resident layers beyond the capacity, which the caller has to drop."""
        return max(0, len(self._resident) - self._capacity)

    def layer_at(self, position: int) -> int:
        """Layer in use at ``position``, 0 to ``2 * layers - 1``."""
        return min(position, 2 * self.layers - 1 - position)

    def distance(self, layer: int, position: int) -> int:
        """Positions from ``position`` to the next use of ``layer``, 0 if it is in use there."""
        cycle = 2 * self.layers
        return min((layer - position) % cycle, (cycle - 1 - layer - position) % cycle)

    def furthest(self, position: int) -> int | None:
        """Resident layer to drop first: the one used last, never the one in use; `None` if none may go."""
        if len(self._resident) < self.minimum:
            return None
        later = reversed(self._next_uses[position][1:])
        return next((layer for layer in later if layer in self._resident), None)

    def next_missing(self, position: int) -> int | None:
        """Layer to load next: the nearest absent one among the ``capacity`` layers used next; `None` if all are there.

        It is `None` too where a load would only push out a layer that is used sooner. A full window must drop
        `furthest` before the load.
        """
        soon = self._next_uses[position][: self._capacity]
        return next((layer for layer in soon if layer not in self._resident), None)

    def next_swap(self, position: int) -> Swap | None:
        """The swap to make next, as `next_missing` and `furthest` have it; `None` when nothing needs to move.

        The layer in use at ``position`` comes first, then those that are used after it. Carry it out with `drop` and
        `insert`, and ask again.
        """
        load = self.next_missing(position)
        if load is None:
            return None
        return Swap(self.furthest(position) if len(self._resident) >= self._capacity else None, load)

    def insert(self, layer: int) -> None:
        """Make ``layer`` resident; raises `MemoryAccountingError` if it is, or the window is full."""
        if not 0 <= layer < self.layers or layer in self._resident:
            raise MemoryAccountingError(f"cannot insert layer {layer} of {self.layers}: resident, or no such layer")
        if len(self._resident) >= self._capacity:
            raise MemoryAccountingError(f"cannot insert layer {layer}: all {self._capacity} places are taken")
        self._resident.add(layer)

    def drop(self, layer: int) -> None:
        """Make ``layer`` absent; raises `MemoryAccountingError` if it is, or if too few would stay."""
        if layer not in self._resident:
            raise MemoryAccountingError(f"cannot drop layer {layer}: it is not resident")
        if len(self._resident) < self.minimum:
            raise MemoryAccountingError(f"cannot drop layer {layer}: {self.minimum - 1} or more must stay")
        self._resident.remove(layer)

    def reset(self, layers: Collection[int]) -> None:
        """Hold exactly ``layers``, as at an earlier moment; raises `MemoryAccountingError` where they do not fit."""
        if len(layers) > self._capacity or not set(layers) <= set(range(self.layers)):
            raise MemoryAccountingError(f"window: cannot hold layers {sorted(layers)} in {self._capacity} places")
        self._resident = set(layers)

    def check_integrity(self) -> None:
        """Raise `MemoryAccountingError` unless resident layers exist and the capacity is within its bounds."""
        if not self._resident <= set(range(self.layers)):
            raise MemoryAccountingError(f"window: resident layers {self.resident} of a model of {self.layers}")
        if not self.minimum <= self._capacity <= self.layers:
            raise MemoryAccountingError(f"window: capacity {self._capacity} outside {self.minimum} to {self.layers}")
