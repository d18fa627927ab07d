"""The lent rows of a finetuning job on real memory: its window grows and shrinks with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backends.cuda.finetune.work import FinetuneWork
from backends.cuda.memory.reclaim import Reclaim
from backends.cuda.memory.views import space_tensor
from backends.cuda.serving.decoder import Decoder
from harli_core.errors import MemoryAccountingError, OutOfMemoryError
from harli_core.memory.geometry import GridGeometry
from harli_core.working_set import WorkingSet


def needs_of(layer_bytes: int, layers: int, geometry: GridGeometry, minimum_layers: int = 2) -> WorkingSet:
    """The rows that a window of frozen layers of ``layer_bytes`` takes; 0 bytes: weights are shared, nothing is lent.

    Embeddings, activations and LoRA states are torch's own memory. A layer lies in one run of adjacent blocks.
    """
    layer_blocks = -(-layer_bytes // geometry.block_bytes)
    least = min(minimum_layers, layers)

    def rows(resident: int) -> int:
        return -(-resident * layer_blocks // geometry.row_blocks)

    return WorkingSet(0, layer_blocks, layers, least, rows_wanted=rows(layers), rows_floor=rows(least))


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A row that came back: when it was asked for (host ms), and how long it took to the boundary that had it."""

    asked_ms: float
    took_ms: float


class JobMemory:
    """Moves a job towards a number of rows. Nothing in it waits; rows come back with `poll`."""

    def __init__(self, decoder: Decoder, needs: WorkingSet, scrub_stream: int) -> None:
        """Nothing is lent yet; ``scrub_stream`` clears rows that come back."""
        memory = decoder.memory
        self.needs = needs
        self.rows_held = 0
        self.lent_total = 0
        self.reclaimed_total = 0
        self.window_layers = 0
        self.reclaims: list[Reclaimed] = []
        self._asked_ms: dict[int, float] = {}
        self._decoder = decoder
        self._allocator = memory.allocator
        self._space = memory.provider.space
        self._on_gpu = memory.on_gpu
        self._reclaim = Reclaim(memory.allocator, memory.provider, scrub_stream)
        self._work: FinetuneWork | None = None
        self._lent: Any = None

    @property
    def reclaim_ms(self) -> list[float]:
        """How long each row took to come back."""
        return [row.took_ms for row in self.reclaims]

    @property
    def under_way(self) -> bool:
        """Whether rows are on their way back."""
        return bool(self._reclaim.rows_under_way)

    def slot(self, size_bytes: int, stream: Any) -> Any:
        """Memory for one frozen layer in the lent rows (`SlotMemory` of the engine); raises `OutOfMemoryError`."""
        import torch

        if self._lent is not None and stream is not None:
            stream.wait_event(self._lent)  # tokens may have been moved out of these rows just before
        handle = 0 if stream is None else stream.cuda_stream
        return space_tensor(self._space, torch.uint8, (size_bytes,), handle, on_gpu=self._on_gpu)

    def attach(self, work: FinetuneWork) -> None:
        """The job whose window the rows hold."""
        self._work = work
        self.window_layers = work.state.window_layers

    def grow(self, rows: int) -> None:
        """Borrow up to ``rows`` rows in all, and fill them with layers; empties sparse rows where free ones lack."""
        wanted = rows - self.rows_held
        if wanted <= 0:
            return
        lent = self._allocator.lend_rows(wanted)
        if lent < wanted and self._decoder.compact(wanted - lent) is not None:
            lent += self._allocator.lend_rows(wanted - lent)
        if not lent:
            return
        self.rows_held += lent
        self.lent_total += lent
        if self._on_gpu:
            import torch

            self._lent = torch.cuda.Event()
            self._lent.record(self._decoder.stream)
        self._decoder.totals_changed()
        self._fill()

    def shrink(self, rows: int, now_ms: float) -> None:
        """Ask for rows back down to ``rows`` (not below what the smallest window needs), furthest layers first."""
        surplus = self.rows_held - max(rows, self.needs.rows_floor if self._work is not None else 0)
        if surplus <= 0:
            return
        chosen = self._reclaim.request(surplus, self._give_up)
        self.rows_held -= len(chosen)
        self._asked_ms.update(dict.fromkeys(chosen, now_ms))

    def poll(self, now_ms: float) -> bool:
        """Move rows on; says whether some came back."""
        if not self.under_way:
            return False
        returned = self._reclaim.poll()
        if not returned:
            return False
        self.reclaimed_total += len(returned)
        self.reclaims += [Reclaimed(asked_ms := self._asked_ms.pop(row), now_ms - asked_ms) for row in returned]
        self._decoder.totals_changed()
        return True

    def release(self, now_ms: float, give_up: Callable[[], None]) -> None:
        """The job is gone: ``give_up`` drops its tensors, then all rows go back as their fences allow."""
        self._work = None
        self.window_layers = 0
        give_up()
        self.shrink(0, now_ms)

    def close(self) -> None:
        """All rows are back: give up what the way back needed; raises `MemoryAccountingError` otherwise."""
        if self.rows_held:
            raise MemoryAccountingError(f"{self.rows_held} rows are still lent to a job that is over")
        self._reclaim.close()

    def _fill(self) -> None:
        """Let as many layers be resident as the rows have room for."""
        work = self._work
        if work is None or not self.needs.layer_blocks:
            return
        row_blocks = self._allocator.geometry.row_blocks
        layers = min(self.needs.layers, self.rows_held * row_blocks // self.needs.layer_blocks)
        try:
            self.window_layers = work.grow_window(layers)
        except OutOfMemoryError:
            self.window_layers = work.state.window_layers

    def _give_up(self) -> bool:
        """Drop the layer that is used last; `False` where the window is at its smallest."""
        work = self._work
        if work is None or self.window_layers <= self.needs.minimum_layers:
            return False
        before = self.window_layers
        self.window_layers = work.shrink_window(before - 1)
        return self.window_layers < before
