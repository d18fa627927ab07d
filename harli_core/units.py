"""The order of finetuning: which units one optimizer step is made of, and where a job stands in it.

The same cursor orders the simulator's arithmetic and the GPU engine's launches. Within a batch the order is
layer-major, so that one swap-in of a frozen layer serves every micro-batch::

    forward  layer 0: mb 0, mb 1, ..  layer 1: mb 0, mb 1, ..  ...  head+loss: mb 0, mb 1, ..
    backward layer L-1: mb 0, mb 1, ..                         ...  layer 0: mb 0, mb 1, ..
    optimizer layer 0, 1, .., L-1 (or several layers at a time)

Where memory does not hold the activations of all micro-batches at once, they go in groups: forward, head + loss and
backward of one group, then of the next one, and the optimizer at the end. Swaps are no members of the order: which frozen
layer leaves and which one comes follows from the walk (`harli_core/memory/window.py`, `LayerWindow.next_swap`).
"""

from __future__ import annotations

from dataclasses import dataclass

from harli_core.errors import ConfigError
from harli_core.types import UnitKind


@dataclass(frozen=True, slots=True)
class Unit:
    """One schedulable piece of work.

    ``layer`` is `None` for head + loss, the first of those that it updates for the optimizer, for which ``micro_batch`` is
    `None`. ``walk`` is its place in the
    window's walk over the frozen layers: ``layer`` going forward, ``2 * layers - 1 - layer`` coming back; head + loss
    belongs to the last layer's turn, the optimizer to the first layer's next one. ``part`` is which piece of a head + loss
    that is cut into several (each a share of the micro-batch's tokens), 0 elsewhere.
    """

    kind: UnitKind
    layer: int | None
    micro_batch: int | None
    walk: int
    part: int = 0


class UnitOrder:
    """The units of one optimizer step for ``layers`` layers and ``micro_batches`` micro-batches, in order."""

    def __init__(
        self,
        layers: int,
        micro_batches: int,
        *,
        group: int | None = None,
        head_parts: int = 1,
        optimizer_layers: int = 1,
    ) -> None:
        """Lay the units out, ``group`` micro-batches at a time (`None`: all), ``optimizer_layers`` to an optimizer unit.

        Counts are 1 or more (else `ConfigError`).
        """
        if layers < 1 or micro_batches < 1:
            raise ConfigError(
                f"a finetune step needs layers >= 1 and micro-batches >= 1, not {layers} and {micro_batches}"
            )
        if (group is not None and group < 1) or head_parts < 1 or optimizer_layers < 1:
            raise ConfigError(
                f"a finetune step needs group >= 1, head_parts >= 1 and optimizer_layers >= 1, "
                f"not {group} and {head_parts} and {optimizer_layers}"
            )
        self.layers = layers
        self.micro_batches = micro_batches
        units: list[Unit] = []
        for first in range(0, micro_batches, group or micro_batches):
            batches = range(first, min(first + (group or micro_batches), micro_batches))
            units += [Unit("forward", layer, mb, layer) for layer in range(layers) for mb in batches]
            units += [Unit("head_loss", None, mb, layers - 1, part) for mb in batches for part in range(head_parts)]
            units += [
                Unit("backward", layer, mb, 2 * layers - 1 - layer)
                for layer in reversed(range(layers))
                for mb in batches
            ]
        units += [Unit("optimizer", layer, None, 2 * layers - 1) for layer in range(0, layers, optimizer_layers)]
        self.units: tuple[Unit, ...] = tuple(units)

    def __len__(self) -> int:
        """Units in one optimizer step."""
        return len(self.units)


@dataclass(slots=True)
class UnitCursor:
    """Where a job stands: the unit at ``index`` is next or running, ``steps`` optimizer steps are complete."""

    order: UnitOrder
    index: int = 0
    steps: int = 0

    @property
    def unit(self) -> Unit:
        """The unit that is next or running."""
        return self.order.units[self.index]

    def advance_to(self, index: int) -> None:
        """Move to unit ``index`` of this optimizer step; ``len(order)`` starts the next step."""
        if index == len(self.order.units):
            self.index = 0
            self.steps += 1
        else:
            self.index = index
